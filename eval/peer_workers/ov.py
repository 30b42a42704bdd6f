"""OpenVINO through optimum-intel, in an environment of its own (constraints/peers-openvino.txt).

Settings: ``weights``, fp32 or int8. Arithmetic is f32 in both: the bf16 hint crashed with SIGFPE where it was tried.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimum.intel import OVModelForSeq2SeqLM

from .generating import GeneratingPeer, exported, versions
from .protocol import Peer


class OpenVino(GeneratingPeer):
    """OVModelForSeq2SeqLM over the exported encoder and its stateful decoder."""

    def open(self, folder: Path, store: Path, threads: int, settings: Mapping[str, Any]) -> Any:
        kind = settings["weights"]
        command = ("optimum-cli", "export", "openvino", "--model", "FROM", "--task", "text2text-generation-with-past")
        made = exported(folder, store / f"openvino-{kind}", (*command, "--weight-format", kind, "TO"))
        hints = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": str(threads),
            "NUM_STREAMS": "1",
            "PERFORMANCE_HINT": "LATENCY",
        }
        return OVModelForSeq2SeqLM.from_pretrained(made, device="CPU", ov_config=hints, local_files_only=True)

    def about(self) -> dict[str, Any]:
        return {"versions": versions("openvino", "optimum-intel", "optimum", "nncf", "transformers", "torch")}


def make() -> Peer:
    return OpenVino()
