"""A peer that does what it is told: answers, fails, dies, hangs. Started by path, without torch."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from eval.peer_workers import protocol  # noqa: E402


class Fake:
    """Settings: ``load``, ``prepare``, ``answer``, ``decode``: what goes wrong there; ``first``: its first token."""

    def __init__(self):
        self.settings, self.rows = {}, []
        print("this is no reply: it must go to stderr")

    def load(self, folder, store, threads, settings):
        self.settings = settings
        self._trouble("load")
        return {"versions": {"fake": "1.0"}, "threads": os.environ["OMP_NUM_THREADS"], "asked": threads}

    def prepare(self, sources, most, variants):
        self._trouble("prepare")
        self.rows = sources

    def decode(self, variant, tokens):
        self._trouble("decode")
        return [tokens - (self.settings.get("decode") == "short")] * len(self.rows)

    def answer(self, sources, most):
        self._trouble("answer")
        return [[self.settings.get("first", 7), 8, 1][:most] for _ in sources]

    def predict(self, variant, tokens):
        if self.settings.get("predict") == "fail":
            raise ValueError("no table")
        return tokens * (0.5 if "exit" in variant or "own" in variant or "compact" in variant else 1.0)

    def _trouble(self, where):
        kind = self.settings.get(where)
        if kind == "fail":
            raise ValueError(f"cannot {where}\nmore lines")
        if kind == "die":
            print("a last word", file=sys.stderr, flush=True)
            os._exit(3)
        if kind == "abort":
            os.abort()
        if kind == "hang":
            os.read(os.pipe()[0], 1)


if __name__ == "__main__":
    protocol.serve(Fake)
