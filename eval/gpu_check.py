"""Everything that only a GPU can tell, as one prepared run: is it right, how fast is it, and how near to the card.

    python -m eval.gpu_check                             # results/gpu/summary.json
    python -m eval.gpu_check parts=correctness,ceilings seconds=300
    python -m eval.gpu_check device=cpu shapes=tiny,tiny  # a rehearsal: the same parts, and no figure of a GPU

Each part runs in a process of its own, for after a fault a CUDA context is of no use, and is ended when the time is
over. The record is written after every part, so that what was measured stays; a part that did not run says why, and one
that an earlier run of the same code measured is kept. Needs torch, Triton and transformers, and nothing that configures
programs; ``learned`` needs the corpus that ``make gpu-carry`` brings along, and is best run by itself.
"""

import json
import logging
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calm.checkpoint import write_json
from calm.environment import environment
from calm.errors import CalmError

from .common import say
from .gpu_asked import UNFINISHED, Asked, asked_for

logger = logging.getLogger(__name__)

NOT_MEASURED = "not measured"
FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    from .gpu_parts import PARTS

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        asked = asked_for(sys.argv[1:] if argv is None else argv, list(PARTS))
    except CalmError as error:
        logger.error("error: %s", error)
        return 2
    if asked.record is not None:
        write_json(asked.record, _measured(asked.parts[0], asked))
        return 0
    return run(asked)


def run(asked: Asked) -> int:
    """Every part in turn. Exit status 0 where each that was asked for was measured."""
    import torch

    from .gpu_parts import PARTS

    began = time.perf_counter()
    summary: dict[str, Any] = {
        "program": "eval.gpu_check",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "rehearsal": asked.rehearsal,
        "environment": environment(),
    }
    parts: dict[str, dict[str, Any]] = {name: {"status": NOT_MEASURED, "why": "not asked for"} for name in PARTS}
    parts |= _kept(asked, summary)
    summary["parts"] = parts
    missing = not asked.rehearsal and not torch.cuda.is_available()
    for name in asked.parts or PARTS:
        gone = time.perf_counter() - began
        if missing:
            parts[name] = {"status": NOT_MEASURED, "why": "torch sees no CUDA device"}
        elif gone >= asked.seconds:
            parts[name] = {"status": NOT_MEASURED, "why": f"{gone:.0f} s were over before it could begin"}
        else:
            say(f"{name}: begins after {gone:.0f} s")
            parts[name] = _in_a_process(name, asked, asked.seconds - gone)
            say(f"{name}: {parts[name]['status']} {parts[name].get('why', '')}".rstrip())
        summary["goals"] = goals_of(parts, asked)
        summary["wall_s"] = round(time.perf_counter() - began, 3)
        _write(summary, asked)
    for goal in summary["goals"]:
        found = goal["measured"]
        say(f"{goal['goal']}: asked {goal['asked']}, {NOT_MEASURED if found is None else f'measured {found:.3g}'}")
    say(json.dumps({"parts": {name: part["status"] for name, part in parts.items()}}))
    return 0 if all(parts[name]["status"] == "measured" for name in asked.parts or PARTS) else FAILED


def _kept(asked: Asked, summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Parts that an earlier run of the same code, on the same kind of device, has measured."""
    try:
        before = json.loads((asked.out / "summary.json").read_text("utf-8"))
        same = before["environment"]["git"] == summary["environment"]["git"]
        same = same and before["environment"]["git"]["commit"] is not None
        same = same and before["environment"]["gpu"] == summary["environment"]["gpu"]
        if not same or before["rehearsal"] != asked.rehearsal:
            return {}
        return {name: part for name, part in before["parts"].items() if part["status"] == "measured"}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _in_a_process(name: str, asked: Asked, seconds: float) -> dict[str, Any]:
    """A part's record, from a process of its own that has so many seconds."""
    began, record = time.perf_counter(), asked.out / f".{name}.json"
    asked.out.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "eval.gpu_check", f"parts={name}", f"device={asked.device}",
        f"shapes={','.join(asked.shapes)}", f"out={asked.out}", f"carried={asked.carried}",
        f"seconds={seconds:.3f}", f"record={record}",
    ]  # fmt: skip
    record.unlink(missing_ok=True)
    try:
        why = f"its process ended with status {subprocess.run(command, timeout=seconds).returncode}"
    except subprocess.TimeoutExpired:
        why = f"it was ended after {time.perf_counter() - began:.0f} s, when the time was over"
    try:
        found: dict[str, Any] = json.loads(record.read_text("utf-8"))
    except (OSError, ValueError):
        found, why = {}, f"{why} and left no record"
    record.unlink(missing_ok=True)
    if found.get("status", UNFINISHED) != UNFINISHED:
        return found
    return {**found, "status": "failed", "why": why, "seconds": round(time.perf_counter() - began, 3)}


def _measured(name: str, asked: Asked) -> dict[str, Any]:
    """A part's record, in this process; one that raises says what, beside what it had found."""
    from calm.checkpoint import finite
    from serve.requests import one_line

    from .gpu_parts import PARTS

    began = time.perf_counter()
    try:
        found = {"status": "measured", **PARTS[name](asked)}
    except Exception as error:
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = one_line(error)[:400]
        found = {**asked.kept, "status": "failed"}
        found["why"] = f"{type(error).__name__} at {Path(place.filename).name}: {said}"
    told: dict[str, Any] = finite({**found, "seconds": round(time.perf_counter() - began, 3)})
    return told


def goals_of(parts: dict[str, dict[str, Any]], asked: Asked) -> list[dict[str, Any]]:
    """What is asked of a Hopper card, and what was measured; None where that was not, and in a rehearsal."""
    from .gpu_parts import GOALS

    found = []
    for goal, (part, least, of) in GOALS.items():
        value = None
        if parts[part]["status"] == "measured" and not asked.rehearsal:
            try:
                value = of(parts[part])
            except (LookupError, StopIteration, TypeError, ValueError, ZeroDivisionError):  # of another shape, or null
                value = None
        found.append({"goal": goal, "asked": least, "measured": value})
    return found


def _write(summary: dict[str, Any], asked: Asked) -> None:
    asked.out.mkdir(parents=True, exist_ok=True)
    write_json(asked.out / "summary.json", summary)


if __name__ == "__main__":
    sys.exit(main())
