"""A decoder over all processes: the first asks, all decode their share, the first gets the answers in order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from calm.policies import Policy
from calm.records import DecodeTrace, Example

Decode = Callable[[Sequence[Example], Policy], list[DecodeTrace]]


@contextmanager
def sharded(decode: Decode, accelerator: Accelerator) -> Iterator[Decode | None]:
    """Yield a decoder in the first process and None in the others, which serve it until the block ends.

    with sharded(BatchDecoder(model), accelerator) as decoder:
        if decoder is not None:
            traces = decoder(examples, Full())
    """
    if accelerator.num_processes == 1:
        yield decode
        return
    if not accelerator.is_main_process:
        while (asked := _broadcast(None)) is not None:
            _decode_share(decode, accelerator, *asked)
        yield None
        return

    def ask(examples: Sequence[Example], policy: Policy) -> list[DecodeTrace]:
        _broadcast((list(examples), policy))
        return _decode_share(decode, accelerator, examples, policy)

    try:
        yield ask
    finally:
        _broadcast(None)


def _broadcast(value: Any) -> Any:
    box = [value]
    broadcast_object_list(box)
    return box[0]


def _decode_share(
    decode: Decode, accelerator: Accelerator, examples: Sequence[Example], policy: Policy
) -> list[DecodeTrace]:
    """Rows are dealt by length, so that all processes are busy equally long."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].source))
    mine = order[accelerator.process_index :: accelerator.num_processes]
    failure = ""
    try:
        pairs = list(zip(mine, decode([examples[i] for i in mine], policy) if mine else [], strict=True))
    except Exception as error:  # the others wait for us in the gathering: answer first, then fail together
        failure, pairs = f"{type(error).__name__}: {error}", []
    answers = gather_object([(failure, pairs)])
    failures = [text for text, _ in answers if text]
    if failures:
        raise RuntimeError(f"decoding failed in a process: {failures[0]}")
    by_index = {i: trace for _, part in answers for i, trace in part}
    return [by_index[i] for i in range(len(examples))]
