"""One case measured: the same rows for everyone, parity first, then all contenders in turns."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from calm.checkpoint import finite
from calm.engine_config import PeersConfig
from calm.errors import CalmError

from .peer_crew import Crew
from .peer_plan import (
    OURS,
    Case,
    Depths,
    Entrant,
    WorkerPlan,
    our_entrants,
    peer_entrant,
    variant_settings,
)
from .peer_process import PeerError
from .peer_ratios import Samples, Table
from .peer_text import parity

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """What a case needs to know of the model, whoever runs it.

    Attributes:
        paper: the name under which the paper's Table 1 has a model of this shape.
    """

    name: str
    num_layers: int
    vocab_size: int
    eos: int
    paper: str


def drawn_depths(config: PeersConfig, model: Model, rows: int) -> list[Depths]:
    """The traces of a case, one per kind and measure, with the mean depth of Table 1."""
    from calm.traces import draw, table1_depth

    found = []
    for measure in config.measures:
        mean = table1_depth(model.paper, measure, model.num_layers)
        for kind in config.traces:
            traces = draw(kind, model.num_layers, mean, rows, config.many, config.seed)
            decode, call = traces.mean(config.few, config.many), traces.mean(0, config.many)
            found.append(Depths(kind, measure.value, traces.depths, decode, call))
    return found


def timed(
    crew: Crew, entrants: Sequence[Entrant], rows: int, config: PeersConfig
) -> tuple[list[Entrant], Samples, dict[str, Any]]:
    """Time all that are still there in turns; where one fails it drops out and the others begin anew.

    Returns who took part, their samples, and the noise as recorded.

    Raises:
        PeerError: nothing of ours runs.
        CalmError: the machine is noisy, ``attempts`` times, and ``allow_noisy`` is false.
    """
    from .clocks import Contender, paired

    left = config.attempts
    while True:
        here = [entrant for entrant in entrants if entrant.worker in crew]
        if not any(entrant.against == OURS for entrant in here):
            reasons = "; ".join(f"{name}: {why}" for name, why in crew.failures.items() if name.startswith(OURS))
            raise PeerError(OURS, f"nothing of ours runs ({reasons})")
        contenders = [Contender(each.name, crew.decoder(each.worker, each.variant, rows)) for each in here]
        try:
            found = paired(
                contenders, config.few, config.many, config.repeats, config.warmups, allow_noisy=config.allow_noisy
            )
        except PeerError as error:
            crew.drop(error)
            continue
        except CalmError as error:
            left -= 1
            if not left:
                raise
            logger.warning("%s; once more", error)
            continue
        seconds = {name: [(each.few, each.many) for each in row] for name, row in found.samples.items()}
        return here, Samples(config.few, config.many, seconds), finite(found.noise.to_json())


def predictions(crew: Crew, entrants: Sequence[Entrant], config: PeersConfig) -> tuple[dict[str, float], str | None]:
    """Seconds that our cost tables give the tokens ``few`` to ``many``, by entrant; or why there are none."""
    found: dict[str, float] = {}
    if not config.predict:
        return found, "predict=false"
    for entrant in entrants:
        if entrant.against != OURS or entrant.dtype not in config.exit_dtypes:
            continue
        try:
            few, many = (
                crew.ask(entrant.worker, "predict", config.load_timeout, variant=entrant.variant, tokens=tokens)
                for tokens in (config.few, config.many)
            )
        except PeerError as error:
            return found, error.reason
        found[entrant.name] = many["seconds"] - few["seconds"]
    return found, None


def measure_case(
    config: PeersConfig,
    case: Case,
    model: Model,
    crew: Crew,
    plans: Sequence[WorkerPlan],
    sources: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """The record of a case: who took part, parity, samples, noise and ratios.

    Raises:
        PeerError, CalmError: as ``timed`` does.
    """
    depths = drawn_depths(config, model, len(sources)) if config.exit_dtypes else []
    entrants = our_entrants(config, depths, model.num_layers)  # the first one is also timed against itself
    entrants += [peer_entrant(plan) for plan in plans if plan.against != OURS]
    variants: dict[str, dict[str, Any]] = {}
    for entrant in entrants:
        told = variant_settings(entrant, depths) if entrant.against == OURS else {}
        variants.setdefault(entrant.worker, {})[entrant.variant] = told
    crew.prepare(sources, config.many, variants)
    same = parity(crew.answers(sources, config.many), model.eos)
    here, samples, noise = timed(crew, entrants, len(sources), config)
    predicted, missing = predictions(crew, here, config)
    labels = {
        "shape": case.shape, "source_tokens": max(map(len, sources)), "batch": case.batch, "threads": case.threads
    }  # fmt: skip
    table = Table(labels, here, samples, depths, model.num_layers, predicted)
    return {
        **labels,
        "peers": {name: dict(crew.about[name]) for name in crew.names},
        "failures": dict(crew.failures),
        "parity": same,
        "depths": [{"trace": d.trace.value, "measure": d.measure, "decode": d.decode, "call": d.call} for d in depths],
        "noise": noise,
        "predicted_seconds": predicted,
        "no_prediction": missing,
        "entrants": [asdict(entrant) for entrant in here],
        "few": config.few,
        "many": config.many,
        "seconds": {name: [list(pair) for pair in pairs] for name, pairs in samples.seconds.items()},
        "ratios": [{**row, "noisy": noise["noisy"]} for row in table.rows()],
    }
