"""Write for each train row the one of a model's own answers that is closest to the reference.

    python -m eval.relabel checkpoint=runs/pairs/model samples=12 output=runs/relabelled.jsonl
    python -m train checkpoint=runs/pairs/model data=debian data.targets=runs/relabelled.jsonl

Sequence-level interpolation (Kim & Rush, 2016, section 3.3): such targets are within the model's reach and still near
the reference, so that greedy decoding learns more from them than from either. Candidates are the greedy answer at
full depth and ``samples`` drawn ones; each row's draws depend on ``seed`` and its id alone.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.config import DecoderName, RelabelConfig
from calm.device import choose_device

from .common import (
    Stamp,
    choose_dtype,
    choose_model,
    choose_runner,
    corpus_settings,
    finish,
    open_decoder,
    say,
)

if TYPE_CHECKING:
    from calm.decode_spec import DecodeSpec
    from calm.models.speaking import SpeakingModel
    from calm.policies import Policy
    from calm.records import DecodeTrace, Example

BLOCK = 512  # rows whose candidates are held at a time


@dataclass(frozen=True)
class Drawn:
    """How candidates are drawn."""

    temperature: float
    top_p: float
    seed: int


class CandidateDecoder:
    """Answers at full depth of examples called ``ID#k``: greedy for k = 0, drawn for all others."""

    def __init__(self, model: "SpeakingModel", spec: "DecodeSpec", drawn: Drawn) -> None:
        from serve.decoder import EngineDecoder

        self._engine, self._drawn = EngineDecoder(model, spec).engine, drawn

    def __call__(self, examples: "Sequence[Example]", policy: "Policy") -> "list[DecodeTrace]":
        from serve.decoder import trace_of
        from serve.options import RequestOptions

        greedy = RequestOptions(policy=policy)
        options = []
        for example in examples:
            drawn = replace(
                greedy, temperature=self._drawn.temperature, top_p=self._drawn.top_p, seed=self._seed(example.id)
            )
            options.append(greedy if example.id.endswith("#0") else drawn)
        names = [example.id for example in examples]
        return [trace_of(each) for each in self._engine.generate([e.source for e in examples], options, names=names)]

    def _seed(self, name: str) -> int:
        return int.from_bytes(sha256(f"{self._drawn.seed}/{name}".encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Choice:
    """What became of one row."""

    target: str
    greedy: float
    best: float


def run(config: RelabelConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.relabel", config)
    folder, device = choose_model(config.checkpoint), choose_device(config.device)
    from calm.checkpoint import write_atomic
    from calm.data import load_corpus
    from calm.data.splits import one_per_family, sample
    from calm.decode_spec import DecodeSpec
    from calm.progress import Progress

    drawn = Drawn(config.temperature, config.top_p, config.seed)
    spec = DecodeSpec(
        str(folder), device, choose_dtype(config.precision), DecoderName.engine, config.batch_size,
        **choose_runner(DecoderName.engine, config.runner, device, folder),
        make=partial(CandidateDecoder, drawn=drawn),
    )  # fmt: skip
    output = Path(config.output) if config.output else run_dir / "relabelled.jsonl"
    with open_decoder(spec, config.processes) as decode:
        if decode is None:
            return 0
        data = replace(corpus_settings(config.data, decode.model.settings.data), targets=None)
        corpus = load_corpus(data, 0, ("train",), decode.model.tokenizer)
        rows = corpus.splits["train"]
        rows = sample(one_per_family(rows) if config.one_per_family else rows, config.max_rows)
        say(f"corpus: {corpus.name}; {len(rows)} train rows, {config.samples} samples each beside the greedy answer")
        lines, chosen = [], []
        with Progress(len(rows), "relabel", "row") as bar:
            for block, found in _choices(decode, rows, config):
                chosen += found
                lines += [(row.id, choice.target) for row, choice in zip(block, found, strict=True)]
                bar.update(len(block))
    kept = [{"id": name, "target": target} for name, target in lines if target.strip()]
    write_atomic(output, "".join(_line(each) for each in kept))
    summary = {"checkpoint": str(folder), "corpus": {"name": corpus.name, "content_hash": corpus.content_hash}}
    counted = _counted(chosen, len(kept))
    say(
        f"{output}: {counted['rows']} rows; ROUGE-L to the reference {counted['greedy_rouge_l']:.4f} greedy, "
        f"{counted['chosen_rouge_l']:.4f} chosen; {counted['drawn']:.1%} of the targets were drawn"
    )
    finish({**stamp.values(), **summary, "output": str(output), "relabel": counted}, run_dir)
    return 0


def _line(values: dict[str, str]) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"


def _choices(
    decode: Any, rows: "Sequence[Example]", config: RelabelConfig
) -> "Iterator[tuple[Sequence[Example], list[Choice]]]":
    from calm.policies import Full

    each = config.samples + 1
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        asked = [replace(row, id=f"{row.id}#{k}") for row in block for k in range(each)]
        texts = [trace.text for trace in decode(asked, Full())]
        yield (
            block,
            [choose(row.target, texts[i * each : (i + 1) * each], config.margin) for i, row in enumerate(block)],
        )


def choose(reference: str, candidates: "Sequence[str]", margin: float) -> Choice:
    """The candidate of the highest ROUGE-L; the first one, the greedy answer, unless another beats it by ``margin``."""
    from calm.metrics import rouge_l_many

    scores = [float(score) for score in rouge_l_many(list(candidates), [reference] * len(candidates))]
    best = max(range(len(scores)), key=lambda i: (scores[i], -i))
    if scores[best] <= scores[0] + margin:
        best = 0
    return Choice(candidates[best], scores[0], scores[best])


def _counted(chosen: "Sequence[Choice]", kept: int) -> dict[str, Any]:
    count = len(chosen)
    return {
        "rows": kept,
        "empty": count - kept,
        "greedy_rouge_l": sum(each.greedy for each in chosen) / count,
        "chosen_rouge_l": sum(each.best for each in chosen) / count,
        "drawn": sum(each.best > each.greedy for each in chosen) / count,
    }


main = program("relabel", RelabelConfig, run)

if __name__ == "__main__":
    main()
