"""ONNX Runtime through optimum-onnx, in an environment of its own (constraints/peers-onnxruntime.txt).

The merged decoder of optimum-onnx 0.1 refuses T5's cross-attention cache, so the two separate ones are used. Threads
that spin would slow whoever runs next, so they do not.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime
from optimum.onnxruntime import ORTModelForSeq2SeqLM

from .generating import GeneratingPeer, exported, versions
from .protocol import Peer

COMMAND = ("optimum-cli", "export", "onnx", "--model", "FROM", "--task", "text2text-generation-with-past", "TO")


class OnnxRuntime(GeneratingPeer):
    """ORTModelForSeq2SeqLM over the exported encoder and two decoders."""

    def open(self, folder: Path, store: Path, threads: int, settings: Mapping[str, Any]) -> Any:
        made = exported(folder, store / "onnxruntime", COMMAND)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return ORTModelForSeq2SeqLM.from_pretrained(
            made, use_merged=False, session_options=options, provider="CPUExecutionProvider", local_files_only=True
        )

    def about(self) -> dict[str, Any]:
        return {"versions": versions("onnxruntime", "optimum-onnx", "optimum", "transformers", "torch")}


def make() -> Peer:
    return OnnxRuntime()
