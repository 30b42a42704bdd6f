"""What the reference decoders refuse before they begin: policies and lengths that a model cannot follow."""

from .config import Backfill, Measure
from .errors import ConfigError
from .models.speaking import SpeakingModel
from .policies import Budgeted, Confident, Policy, SkipSchedule, fixed_depth


def check_policy(model: SpeakingModel, policy: Policy, backfill: Backfill) -> None:
    """Raise ConfigError where the policy asks for what the model does not have, or does not go with the backfill."""
    if isinstance(policy, Budgeted):
        policy.errors.check_depth(model.num_layers)
        if backfill is not Backfill.project:
            raise ConfigError(
                f"a budget of errors is of keys and values that are projected; backfill={backfill.value} has none"
            )
        policy = policy.exits
    if isinstance(policy, SkipSchedule):
        policy.schedule.check_depth(model.num_layers)
        return
    fixed_depth(policy, "", 0, model.num_layers)
    if isinstance(policy, Confident):
        if policy.measure is Measure.classifier and not model.settings.has_classifier:
            raise ConfigError(
                "measure 'classifier' needs a trained exit classifier and this model has none; "
                "run python -m train stage=classifier checkpoint=<folder>"
            )
        threshold = policy.schedule.threshold
        if isinstance(threshold, tuple) and len(threshold) != model.num_layers - 1:
            raise ConfigError(
                f"{len(threshold)} thresholds for {model.num_layers} layers; give one number or {model.num_layers - 1}"
            )


def check_lengths(model: SpeakingModel, max_new_tokens: int) -> None:
    """Raise ConfigError where the longest source and answer have more tokens than the model has positions."""
    source, room = model.settings.max_source_tokens, model.max_positions
    if room is not None and source + max_new_tokens - 1 > room:
        raise ConfigError(
            f"sources of up to {source} tokens and answers of up to {max_new_tokens} do not fit the model's {room} "
            "positions; lower max_source_tokens or max_target_tokens"
        )
