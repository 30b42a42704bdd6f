"""From a call to the requests that the engine gets: what is checked against the model and the server's limits."""

import hashlib
from dataclasses import dataclass
from typing import Any

from calm.config import Consistency, Measure
from calm.drafting import Draft
from calm.errors import ConfigError
from calm.policies import Full, SkipSchedule, Static
from calm.serve_config import ServeConfig

from ..messages import ModelInfo
from ..options import RequestOptions
from .asked import CompletionRequest, Drafted
from .backend import Source
from .errors import bad_request


@dataclass(frozen=True)
class Job:
    """One request for the engine.

    Attributes:
        prompt: how errors call its prompt: ``prompt``, or ``prompt[2]``.
        number: of the prompt in its list.
        choices: indices of the choices that it answers: several where all of them are the same greedy answer.
    """

    source: Source
    options: RequestOptions
    prompt: str
    number: int
    choices: tuple[int, ...]


def plan(asked: CompletionRequest, info: ModelInfo, config: ServeConfig) -> list[Job]:
    """Requests in order of their choices. Raises ApiError (400) naming the field, and the prompt, that cannot be."""
    if asked.choices > config.limits.max_n:
        raise bad_request(f"n: at most {config.limits.max_n}", "n")
    if len(asked.stop) > config.limits.max_stops:
        raise bad_request(f"stop: at most {config.limits.max_stops} strings", "stop")
    for name in ("max_tokens", "min_tokens"):
        if (getattr(asked, name) or 0) > info.max_target:
            raise bad_request(f"{name}: the model's answers have at most {info.max_target} tokens", name)
    if (asked.min_tokens or 0) > (asked.max_tokens or info.max_target):
        raise bad_request("min_tokens: it is above max_tokens", "min_tokens")
    options: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "min_tokens": asked.min_tokens or 0,
        "temperature": asked.temperature or 0.0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "stop": asked.stop,
        "ignore_eos": bool(asked.ignore_eos),
        "truncate": bool(asked.truncate),
        **depth(asked, info, config),
    }
    jobs, n = [], asked.choices
    for i, (prompt, source) in enumerate(_sources(asked, info, config)):
        indices = tuple(range(i * n, i * n + n))
        if asked.greedy:
            jobs.append(Job(source, RequestOptions(seed=asked.seed, **options), prompt, i, indices))
            continue
        for j, index in enumerate(indices):
            jobs.append(Job(source, RequestOptions(seed=derived(asked.seed, j), **options), prompt, i, (index,)))
    return jobs


def derived(seed: int | None, choice: int) -> int | None:
    """The seed of one of n choices: the call's own for the first, so that n=1 gives what any n gives first."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def depth(asked: CompletionRequest, info: ModelInfo, config: ServeConfig) -> dict[str, Any]:
    """What RequestOptions are told of early exit. Raises ApiError (400)."""
    wish = asked.early_exit
    if wish is not None and wish.draft is not None:
        return {"draft": _draft(wish.draft, asked, info)}
    if wish is None or (wish.policy is None and wish.threshold is None and wish.tolerance is None):
        if config.default_tolerance is None:
            return _usual(asked, info, config)
        return {"tolerance": config.default_tolerance, "consistency": config.default_consistency}
    if wish.policy == "full":
        return {"policy": Full()}
    if wish.policy == "static":
        if (wish.layer or 0) > info.num_layers:
            raise bad_request(f"early_exit.layer: the model has {info.num_layers} decoder layers", "early_exit.layer")
        return {"policy": Static(wish.layer or 0)}
    if wish.policy == "skip_schedule":
        if info.schedule is None:
            said = "early_exit.policy: the model was not trained by a schedule of layers; ask for another policy"
            raise bad_request(said, "early_exit.policy")
        return {"policy": SkipSchedule(info.schedule)}
    consistency = Consistency(wish.consistency or config.default_consistency)
    told = {"measure": wish.measure, "consistency": consistency}
    if wish.threshold is not None:
        return {"threshold": wish.threshold, **told}
    if wish.tolerance is not None:
        return {"tolerance": wish.tolerance, **told}
    return {"tolerance": _certified(consistency, info, config), **told}


def _usual(asked: CompletionRequest, info: ModelInfo, config: ServeConfig) -> dict[str, Any]:
    """Of calls that say nothing: the model's own schedule of layers, or full depth, drafted where that can be."""
    if info.schedule is not None:
        return {"policy": SkipSchedule(info.schedule)}
    draft = config.default_draft.draft()
    if draft is None or not asked.greedy or asked.min_tokens:
        return {"policy": Full()}
    return {"draft": draft}


def _draft(wish: Drafted, asked: CompletionRequest, info: ModelInfo) -> Draft:
    if not asked.greedy or asked.min_tokens:
        said = "early_exit.draft: it verifies greedy words; leave temperature and min_tokens out"
        raise bad_request(said, "early_exit.draft")
    measure = None if wish.measure is None else Measure(wish.measure)
    try:
        draft = Draft(wish.layer, wish.length, measure, wish.threshold)
        draft.check_depth(info.num_layers)
    except ConfigError as error:
        raise bad_request(f"early_exit.{error}", "early_exit.draft") from None
    return draft


def _certified(consistency: Consistency, info: ModelInfo, config: ServeConfig) -> float:
    """The tolerance that policy certified means."""
    there = info.tolerances.get(consistency.value, ())
    if config.default_tolerance in there and consistency is config.default_consistency:
        assert config.default_tolerance is not None
        return config.default_tolerance
    if not there:
        said = f"early_exit: as it is served this model has no certificate of consistency {consistency.value}"
        raise bad_request(f"{said}; ask for policy full, or for a threshold", "early_exit", "not_calibrated")
    return min(there)


def _sources(asked: CompletionRequest, info: ModelInfo, config: ServeConfig) -> list[tuple[str, Source]]:
    """The prompts, each with its name. Raises ApiError (400) for the first that the model does not take."""
    given = asked.prompt
    if isinstance(given, str):
        return [("prompt", _text(given, "prompt", config))]
    if type(given[0]) is int:
        return [("prompt", _ids(given, "prompt", info, bool(asked.truncate)))]
    if len(given) > config.limits.max_prompts_per_call:
        most = config.limits.max_prompts_per_call
        raise bad_request(f"prompt: at most {most} prompts in one call, got {len(given)}", "prompt")
    kind, found = type(given[0]), list[tuple[str, Source]]()
    for i, each in enumerate(given):
        name = f"prompt[{i}]"
        if type(each) is not kind or kind not in (str, list):
            raise bad_request(
                f"{name}: a list holds texts, or lists of token ids, or token ids; not several of them", name
            )
        found.append((name, _text(each, name, config) if kind is str else _ids(each, name, info, bool(asked.truncate))))
    return found


def _text(text: str, name: str, config: ServeConfig) -> str:
    if not text:
        raise bad_request(f"{name}: it is empty", name)
    size = len(text.encode("utf-8"))
    if size > config.max_prompt_bytes:
        raise bad_request(f"{name}: {size} bytes; a text may have {config.max_prompt_bytes}", name, "prompt_too_long")
    return text


def _ids(ids: list[Any], name: str, info: ModelInfo, truncate: bool) -> tuple[int, ...]:
    if not ids:
        raise bad_request(f"{name}: it is empty", name)
    if len(ids) > info.max_source and not truncate:
        said = f"{name}: {len(ids)} ids; the model takes {info.max_source}; shorten it, or send truncate=true"
        raise bad_request(said, name, "prompt_too_long")
    wrong = next((k for k, token in enumerate(ids) if type(token) is not int or not 0 <= token < info.vocab_size), None)
    if wrong is not None:
        said = f"{name}: its id number {wrong} is none of the vocabulary: whole numbers from 0 to {info.vocab_size - 1}"
        raise bad_request(said, name)
    if len(ids) > info.max_source:
        ids = [*ids[: info.max_source - 1], ids[-1]]  # the last one says that the source is over
    return tuple(ids)
