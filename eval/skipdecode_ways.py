"""Ways of decoding that eval.skipdecode compares: full depth, schedules of either side, exits by confidence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.config import Measure
from calm.errors import ConfigError
from calm.experiment_config import SkipDecodeConfig
from calm.layer_schedule import Decay, LayerSchedule, Side
from calm.thresholds import ThresholdSchedule

from .trials import Row

if TYPE_CHECKING:
    from calm.decode_batch import BatchDecoder
    from calm.models.speaking import SpeakingModel
    from calm.policies import Policy
    from calm.records import Example

BASE, SKIP, BOTTOM, CALM, VARIANT = "base", "skipdecode", "multi_layer_exit", "calm_dec", "variant"
METHODS = (SKIP, BOTTOM, CALM)  # in the order of Table 5
_OF_SIDE = {Side.top: SKIP, Side.bottom: BOTTOM}


@dataclass(frozen=True)
class Way:
    """One way of decoding.

    Attributes:
        method: base (full depth of a model that learnt nothing else), skipdecode, multi_layer_exit, calm_dec, or
            variant, a schedule that stands beside one of skipdecode.
        speedup: nominal, in layers; 1 is full depth.
        nominal: layers a generated token by which it is called so; None of a threshold that is sought.
    """

    method: str
    speedup: int
    folder: Path
    policy: "Policy"
    nominal: float | None = None
    threshold: float | None = None

    @property
    def schedule(self) -> LayerSchedule | None:
        """Its layers by position; None where none are given."""
        return getattr(self.policy, "schedule", None) if self.method in (SKIP, BOTTOM, VARIANT) else None

    @property
    def name(self) -> str:
        """``skipdecode-3x``; of a variant its schedule, as in ``variant-linear-3-2-warmup-0``."""
        given = self.schedule
        if self.method != VARIANT or given is None:
            return f"{self.method}-{self.speedup}x"
        decay = given.decay.value + (f"-{given.power:g}" if given.decay is Decay.power else "")
        return f"{VARIANT}-{decay}-{given.max_layers}-{given.min_layers}-warmup-{given.warmup_layers}"

    def values(self) -> dict[str, Any]:
        """Columns of its rows."""
        return {
            "way": self.name,
            "method": self.method,
            "speedup": self.speedup,
            "layers_nominal": self.nominal,
            "threshold": self.threshold,
        }


@cache
def opened(folder: Path) -> "SpeakingModel":
    """The model of a folder, in fp32; read once."""
    from calm.models.folder import load

    return load(folder)


def decoder(folder: Path, batch_size: int, **how: Any) -> "BatchDecoder":
    from calm.decode_batch import BatchDecoder

    return BatchDecoder(opened(folder), batch_size=batch_size, **how)


def schedule_of(folder: Path) -> LayerSchedule | None:
    """That the model of a folder was trained by; None of other models."""
    kept = opened(folder).settings.skip_schedule
    return None if kept is None else LayerSchedule.from_json(kept)


def check_folders(base: Path, others: Sequence[Path]) -> None:
    """Raise ConfigError where answers of two folders could not be compared, or the first is not of full depth."""
    from calm.calibration.identity import TOKENIZER_FILES, hash_files

    if schedule_of(base) is not None:
        raise ConfigError(f"checkpoint: {base} was trained by a schedule, and 1x needs a model of full depth")
    first, words = opened(base), hash_files(base, TOKENIZER_FILES)
    for folder in others:
        model = opened(folder)
        if model.num_layers != first.num_layers:
            raise ConfigError(
                f"{folder} has {model.num_layers} decoder layers and {base} {first.num_layers}: speed-ups in layers "
                "need models of one depth"
            )
        if hash_files(folder, TOKENIZER_FILES) != words:
            raise ConfigError(f"{folder} has another tokenizer than {base}")


def scheduled_ways(folders: Sequence[Path], variants: bool = False) -> list[Way]:
    """A way for each folder, by method and speed-up; of ``variants`` by schedule.

    Raises:
        ConfigError: a folder without a schedule, two of one name, or a variant that is no SkipDecode.
    """
    from calm.policies import SkipSchedule

    found: list[Way] = []
    for folder in folders:
        schedule = schedule_of(folder)
        asked = "variants" if variants else "scheduled"
        if schedule is None:
            raise ConfigError(f"{asked}: {folder} was not trained with finetune.skip_schedule")
        if variants and schedule.side is not Side.top:
            raise ConfigError(f"variants: {folder} was trained with side={schedule.side.value}, and top is compared")
        nominal = schedule.mean_layers()
        speedup = max(1, round(opened(folder).num_layers / nominal))
        method = VARIANT if variants else _OF_SIDE[schedule.side]
        way = Way(method, speedup, folder, SkipSchedule(schedule), nominal)
        other = next((each for each in found if each.name == way.name), None)
        if other is not None:
            raise ConfigError(f"{asked}: {other.folder} and {folder} are both {way.name}; give one of them")
        found.append(way)
    return found if variants else sorted(found, key=lambda way: (METHODS.index(way.method), way.speedup))


def check_variants(config: SkipDecodeConfig, ways: Sequence[Way]) -> None:
    """Raise ConfigError where variants stand beside nothing."""
    reference = f"{SKIP}-{config.variants_of}x"
    if config.variants and reference not in {way.name for way in ways}:
        raise ConfigError(f"variants: no folder of scheduled= is {reference}; give it, or another variants_of=")


def exit_way(folder: Path, speedup: int, measure: Measure, threshold: float) -> Way:
    """CALM-DEC at a threshold, the same at every position; 1x is full depth of the same model."""
    from calm.policies import Confident, Full

    policy: Policy = Full() if speedup == 1 else Confident(measure, ThresholdSchedule(threshold))
    return Way(CALM, speedup, folder, policy, None, None if speedup == 1 else threshold)


def sought(layers_at: Callable[[float], float], wanted: float, tries: int) -> Row:
    """The threshold whose mean layers come nearest to those wanted: halving, since layers grow with the threshold."""
    low, high, seen = 0.0, 1.0, {}
    for _ in range(tries):
        middle = (low + high) / 2
        seen[middle] = layers_at(middle)
        low, high = (low, middle) if seen[middle] > wanted else (middle, high)
    best = min(seen, key=lambda each: (abs(seen[each] - wanted), -each))
    return {"threshold": best, "dev_layers": seen[best], "wanted_layers": wanted}


def layers_on(folder: Path, rows: "Sequence[Example]", measure: Measure, batch_size: int) -> Callable[[float], float]:
    """Mean layers of the rows' tokens by threshold, each decoded once."""
    from calm.records import mean_layers

    decode = decoder(folder, batch_size)

    @cache
    def layers_at(threshold: float) -> float:
        return mean_layers(decode(rows, exit_way(folder, 2, measure, threshold).policy))

    return layers_at
