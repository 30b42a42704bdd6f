"""Tensors from a file against the model that config.json describes: every key and shape, or none."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError


def put_in(model: torch.nn.Module, tensors: dict[str, Tensor], shared: tuple[str, ...], where: str) -> None:
    """Give a model on the meta device these weights, whatever their dtype but fp16, which becomes fp32.

    Args:
        shared: names of the model's state that are another tensor's copies, and that no file needs.

    Raises:
        CheckpointError: lists the first five keys that are missing, unexpected or of another shape.
    """
    if any(tensor.dtype is torch.float16 for tensor in tensors.values()):
        tensors = {name: tensor.float() for name, tensor in tensors.items()}  # published storage, not arithmetic
    expected = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in shared}
    problems = [f"missing {name}" for name in expected if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in expected]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, config.json asks for {tuple(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{where} does not fit config.json: {'; '.join(problems[:5])}{more}")
    model.load_state_dict(tensors, strict=False, assign=True)
    model.requires_grad_(True)


def without_head_copy(tensors: Mapping[str, Tensor], embedding: str, where: str) -> dict[str, Tensor]:
    """The tensors of a tied model without ``lm_head.weight``, which files may hold as a copy of ``embedding``.

    Raises:
        CheckpointError: it is no copy.
    """
    head, own = tensors.get("lm_head.weight"), tensors.get(embedding)
    if head is None or own is None:
        return dict(tensors)
    if not torch.equal(head, own):
        raise CheckpointError(f"{where}: config.json ties the head, yet lm_head.weight differs from {embedding}")
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
