"""Triton's interpreter, made fit for tests."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton 3.6 interprets a loop's bounds as arrays of one number, which numpy 2.4 no longer takes for a number."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    with torch.inference_mode():
        yield
