"""A Llama from a GGUF file, the form in which llama.cpp keeps weights, words and config in one.

transformers reads it: it dequantises to fp32, puts the rows of q and k back from llama.cpp's rotary order into its own
and makes the tokenizer. Before that the file is checked for what transformers would pass over in silence.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from ..errors import CheckpointError, ConfigError
from . import llama_folder
from .folder import check_tokenizer
from .frame import frame_of
from .llama import EarlyExitLlama
from .settings import EarlyExitSettings, default_exit_layers

if TYPE_CHECKING:
    from gguf import GGUFReader

FIRST, LAST = "token_embd.weight", "output_norm.weight"
HEAD = "output.weight"  # absent where the head is tied
PARTS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
OF_A_LAYER = re.compile(rf"blk\.\d+\.({'|'.join(PARTS)})\.weight")
NOTED = ("quantization_config", "_model_name_or_path")  # by transformers, in a config that came from such a file


def read_gguf(path: str | Path, settings: EarlyExitSettings) -> EarlyExitLlama:
    """The file's model in fp32, in eval mode, with its own tokenizer and what that puts around a prompt.

    ``settings.exit_layers`` may be empty: all layers but the last then.

    Raises:
        ConfigError: the package ``gguf`` is not installed.
        CheckpointError: no such file; no GGUF, or a truncated one; another architecture than Llama's, or one of its
            variants (experts, biases, scaled rotary positions); as many words as the embedding has rows, or not.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is no file; file= takes the path of a .gguf file")
    words = _checked(path)
    with _damage_named(path), TemporaryDirectory() as alone:  # transformers would mix in what lies beside the file
        Path(alone, path.name).symlink_to(path.resolve())
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(alone, gguf_file=path.name)
        read = LlamaForCausalLM.from_pretrained(alone, gguf_file=path.name, dtype=torch.float32)
    values: dict[str, Any] = {name: value for name, value in read.config.to_dict().items() if name not in NOTED}
    if len(tokenizer) != words:
        raise CheckpointError(f"{path}: its tokenizer comes out with {len(tokenizer)} words instead of {words}")
    check_tokenizer(tokenizer, read.config.vocab_size, str(path))
    config, tied = llama_folder.read_config(values, path)
    tensors = {name: tensor.detach().clone() for name, tensor in read.state_dict().items()}
    settings.exit_layers = default_exit_layers(int(config.num_hidden_layers), settings.exit_layers or None)
    settings.source_start, settings.source_end = frame_of(tokenizer)
    model = EarlyExitLlama(llama_folder.assemble(config, tied, tensors, str(path)), tokenizer, settings)
    return model.eval()


def _checked(path: Path) -> int:
    """The number of words of a file that holds a plain Llama, whole. Raises CheckpointError for any other."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError("reading GGUF files needs the package gguf: pip install gguf") from None
    with _damage_named(path):
        reader = GGUFReader(path)
        kind = str(_field(reader, "general.architecture"))
        layers = int(_field(reader, f"{kind}.block_count"))
        experts = int(_field(reader, f"{kind}.expert_count") or 0)
        scaling = str(_field(reader, f"{kind}.rope.scaling.type") or "none")
        words = len(reader.fields["tokenizer.ggml.tokens"].data)
        shapes = {tensor.name: [int(size) for size in tensor.shape] for tensor in reader.tensors}
        ends = max(int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors)
    if kind != "llama":
        raise CheckpointError(f"{path} holds a model of architecture {kind!r}; only 'llama' can be imported")
    if experts:
        raise CheckpointError(f"{path} holds a Llama with {experts} experts a layer; only plain ones can be imported")
    if scaling != "none" or any(name.startswith("rope_") for name in shapes):
        raise CheckpointError(f"{path} scales its rotary positions, which transformers does not read from GGUF files")
    if ends > path.stat().st_size:
        raise CheckpointError(f"{path} ends after {path.stat().st_size} of {ends} bytes; download it again")
    known = {FIRST, LAST, HEAD}
    odd = [name for name in shapes if name not in known and not OF_A_LAYER.fullmatch(name)]
    if odd:
        raise CheckpointError(f"{path} has tensors that a plain Llama has not: {', '.join(odd[:5])}")
    if len([name for name in shapes if name not in known]) != len(PARTS) * layers or not {FIRST, LAST} <= shapes.keys():
        raise CheckpointError(f"{path} lacks tensors of its {layers} layers; make the file again")
    if words != shapes[FIRST][-1]:
        raise CheckpointError(
            f"{path} has {words} words and embeddings of {shapes[FIRST][-1]}; they are not of one model"
        )
    return words


def _field(reader: "GGUFReader", name: str) -> Any:
    field = reader.fields.get(name)
    return None if field is None else field.contents()


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """gguf and numpy raise many kinds for bytes that are not what they should be."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError, MemoryError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path} is no GGUF file, or a truncated one ({said[:200]})") from None
