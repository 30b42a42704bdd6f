"""The errors a user can meet. Each says what, where, and what to do; programs print them as one line and exit 1."""

FP16_REFUSED = "fp16 is refused: T5's feed-forward output exceeds fp16's 65504 and becomes NaN; use bf16 or fp32"


class CalmError(Exception):
    """Base of every error that is the user's to fix."""


class ConfigError(CalmError, ValueError):
    """A setting is missing, misspelt, of the wrong type or out of range."""


class DataError(CalmError, ValueError):
    """A corpus, a row or a tokenizer cannot be used as it is."""


class CheckpointError(CalmError, RuntimeError):
    """A model folder or training checkpoint is incomplete, damaged or of another kind."""


class CalibrationError(CalmError, ValueError):
    """A calibration cannot be run, or its artifact does not belong to what it is used with."""


class TrainingError(CalmError, RuntimeError):
    """Training stopped for a reason that the user can act on."""
