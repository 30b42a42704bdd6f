"""The life of the engine's process: load, warm up, then commands in and at most one batch of events out a step.

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
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calm.child import die_with_parent
from calm.config import BatchRule, Device, Measure
from calm.device import choose_device
from calm.errors import CalmError, CheckpointError, ConfigError
from calm.policies import Policy

from .frames import Channel, wait
from .messages import Failed, Log, ModelInfo, Ready
from .options import EngineOptions, RequestOptions

if TYPE_CHECKING:
    from calm.rules import Rule

    from .desk import Desk
    from .engine import Engine
    from .tokenising import Tokeniser

logger = logging.getLogger(__name__)

BEAT_S = 0.25  # an idle engine says that it lives
QUIET_S = 0.05  # steps that bring nobody news are told together: by themselves they cost a small model a tenth
WARM_TOKENS = 4
PLACES = 4  # of a traceback that are told


@dataclass(frozen=True)
class Settings:
    """What an engine's process is started with.

    Attributes:
        folder: of the model.
        name: as requests call the model.
        device: as ``device=`` says it (calm.device), or one of torch's.
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
    with _told_to(channel):
        status = _life(channel, settings)
    if status:
        sys.exit(status)


def _life(channel: Channel, settings: Settings) -> int:
    """Returns the exit status."""
    try:
        engine = made(settings)
        longest = warm(engine)
    except Exception as error:
        if not isinstance(error, CalmError):
            logger.exception("the engine cannot be made")
        channel.send(Failed(type(error).__name__, " ".join(str(error).split()) or type(error).__name__))
        return 1
    from .desk import Desk
    from .tokenising import Tokeniser

    tokeniser = Tokeniser(engine.model.to_ids)
    try:
        channel.send(Ready(info_of(engine, settings.name), longest))
        attend(channel, Desk(engine, tokeniser), tokeniser)
    except EOFError:  # the server is gone
        return 0
    except Exception:
        logger.critical("the engine's process ends: it cannot go on", exc_info=True)
        return 1
    finally:
        tokeniser.close()
    return 0


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
        desk.step()
        now = time.perf_counter()
        if desk.news or now - told >= (QUIET_S if stepped else BEAT_S):
            channel.send(desk.batch())
            told = now
    while channel.unsent:
        wait([channel], None)
        channel.receive()


def made(settings: Settings) -> Engine:
    """The engine that the settings ask for.

    Raises:
        CalmError: the folder, the options or this machine do not allow it.
    """
    import torch

    from .engine import Engine

    dtype = getattr(torch, settings.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype={settings.dtype!r:.40} is none; give float32 or bfloat16")
    torch.set_num_threads(1)
    device = settings.device
    if device in tuple(Device):
        device = choose_device(Device(device))
    return Engine(settings.folder, settings.options, device=device, dtype=dtype)


def warm(engine: Engine) -> float:
    """Take requests through, so that what is compiled, allocated and looked up once has been.

    Returns:
        Seconds that a step takes at most: the longest one, as if each row that can join or run had cost as much.

    Raises:
        CheckpointError: the model gives no numbers.
        ConfigError: the cache has no room for a request.
    """
    from .requests import Status

    model, options, picked = engine.model, engine.options, engine.certificates.picked
    policies: list[Policy] = [model.usual]
    if picked is not None and (picked.measure is not Measure.classifier or model.classifier is not None):
        policies.append(picked.policy(0.5))
    tokens = min(WARM_TOKENS, model.max_target)
    asked = [RequestOptions(policy=policy, max_tokens=tokens) for policy in policies]
    longest_source = engine.slots.longest_source(tokens)
    if engine.machine.one_piece:  # a capture in mid-service would look like an engine that hangs
        engine.machine.prepare(*_served(engine))
    longest = float("inf")
    for turn in range(2):  # the first is cold; another source, or it would be known already
        before = engine.clock.steps
        source = [2 + turn] * (longest_source - 1) + [model.spec.eos_token_id]
        for answer in engine.generate([source] * len(asked), asked):
            if answer.status is not Status.finished:
                raise CheckpointError(f"the model cannot decode ({answer.error})")
        steps = list(engine.clock.history)[before - engine.clock.steps :]
        longest = min(longest, max(step.total for step in steps))
    return longest * max(options.max_batch, options.prefill_rows * options.prefill_calls)


def _served(engine: Engine) -> tuple[list[Rule], list[list[Measure]]]:
    """Rules that the engine may follow, and sets of measures that most of its batches have."""
    from calm.rules import Rule

    asked = engine.options.rule
    rules = [BatchRule.own, BatchRule.compact] if asked is BatchRule.auto else [asked]
    measures = [m for m in Measure if m is not Measure.classifier or engine.model.classifier is not None]
    return [Rule(rule, engine.options.quantile) for rule in rules], [[], *([measure] for measure in measures)]


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
            "architecture": "encoder-decoder" if model.spec.cross_attention else "decoder-only",
            "cache_blocks": engine.slots.num_blocks,
        },
        schedule=model.schedule,
        max_drafted=engine.most_drafted,
        has_classifier=model.classifier is not None,
    )


class _ServerLog(logging.Handler):
    """Hands lines over to the server, who has one log. Of an exception it tells the kind and the places in the code."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            error = error.__cause__ or error
            places = traceback.extract_tb(error.__traceback__)[-PLACES:]
            line = f"{line} ({type(error).__name__} at {', '.join(f'{p.filename}:{p.lineno}' for p in places)})"
        self._channel.send(Log(record.name, record.levelno, " ".join(line.split())))


@contextmanager
def _told_to(channel: Channel) -> Iterator[None]:
    """What is logged in here is the server's to write."""
    handler, loggers = _ServerLog(channel), [logging.getLogger(name) for name in ("calm", "serve")]
    for each in loggers:
        each.addHandler(handler)
        each.setLevel(logging.INFO)
    try:
        yield
    finally:
        for each in loggers:
            each.removeHandler(handler)
            each.setLevel(logging.NOTSET)
