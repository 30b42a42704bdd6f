"""Decoding in the processes of a launch (``accelerate launch``, ``torchrun``): one asks, all decode their share."""

from collections.abc import Sequence
from typing import Any

from .decode_spec import DecodeSpec, Failure, OnRows, SpreadDecoder, cut
from .policies import Policy
from .records import DecodeTrace, Example


class ShardedDecoder(SpreadDecoder):
    """``decode(examples, policy)`` in the first process of a launch; the others ``serve()`` until it closes.

    Needs an initialised torch.distributed process group; objects travel over gloo whatever its backend is.
    """

    def __init__(self, spec: DecodeSpec, on_rows: OnRows | None = None) -> None:
        super().__init__(spec, on_rows)
        import torch.distributed as dist

        self._dist = dist
        self._group = dist.new_group(backend="gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __call__(self, examples: Sequence[Example], policy: Policy) -> list[DecodeTrace]:
        if self.rank:
            raise RuntimeError("only the first process decodes; the others serve()")
        self._broadcast((list(examples), policy))
        gathered = self._take_part(examples, policy)
        for answer in gathered:
            if isinstance(answer, Failure):
                raise answer.error()
        found = {row: trace for part in gathered for row, trace in part}
        return [found[row] for row in range(len(examples))]

    def warm(self, rows: int) -> None:
        """Nothing to do: every process of the launch has loaded its model."""

    def serve(self) -> None:
        """Decode shares until the first process closes. For every process but the first."""
        while (task := self._broadcast(None)) is not None:
            self._take_part(*task)

    def close(self) -> None:
        """Let the others go on. For the first process, however its work ended."""
        self._broadcast(None)

    def _broadcast(self, task: Any) -> Any:
        box = [task]
        self._dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _take_part(self, examples: Sequence[Example], policy: Policy) -> list[Any]:
        """Decode every ``world``-th batch here; in the first process the answers of all."""
        batches = cut(examples, self.spec.rows_per_task)
        mine: Any = []
        try:
            for batch in batches[self.rank :: self.world]:
                mine += zip(batch, self._here([examples[row] for row in batch], policy), strict=True)
                self._tell(len(batch))
        except Exception as error:
            mine = Failure.of(error)
        gathered: list[Any] | None = [None] * self.world if self.rank == 0 else None
        self._dist.gather_object(mine, gathered, dst=0, group=self._group)
        if gathered is not None and not isinstance(mine, Failure):
            self._tell(len(examples) - len(mine))  # what the others did
        return gathered or []
