"""Stands for the engine's process where only its life counts: needs no torch, and misbehaves as it is asked to."""

import logging
import os
import signal
import socket
import time

from calm.child import die_with_parent
from serve.frames import Channel, wait
from serve.messages import Abort, Batch, Ended, Failed, Load, Log, ModelInfo, Ready, Spoke, Stop, Submit
from serve.requests import Reason, Status, Timing
from serve.worker import BEAT_S, Settings

NAP_S = 1.0
INFO = ModelInfo("m", 4, (1, 2, 3), 60, 16, 8, 4, {}, None, {})


def work(end: socket.socket, settings: Settings) -> None:
    """Echoes words; ``stay`` is never answered, ``hang`` and ``die`` are done. The folder's name says how it starts."""
    die_with_parent(signal.SIGKILL)
    channel = Channel(end)
    match settings.folder:
        case "dies":
            os._exit(5)
        case "fails":
            channel.send(Failed("CheckpointError", "no such folder; give another"))
            return
        case "loads":
            while True:
                time.sleep(60)
    channel.send(Ready(INFO, 2 * NAP_S if settings.folder == "slow" else 0.0))
    stays: set[str] = set()
    leaves = False
    while not leaves:
        wait([channel], BEAT_S)
        events: list[Spoke | Ended] = []
        for command in channel.receive():
            match command:
                case Submit(name, source):
                    assert isinstance(source, str)
                    while "hang" in source:
                        time.sleep(60)
                    if "die" in source:
                        os._exit(7)
                    if "nap" in source:
                        time.sleep(NAP_S)
                    if "log" in source:
                        channel.send(Log("serve.somewhere", logging.WARNING, "100 %s sure"))
                    if "stay" in source:
                        stays.add(name)
                        continue
                    events += [Spoke(name, f"{word} ", (number,), (1,)) for number, word in enumerate(source.split())]
                    events.append(_end(name, Status.finished, Reason.eos))
                case Abort(name) if name in stays and settings.folder != "stubborn":
                    stays.remove(name)
                    events.append(_end(name, Status.cancelled, Reason.cancelled))
                case Stop():
                    leaves = settings.folder != "stubborn"
        channel.send(Batch(tuple(events), Load(time.perf_counter(), 1, len(stays), 0, 0, 0, 0, 0, 0)))


def _end(name: str, status: Status, reason: Reason) -> Ended:
    return Ended(name, status, reason, "", 1, 1, False, (1,), (1,), 0, Timing(0.0, 0.0, 0.0, 0.0))
