"""The model card of a folder: what it is, how to open it, what to know."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .t5 import EarlyExitT5


def model_card(model: "EarlyExitT5") -> str:
    """Markdown with the metadata block that Hugging Face reads."""
    config, settings = model.hf.config, model.settings
    corpus = settings.data.get("name", "unknown")
    lines = [
        "---",
        "library_name: transformers",
        "tags: [t5, early-exit, calm]",
        "---",
        "",
        f"# Early-exit T5 ({config.num_layers} encoder + {model.num_layers} decoder layers, d_model {model.d_model})",
        "",
        f"Every decoder layer can speak through the shared norm and head. Trained on `{corpus}`; sources of up to "
        f"{settings.max_source_tokens} tokens, answers of up to {settings.max_target_tokens}.",
        "",
        "A plain T5 folder: `AutoModelForSeq2SeqLM.from_pretrained(folder)` opens it at full depth. With exits:",
        "",
        "```python",
        "import calm",
        "",
        "model = calm.load(folder)",
        "```",
        "",
        f"Exits are allowed after layers {settings.exit_layers}. Certified thresholds, where they were calibrated, are "
        "in `calibration/`.",
    ]
    if model.num_layers > int(config.num_layers):
        lines += [
            "",
            "**Slow in plain transformers:** the decoder is deeper than the encoder, and transformers sizes its cache "
            "by the encoder. `generation_config.json` therefore says `use_cache: false`; keep it so. calm's decoders "
            "and CTranslate2 are not affected.",
        ]
    return "\n".join(lines) + "\n"
