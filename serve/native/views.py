"""The structures of model.h, field by field."""

import ctypes

INT, LONG, REAL, POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

FP32, BF16, INT8 = 0, 1, 2  # Kind
ENDED, PAUSED, PARKED, NO_MEMORY = 0, 1, 2, 3  # Status
ALL_CROSSED, QUANTILE, LOCKSTEP = 0, 1, 2  # Stop
PHASES = ("layers", "checks", "head", "backfill")  # Phase


class MatrixView(ctypes.Structure):
    """Packed weights."""

    _fields_ = [("packed", POINTER), ("scale", POINTER), ("correction", POINTER), ("outputs", INT), ("inputs", INT)]


LAYER_MATRICES = ("q", "kv", "o", "cross_q", "cross_o", "up", "down")


class LayerView(ctypes.Structure):
    """The matrices of a layer."""

    _fields_ = [(name, MatrixView) for name in LAYER_MATRICES]


STANDS = ("crossing", "crossed", "argmax", "run", "seen", "seen_after")  # of a row in its step, by slot


class ModelView(ctypes.Structure):
    """A decoder, its slots, and where each row stands."""

    _fields_ = [
        *((name, INT) for name in ("layers", "heads", "d_model", "d_kv", "d_ff", "vocabulary")),
        *((name, INT) for name in ("kind", "cache_kind", "cross_kind", "activation", "gated")),
        ("eps", REAL),
        ("classifier_bias", REAL),
        ("layer", POINTER),
        ("head", MatrixView),
        ("embed", POINTER),
        *((name, INT) for name in ("embed_kind", "head_kind", "head_k", "head_numbers", "word_numbers")),
        ("words", POINTER),
        ("screen", MatrixView),
        *((name, POINTER) for name in ("doubt", "bias", "classifier", "checked")),
        *((name, INT) for name in ("slots", "positions", "sources", "record")),
        *((name, POINTER) for name in ("keys", "values", "cross_keys", "cross_values", "coarse", "source_length")),
        *((name, POINTER) for name in ("thresholds", "depths", "measures", "run_lengths", "fills")),
        *((name, POINTER) for name in ("hidden", "previous", "step", "home", "token", *STANDS)),
        *((name, POINTER) for name in ("candidates", "confidences")),
    ]


class WaveView(ctypes.Structure):
    """Rows that climb together, by slot."""

    _fields_ = [
        *((name, INT) for name in ("active_count", "done_count", "layer", "holds", "leaves", "stop")),
        ("share", REAL),
        ("company", INT),
        ("pause_at", ctypes.c_uint64),
        *((name, POINTER) for name in ("active", "done", "tokens", "crossing", "emission", "executed", "involuntary")),
        *((name, POINTER) for name in ("batch", "seconds")),
        ("fallbacks", INT),
        ("cpu_time", INT),
    ]


PLACES = 16  # positions that a row may stand at in one round
STAGES = ("draft_layers", "draft_head", "verify", "words")  # Stage


class DraftView(ctypes.Structure):
    """A round of rows that draft."""

    _fields_ = [
        *((name, INT) for name in ("count", "layer", "length", "measure")),
        ("threshold", REAL),
        ("eos", INT),
        *((name, POINTER) for name in ("slots", "room", "positions", "guesses", "drafted", "words", "batch")),
        *((name, INT) for name in ("ran", "fallbacks", "cpu_time")),
        ("seconds", POINTER),
    ]


ENCODER_MATRICES = ("qkv", "o", "up", "down")


class EncoderLayerView(ctypes.Structure):
    """The matrices of an encoder's layer."""

    _fields_ = [(name, MatrixView) for name in ENCODER_MATRICES]


class EncoderView(ctypes.Structure):
    """An encoder, and what makes cross-attention K/V of its output."""

    _fields_ = [
        *((name, INT) for name in ("layers", "heads", "d_model", "d_kv", "d_ff", "kind", "cache_kind")),
        *((name, INT) for name in ("activation", "gated", "sources", "embed_kind", "cross_layers")),
        ("eps", REAL),
        *((name, POINTER) for name in ("layer", "embed", "bias", "cross")),
    ]
