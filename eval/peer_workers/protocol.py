"""What is said over the pipes: one JSON object a line, a request in and one reply out, one after the other.

    {"op": "load", "folder": ..., "store": ..., "threads": 1, "settings": {...}}   -> {"ok": true, "about": {...}}
    {"op": "prepare", "sources": [[ids]], "most": 64, "variants": {...}}           -> {"ok": true}
    {"op": "decode", "variant": "full", "tokens": 64}                              -> {"ok": true, "lengths": [64, ...]}
    {"op": "answer", "sources": [[ids]], "most": 64}                               -> {"ok": true, "tokens": [[ids]]}
    {"op": "predict", "variant": "full", "tokens": 64}                             -> {"ok": true, "seconds": 0.1}
    {"op": "quit"}

What goes wrong is ``{"ok": false, "error": "one line"}``. Libraries that print to stdout print to stderr instead.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Sources = Sequence[Sequence[int]]


class Peer(Protocol):
    """One peer in one arithmetic."""

    def load(self, folder: Path, store: Path, threads: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Open a model folder; what is converted is kept under ``store``. Returns versions and what else to record."""
        ...

    def prepare(self, sources: Sources, most: int, variants: Mapping[str, Mapping[str, Any]]) -> None:
        """These rows come next, together, with at most so many tokens each."""
        ...

    def decode(self, variant: str, tokens: int) -> list[int]:
        """Encode and decode the prepared rows greedily, EOS ignored. Returns how many tokens each row got."""
        ...

    def answer(self, sources: Sources, most: int) -> list[list[int]]:
        """Token ids of greedy answers to these rows: to EOS, which need not be among them, or ``most`` tokens."""
        ...


def handle(peer: Peer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to one request."""
    match asked["op"]:
        case "load":
            folder, store = Path(asked["folder"]), Path(asked["store"])
            return {"about": peer.load(folder, store, asked["threads"], asked["settings"])}
        case "prepare":
            peer.prepare(asked["sources"], asked["most"], asked["variants"])
            return {}
        case "decode":
            return {"lengths": peer.decode(asked["variant"], asked["tokens"])}
        case "answer":
            return {"tokens": peer.answer(asked["sources"], asked["most"])}
        case "predict":
            foresee: Callable[[str, int], float] = getattr(peer, "predict")  # noqa: B009  # only ours has it
            return {"seconds": foresee(asked["variant"], asked["tokens"])}
        case other:
            raise ValueError(f"unknown request {other!r}")


def one_line(error: BaseException) -> str:
    """The first line of an error's text that says something, behind its type."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}"[:400]


def serve(make: Callable[[], Peer]) -> None:
    """Answer requests until ``quit`` or the end of stdin. The peer is made at the first request."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # fd 1 itself: libraries in C print there too
    peer: Peer | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["op"] == "quit":
            return
        try:
            peer = peer or make()
            reply = {"ok": True, **handle(peer, asked)}
        except Exception as error:  # told to who asked, who decides what becomes of this peer
            import traceback

            traceback.print_exc()
            reply = {"ok": False, "error": one_line(error)}
        replies.write(json.dumps(reply) + "\n")
