"""Write a GGUF file of a Llama-architecture model as a model folder, with its tokenizer and all layers as exits.

    python -m eval.import_gguf file=SmolLM2-135M-Instruct.Q4_1.gguf output=runs/smollm2
    python -m eval.suitability checkpoint=runs/smollm2 data=restaurants

Weights are dequantised to fp32. Prompts get what the tokenizer puts around them: the chat template of one user turn,
or BOS and a line break. Needs the package gguf (pip install gguf).
"""

from pathlib import Path

from calm.cli import program
from calm.errors import ConfigError
from calm.import_config import ImportGgufConfig

from .common import say


def run(config: ImportGgufConfig, run_dir: Path) -> int:
    if config.file is None or config.output is None:
        raise ConfigError("give file=FILE.gguf and output=FOLDER")
    folder = Path(config.output)
    if folder.exists():
        raise ConfigError(f"output={folder} is there already; give another folder, or remove it")
    from calm.models.folder import save
    from calm.models.gguf_file import read_gguf
    from calm.models.settings import EarlyExitSettings

    settings = EarlyExitSettings(
        list(config.exit_layers or []),
        max_source_tokens=config.max_source_tokens,
        max_target_tokens=config.max_target_tokens,
        source_prefix=config.source_prefix,
        model=config.name or Path(config.file).stem,
    )
    model = read_gguf(config.file, settings)
    folder.parent.mkdir(parents=True, exist_ok=True)
    save(model, folder)
    parameters = sum(parameter.numel() for parameter in model.hf.parameters())
    say(f"{settings.model}: {model.num_layers} layers, {parameters / 1e6:.1f} M parameters, head tied: {model.tied}")
    say(f"words: {len(model.tokenizer)}; an answer ends with {model.tokenizer.eos_token!r} ({model.eos_token_id})")
    around = (model.tokenizer.convert_ids_to_tokens(ids) for ids in (settings.source_start, settings.source_end or []))
    say("around a source: {} ... {}".format(*("".join(tokens) or "nothing" for tokens in around)))
    say(f"model: {folder}")
    return 0


main = program("import_gguf", ImportGgufConfig, run)

if __name__ == "__main__":
    main()
