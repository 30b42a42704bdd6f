"""Hugging Face transformers: ``generate`` with a dynamic cache, or compiled with a static one.

Settings: ``dtype`` float32 or bfloat16 (T5 keeps ``wo`` in float32), ``compiled`` true or false.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig, T5ForConditionalGeneration

from .generating import GeneratingPeer, versions
from .protocol import Peer, Sources


class Transformers(GeneratingPeer):
    """T5ForConditionalGeneration with the attention that it chooses by itself."""

    _compiled = False
    _shape = (0, 0)

    def open(self, folder: Path, store: Path, threads: int, settings: Mapping[str, Any]) -> Any:
        self._compiled = bool(settings.get("compiled", False))
        return T5ForConditionalGeneration.from_pretrained(
            folder, dtype=getattr(torch, settings["dtype"]), use_safetensors=True, local_files_only=True
        ).eval()

    def about(self) -> dict[str, Any]:
        return {"versions": versions("transformers", "torch")}

    def prepare(self, sources: Sources, most: int, variants: Mapping[str, Mapping[str, Any]]) -> None:
        """A compiled model is compiled anew for the shape of these rows, by two decodes."""
        super().prepare(sources, most, variants)
        if not self._compiled:
            return
        torch._dynamo.reset()
        settings = self._made.settings
        settings.cache_implementation, settings.max_cache_len = "static", most + 1
        compiling = CompileConfig(dynamic=False, mode="default")
        compiling._compile_all_devices = True  # generate compiles on accelerators only, unless told so
        settings.compile_config = compiling
        self._shape = _shape(sources)
        for _ in range(2):
            self._made.decode(min(4, most))

    def answer(self, sources: Sources, most: int) -> list[list[int]]:
        """Rows of another shape than was prepared are not worth compiling for."""
        self._made.settings.disable_compile = _shape(sources) != self._shape
        try:
            return super().answer(sources, most)
        finally:
            self._made.settings.disable_compile = False


def _shape(sources: Sources) -> tuple[int, int]:
    return len(sources), max(map(len, sources))


def make() -> Peer:
    return Transformers()
