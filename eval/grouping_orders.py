"""Which rows are in a step: requests put in an order, or regrouped at every step, and the depths that meet there.

Under the rules that keep a batch together a row speaks in every step that it is in, so who meets whom depends on the
order and the lengths of the answers alone: recorded depths tell every step, and nothing is decoded.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Steps:
    """What ran.

    Attributes:
        counts: rows of each step by the layer that they cross at (column 0: layer 1).
        first: step in which each request first speaks, in the order given.
    """

    counts: Int[np.ndarray, "steps layers"]
    first: Int[np.ndarray, " requests"]

    @property
    def rows(self) -> Int[np.ndarray, " steps"]:
        found: Int[np.ndarray, " steps"] = self.counts.sum(axis=1)
        return found

    def stops(self, share: float) -> Int[np.ndarray, " steps"]:
        """Layers that each step runs where it ends as soon as this share of its rows has crossed."""
        crossed: Bool[np.ndarray, "steps layers"] = self.counts.cumsum(axis=1) >= share * self.rows[:, None] - 1e-9
        found: Int[np.ndarray, " steps"] = 1 + crossed.argmax(axis=1)
        return found


def windows(keys: Float[np.ndarray, " requests"], size: int) -> Int[np.ndarray, " requests"]:
    """Order of service: of every ``size`` requests that came one after another by their keys, equal ones as they came.

    Windows go up and down in turn, so that where two of them meet in a batch their rows are alike too.
    """
    found = []
    for number, first in enumerate(range(0, len(keys), size)):
        up = first + np.argsort(keys[first : first + size], kind="stable")
        found.append(up[::-1] if number % 2 else up)
    return np.concatenate(found)


def one_after_another(crossing: Int[np.ndarray, "requests tokens"], batch: int, num_layers: int) -> Steps:
    """A batch whose free places are taken by the next request in the order given (continuous batching).

    Args:
        crossing: layer of each token, 0 after the answer's end.
    """
    lengths = (crossing > 0).sum(axis=1)
    free, first = [0] * batch, np.zeros(len(crossing), dtype=np.int64)
    for number, length in enumerate(lengths.tolist()):
        first[number] = free[0]
        heapq.heapreplace(free, free[0] + length)
    rows, tokens = np.nonzero(crossing)
    return Steps(_counted(first[rows] + tokens, crossing[rows, tokens], num_layers), first)


def regrouped(
    crossing: Int[np.ndarray, "requests tokens"], batch: int, pool: int, num_layers: int, recent: int | None
) -> Steps:
    """``pool`` batches of rows run at once and each speaks once a round: a round sorts them and cuts them in batches.

    Args:
        recent: by the mean of a row's last so many crossing layers, of a row that has none by that of all so far;
            None: by the layer that it is about to cross at, which nobody knows.
    """
    lengths = (crossing > 0).sum(axis=1)
    sums = np.concatenate([np.zeros((len(crossing), 1), dtype=np.int64), crossing.cumsum(axis=1)], axis=1)
    first, at = np.zeros(len(crossing), dtype=np.int64), np.zeros(len(crossing), dtype=np.int64)
    running, coming, begun = np.arange(0), 0, 0
    steps, depths = list[np.ndarray](), list[np.ndarray]()
    spoken, layers = 0, 0
    while True:
        room = min(batch * pool - len(running), len(crossing) - coming)
        running = np.concatenate([running, np.arange(coming, coming + room)])
        coming += room
        if not len(running):
            break
        here = at[running]
        now = crossing[running, here]
        if recent is None:
            keys = now.astype(np.float64)
        else:
            back = np.minimum(here, recent)
            told = sums[running, here] - sums[running, here - back]
            keys = np.where(back > 0, told / np.maximum(back, 1), layers / max(spoken, 1))
        order = np.argsort(keys, kind="stable")
        step = begun + np.arange(len(order)) // batch
        first[running[order][here[order] == 0]] = step[here[order] == 0]
        steps.append(step)
        depths.append(now[order])
        begun = int(step[-1]) + 1
        spoken, layers = spoken + len(now), layers + int(now.sum())
        at[running] += 1
        running = running[at[running] < lengths[running]]
    return Steps(_counted(np.concatenate(steps), np.concatenate(depths), num_layers), first)


def _counted(step: np.ndarray, depth: np.ndarray, num_layers: int) -> Int[np.ndarray, "steps layers"]:
    """Rows by step and depth."""
    steps = int(step.max()) + 1
    flat = np.bincount(step * num_layers + depth - 1, minlength=steps * num_layers)
    return flat.reshape(steps, num_layers)
