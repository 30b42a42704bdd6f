"""One request as the load client saw it, and the file that keeps all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class ErrorKind(str, Enum):
    """Why a request brought no answer.

    refused: 429 or 503: the server takes no more now. status: any other status but 200. failed: the stream itself told
    of an error. timeout: no end within the time allowed. disconnected: the connection could not be made, or ended
    before the answer. malformed: what came is no stream of completions.
    """

    refused = "refused"
    status = "status"
    failed = "failed"
    timeout = "timeout"
    disconnected = "disconnected"
    malformed = "malformed"


LOST = (ErrorKind.timeout, ErrorKind.disconnected, ErrorKind.malformed)


class Counted(str, Enum):
    """What says how many tokens an answer has: the server's usage, our tokenizer on its text, or its chunks."""

    usage = "usage"
    tokenizer = "tokenizer"
    chunks = "chunks"


@dataclass(frozen=True)
class Sample:
    """One request. Times are seconds after the schedule's zero.

    Attributes:
        sent: just before a connection was looked for.
        ended: when nothing more was to come.
        chunks: when each chunk with choices came; never empty where there is no error.
        tokens: of the answer; of one that failed, 0.
        prompt_tokens: None where nobody says.
        exit_layer, layers_skipped, certified: of an answer, where the server tells them: means over its tokens, and
            whether its threshold's certificate speaks of it.
        detail: of an error, one line.
        retries: 1 where the server had closed the idle connection that the request was first sent on.
    """

    number: int
    scheduled: float
    sent: float
    ended: float
    chunks: tuple[float, ...] = ()
    tokens: int = 0
    prompt_tokens: int | None = None
    counted: Counted | None = None
    exit_layer: float | None = None
    layers_skipped: float | None = None
    certified: bool | None = None
    error: ErrorKind | None = None
    status: int | None = None
    detail: str = ""
    retries: int = 0

    @property
    def lost(self) -> bool:
        """It got no answer, not even a refusal."""
        return self.error in LOST

    @property
    def first(self) -> float:
        return self.chunks[0]

    @property
    def last(self) -> float:
        return self.chunks[-1]


def answered(samples: Sequence[Sample]) -> list[Sample]:
    """Those without an error."""
    return [sample for sample in samples if sample.error is None]


def write_samples(path: Path, cells: Sequence[tuple[dict[str, Any], Sequence[Sample]]]) -> None:
    """One row a request.

    Args:
        cells: columns that all rows of a cell share, and its requests.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{**shared, **_row(sample)} for shared, samples in cells for sample in samples]
    kinds = [
        ("way", pa.string()), ("rate", pa.float64()), ("number", pa.int64()), ("scheduled_s", pa.float64()),
        ("sent_s", pa.float64()), ("first_s", pa.float64()), ("last_s", pa.float64()), ("ended_s", pa.float64()),
        ("tokens", pa.int64()), ("prompt_tokens", pa.int64()), ("counted", pa.string()), ("error", pa.string()),
        ("exit_layer", pa.float64()), ("layers_skipped", pa.float64()), ("certified", pa.bool_()),
        ("status", pa.int64()), ("detail", pa.string()), ("retries", pa.int64()), ("chunks_s", pa.list_(pa.float64())),
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(kinds)), path, compression="zstd")


def read_samples(path: Path) -> list[Sample]:
    """What ``write_samples`` wrote of one cell."""
    import pyarrow.parquet as pq

    return [
        Sample(
            number=row["number"],
            scheduled=row["scheduled_s"],
            sent=row["sent_s"],
            ended=row["ended_s"],
            chunks=tuple(row["chunks_s"]),
            tokens=row["tokens"],
            prompt_tokens=row["prompt_tokens"],
            counted=None if row["counted"] is None else Counted(row["counted"]),
            exit_layer=row["exit_layer"],
            layers_skipped=row["layers_skipped"],
            certified=row["certified"],
            error=None if row["error"] is None else ErrorKind(row["error"]),
            status=row["status"],
            detail=row["detail"],
            retries=row["retries"],
        )
        for row in pq.read_table(path).to_pylist()
    ]


def _row(sample: Sample) -> dict[str, Any]:
    return {
        "number": sample.number,
        "scheduled_s": sample.scheduled,
        "sent_s": sample.sent,
        "first_s": sample.first if sample.chunks else None,
        "last_s": sample.last if sample.chunks else None,
        "ended_s": sample.ended,
        "tokens": sample.tokens,
        "prompt_tokens": sample.prompt_tokens,
        "counted": None if sample.counted is None else sample.counted.value,
        "exit_layer": sample.exit_layer,
        "layers_skipped": sample.layers_skipped,
        "certified": sample.certified,
        "error": None if sample.error is None else sample.error.value,
        "status": sample.status,
        "detail": sample.detail,
        "retries": sample.retries,
        "chunks_s": list(sample.chunks),
    }
