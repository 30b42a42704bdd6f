"""The model card of a folder: what it is, how to open it, what to know."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .speaking import SpeakingModel


def model_card(model: "SpeakingModel") -> str:
    """Markdown with the metadata block that Hugging Face reads."""
    config, settings = model.hf.config, model.settings
    corpus = settings.data.get("name", "unknown")
    encoder_decoder = bool(config.is_encoder_decoder)
    kind = type(model).__name__.removeprefix("EarlyExit")
    auto = "AutoModelForSeq2SeqLM" if encoder_decoder else "AutoModelForCausalLM"
    layers = f"{model.num_layers} decoder layers"
    if encoder_decoder:
        layers = f"{config.num_layers} encoder + {layers}"
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [{config.model_type}, early-exit, calm]",
        "---",
        "",
        f"# Early-exit {kind} ({layers}, d_model {model.d_model})",
        "",
        f"Every decoder layer can speak through the shared norm and head. Trained on `{corpus}`; sources of up to "
        f"{settings.max_source_tokens} tokens, answers of up to {settings.max_target_tokens}.",
        "",
        f"A plain {kind} folder: `{auto}.from_pretrained(folder)` opens it at full depth. With exits:",
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
    if settings.skip_schedule is not None:
        lines += [
            "",
            "**Trained by a schedule of layers** (`skip_schedule` in `early_exit.json`), so that only its last layer "
            "that runs speaks, and full depth is not what it was trained for. It is decoded by",
            "",
            "```python",
            "schedule = calm.LayerSchedule.from_json(model.settings.skip_schedule)",
            "calm.BatchDecoder(model)(examples, calm.SkipSchedule(schedule))",
            "```",
        ]
    if encoder_decoder and model.num_layers > int(config.num_layers):
        lines += [
            "",
            "**Slow in plain transformers:** the decoder is deeper than the encoder, and transformers sizes its cache "
            "by the encoder. `generation_config.json` therefore says `use_cache: false`; keep it so. calm's decoders "
            "and CTranslate2 are not affected.",
        ]
    return "\n".join(lines) + "\n"
