"""The life of the engine's process: load, warm up, then commands in and one batch of events out a step.

Nothing heavy is imported before the process runs, so that a server can name ``work`` without torch.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calm.child import die_with_parent
from calm.config import Measure
from calm.errors import CalmError, CheckpointError, ConfigError
from calm.policies import Full, Policy

from .frames import Channel, wait
from .messages import Failed, ModelInfo, Ready
from .options import EngineOptions, RequestOptions

if TYPE_CHECKING:
    from .desk import Desk
    from .engine import Engine
    from .tokenising import Tokeniser

logger = logging.getLogger(__name__)

BEAT_S = 0.25  # an idle engine says that it lives
WARM_TOKENS = 4


@dataclass(frozen=True)
class Settings:
    """What an engine's process is started with.

    Attributes:
        folder: of the model.
        name: as requests call the model.
        dtype: by its name in torch.
    """

    folder: str
    options: EngineOptions
    name: str
    device: str = "cpu"
    dtype: str = "float32"


def work(end: socket.socket, settings: Settings) -> None:
    """What the process does from its start to its end; exit status 0 when it was told to stop or its parent is gone.

    Ctrl-C and SIGTERM, which a terminal or a service manager sends to the whole group, are left to the parent: it
    says when the requests that run have ended.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    die_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid != os.getppid():
        return  # it ended before it could have told us
    channel = Channel(end)
    try:
        engine = made(settings)
    except Exception as error:
        if not isinstance(error, CalmError):
            logger.exception("the engine could not be made")
        channel.send(Failed(type(error).__name__, " ".join(str(error).split()) or type(error).__name__))
        sys.exit(1)
    from .desk import Desk
    from .tokenising import Tokeniser

    tokeniser = Tokeniser(engine.model.to_ids)
    try:
        channel.send(Ready(info_of(engine, settings.name)))
        attend(channel, Desk(engine, tokeniser), tokeniser)
    except EOFError:
        return
    except Exception:
        logger.critical("the engine's process ends: it cannot go on", exc_info=True)
        sys.exit(1)
    finally:
        tokeniser.close()


def attend(channel: Channel, desk: Desk, tokeniser: Tokeniser) -> None:
    """Until somebody says Stop.

    Raises:
        EOFError: the server is gone.
        EngineBroken: the engine is.
    """
    told = time.perf_counter()
    while not desk.leaving:
        if not desk.busy:
            due = min(told + BEAT_S, desk.next_deadline)
            wait([channel, tokeniser.channel], max(0.0, due - time.perf_counter()))
        for command in channel.receive():
            desk.take(command)
        stepped = desk.busy
        batch = desk.step()
        if stepped or batch.events or batch.load.beat - told >= BEAT_S:
            channel.send(batch)
            told = batch.load.beat
    while channel.unsent:
        wait([channel], None)
        channel.receive()


def made(settings: Settings) -> Engine:
    """The engine, warm: what is compiled, allocated and looked up once has been, and a request has gone through.

    Raises:
        CalmError: the folder, the options or this machine do not allow it.
    """
    import torch

    from .engine import Engine
    from .requests import Status

    dtype = getattr(torch, settings.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype={settings.dtype!r:.40} is none; give float32 or bfloat16")
    torch.set_num_threads(1)
    engine = Engine(settings.folder, settings.options, device=settings.device, dtype=dtype)
    model, picked = engine.model, engine.certificates.picked
    longest = [model.spec.eos_token_id] * model.max_source
    policies: list[Policy] = [Full()]
    if picked is not None and (picked.measure is not Measure.classifier or model.classifier is not None):
        policies.append(picked.policy(0.5))
    asked = [RequestOptions(policy=policy, max_tokens=min(WARM_TOKENS, model.max_target)) for policy in policies]
    for answer in engine.generate([longest] * len(asked), asked):
        if answer.status is not Status.finished:
            raise CheckpointError(f"the model cannot decode ({answer.error})")
    return engine


def info_of(engine: Engine, name: str) -> ModelInfo:
    """What a client may know of this engine's model."""
    model, options, picked = engine.model, engine.options, engine.certificates.picked
    return ModelInfo(
        name=name,
        num_layers=model.spec.num_layers,
        exit_layers=model.exit_layers,
        vocab_size=model.spec.vocab_size,
        max_source=model.max_source,
        max_target=model.max_target,
        max_batch=options.max_batch,
        tolerances=engine.certificates.tolerances(model.max_target),
        measure=None if picked is None else picked.measure.value,
        about={
            "device": model.device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "runner": engine.runner_name.value,
            "rule": options.rule.value,
            "head": options.head.value,
            "weights": options.weights.value,
            "cross_kv": options.cross_kv.value,
        },
    )
