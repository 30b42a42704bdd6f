"""Settings of eval.import_gguf."""

from dataclasses import dataclass

from .config import INF, check_range


@dataclass
class ImportGgufConfig:
    """python -m eval.import_gguf."""

    file: str | None = None  # the .gguf file
    output: str | None = None  # the model folder to write; an existing one is refused
    max_source_tokens: int = 512  # of a prompt, with all that the tokenizer puts around it
    max_target_tokens: int = 128  # N, the longest answer
    source_prefix: str = ""  # put before every source, within the tokenizer's frame: what the model is to do with it
    exit_layers: list[int] | None = None  # default: every layer but the last
    name: str | None = None  # what the model is called in tables; default: the file's name

    def __post_init__(self) -> None:
        for each in ("max_source_tokens", "max_target_tokens"):
            check_range(each, getattr(self, each), 1, INF)
