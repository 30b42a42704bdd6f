"""What a run of eval.gpu_check is asked for, and so each of its parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calm.checkpoint import finite, write_json
from calm.config import BatchRule, Measure, TraceKind
from calm.errors import ConfigError

Record = dict[str, Any]
MEASURES = [Measure.softmax, Measure.state, Measure.classifier]
RULES = [BatchRule.own, BatchRule.compact, BatchRule.sync]
TRACES = [TraceKind.tight, TraceKind.wide]
SOURCE = 512  # tokens
UNFINISHED = "unfinished"


@dataclass
class Asked:
    """What a run is asked for.

    Attributes:
        parts: in order; empty: all.
        seconds: of the whole run; of a part's own process: what is left of them.
        shapes: the small and the large one that are timed.
        out: folder of the record.
        carried: folder of the corpus that was brought along (eval.gpu_corpus).
        record: of the process of one part: the file that it leaves.
        kept: what that part has found so far.
    """

    device: str = "cuda"
    parts: list[str] = field(default_factory=list)
    seconds: float = 540.0
    shapes: list[str] = field(default_factory=lambda: ["small", "base"])
    out: Path = Path("results/gpu")
    carried: Path = Path(".gpu/debian")
    record: Path | None = None
    kept: Record = field(default_factory=dict)

    def keep(self, found: Record) -> None:
        """Of a part: leave this, for a device that hangs or a process that dies takes the rest along."""
        self.kept = {**self.kept, **found}
        if self.record is not None:
            write_json(self.record, finite({"status": UNFINISHED, **self.kept}))

    @property
    def rehearsal(self) -> bool:
        """Figures of a CPU, which say nothing of a GPU."""
        return self.device == "cpu"


def asked_for(argv: Sequence[str], known: Sequence[str]) -> Asked:
    """Raise ConfigError for what is none."""
    asked = Asked()
    for each in argv:
        name, equals, value = each.partition("=")
        match name:
            case "device" if value in ("cuda", "cpu"):
                asked.device = value
            case "parts" if equals and all(part in known for part in value.split(",")):
                asked.parts = value.split(",")
            case "seconds" if value.replace(".", "", 1).isdecimal():
                asked.seconds = float(value)
            case "shapes" if len(value.split(",")) == 2:
                asked.shapes = value.split(",")
            case "out" if value:
                asked.out = Path(value)
            case "carried" if value:
                asked.carried = Path(value)
            case "record" if value and len(asked.parts) == 1:
                asked.record = Path(value)
            case _:
                raise ConfigError(
                    f"{each!r:.80} is not understood; give device=cuda|cpu, parts={','.join(known)}, seconds=NUMBER, "
                    "shapes=SMALL,LARGE, out=FOLDER or carried=FOLDER"
                )
    return asked


Part = Callable[[Asked], Record]
