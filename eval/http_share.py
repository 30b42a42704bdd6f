"""How much of the engine's speed is left over HTTP: tokens a second through the server by those of a direct call.

    python -m eval.http_share                                         # random weights, tiny and small shapes
    python -m eval.http_share checkpoint=runs/demo/model ways=[full,tolerance=0.05]

The same texts go to an engine in this process (``generate``) and to a server of ours in processes of its own: whole
answers, and streamed ones. Over HTTP ``queued`` batches are in flight, so that the server, as the direct call, always
knows what to run next. One thread decodes in each case; what a server does beside that may use the machine's other
cores. Turns are A B C A in each round, each with texts that were not asked before; shares are medians over the rounds.
Exit status 5: a case was refused for noise.
"""

import asyncio
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.engine_config import served_numbers
from calm.errors import CalmError
from calm.load_config import early_exit
from calm.progress import Progress
from calm.serve_config import ServeConfig, served_name
from calm.soak_config import HttpShareConfig

from .common import Stamp, articles_of, choose_model, finish, say
from .tables import aligned

if TYPE_CHECKING:
    from serve.engine import Engine

    from .clocks import Noise
    from .load_client import Client
    from .load_stream import Reply
    from .own_server import OwnServer

REFUSED = 5  # exit status
DIRECT, WHOLE, STREAMED, AGAIN = "direct", "whole", "streamed", "direct (again)"
COLUMNS = ("model", "batch", "way", "direct_tokens_per_s", "whole", "streamed", "again", "noisy")


@dataclass(frozen=True)
class Model:
    """What is served, and texts for it.

    Attributes:
        texts: so many, other ones for each number.
    """

    name: str
    folder: Path
    texts: Callable[[int, int], list[str]]


@dataclass
class Timed:
    """Seconds of each contender's turns, round by round, and tokens of one turn."""

    tokens: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def share(self, name: str) -> float:
        """Tokens a second by those of the direct call: the median over the rounds."""
        pairs = zip(self.seconds[DIRECT], self.seconds[name], strict=True)
        return statistics.median(direct / other for direct, other in pairs)


def run(config: HttpShareConfig, run_dir: Path) -> int:
    stamp = Stamp("eval.http_share", config)
    records = []
    with tempfile.TemporaryDirectory() as place:
        for model in _models(config, Path(place)):
            for batch in config.batches:
                records += _cases(config, model, batch, run_dir)
    summary = {**stamp.values(), "cases": records}
    say(as_text(records))
    refused = [record for record in records if "share" not in record]
    for record in refused:
        say(f"{record['model']}, batch {record['batch']}, {record['way']}: {record['refused']}")
    finish(summary, run_dir)
    return REFUSED if refused else 0


def _models(config: HttpShareConfig, place: Path) -> list[Model]:
    if config.checkpoint is not None:
        from calm.models.folder import load

        folder = choose_model(config.checkpoint)
        known = [article.source for article in articles_of(None, load(folder))[1]]

        def articles(count: int, number: int) -> list[str]:
            return [known[(number * count + i) % len(known)] for i in range(count)]

        return [Model(served_name(ServeConfig(str(folder))), folder, articles)]
    from .shapes import WORDS, shape_of, write_folder

    models = []
    for shape in config.shapes:
        folder = write_folder(shape, place / shape, config.seed)
        highest = shape_of(shape).vocab_size - 1

        def words(count: int, number: int, highest: int = highest) -> list[str]:
            generator = random.Random(f"{config.seed} {number}")
            length = config.source_tokens - 1  # and EOS
            return [" ".join(f"w{generator.randint(len(WORDS), highest)}" for _ in range(length)) for _ in range(count)]

        models.append(Model(shape, folder, words))
    return models


def _cases(config: HttpShareConfig, model: Model, batch: int, run_dir: Path) -> list[dict[str, Any]]:
    """All ways of a model at one batch size, by one engine and one server."""
    import torch

    from serve.engine import Engine
    from serve.options import EngineOptions

    from .own_server import own_server

    dtype, weights = served_numbers(config.dtype)
    waiting = round(2 * config.queued * batch)
    options = EngineOptions(max_batch=batch, max_waiting=waiting, weights=weights)
    engine = Engine(model.folder, options, dtype=getattr(torch, dtype))
    served = [f"max_batch={batch}", f"max_waiting={waiting}", f"dtype={config.dtype}", f"limits.connections={waiting}"]
    with own_server(model.folder, run_dir / "server.log", served) as server:
        say(f"{model.name}, batch {batch}: server ready after {server.ready_s:.1f} s")
        return [_case(config, model, batch, way, engine, server) for way in config.ways]


def _case(
    config: HttpShareConfig, model: Model, batch: int, way: str, engine: "Engine", server: "OwnServer"
) -> dict[str, Any]:
    told: dict[str, Any] = {"model": model.name, "batch": batch, "way": way, "runner": engine.runner_name}
    timed, noise = asyncio.run(_rounds(config, model, batch, way, engine, server))
    told |= {"noise": noise.to_json(), "tokens": timed.tokens, "seconds": timed.seconds}
    try:
        noise.check(config.allow_noisy)
    except CalmError as error:
        return {**told, "refused": str(error)}
    direct = statistics.median(timed.tokens / seconds for seconds in timed.seconds[DIRECT])
    return {
        **told,
        "direct_tokens_per_s": direct,
        "share": {name: timed.share(name) for name in (WHOLE, STREAMED, AGAIN)},
    }


async def _rounds(
    config: HttpShareConfig, model: Model, batch: int, way: str, engine: "Engine", server: "OwnServer"
) -> "tuple[Timed, Noise]":
    """All turns.

    Raises:
        CalmError: a request failed, or brought other tokens than the direct call.
    """
    from serve.options import RequestOptions

    from .clocks import Clocked, Noise, ProcLoad, foreign_share
    from .load_client import Client
    from .load_ready import find_model

    asked = RequestOptions(**_options(way), max_tokens=config.tokens, ignore_eos=True)
    client, load = Client(server.url), ProcLoad()
    name = await find_model(client, server.url, None, 60.0)

    def direct(texts: Sequence[str]) -> int:
        return sum(len(answer.tokens) for answer in engine.generate(list(texts), asked))

    async def turn(which: str, number: int, count: int) -> float:
        texts = model.texts(count, number)
        began = time.perf_counter()
        if which in (WHOLE, STREAMED):
            tokens = await _ask_all(client, _bodies(config, name, way, texts, which == STREAMED), config, batch)
        else:
            tokens = direct(texts)
        seconds = time.perf_counter() - began
        if tokens != count * config.tokens:
            said = f"{which} brought {tokens} tokens instead of {count * config.tokens}"
            raise CalmError(f"{said}, so speeds cannot be compared")
        return seconds

    order, number, before, begun = (DIRECT, WHOLE, STREAMED, AGAIN), 2, load(), time.perf_counter()
    try:
        _, seconds = [await turn(DIRECT, cold, config.waves * batch) for cold in range(number)]
        count = batch * max(config.waves, math.ceil(config.waves * config.turn_s / seconds))
        timed = Timed(count * config.tokens)
        with Progress(config.warmups + config.repeats, f"{model.name} {batch} {way}", unit="round") as bar:
            for done in range(-config.warmups, config.repeats):
                if done == 0:
                    before, begun = load(), time.perf_counter()
                for which in order:
                    seconds = await turn(which, number, count)
                    number += 1
                    if done >= 0:
                        timed.seconds.setdefault(which, []).append(seconds)
                bar.update()
    finally:
        client.close()
    foreign = foreign_share(before, load(), time.perf_counter() - begun)
    return timed, Noise(foreign, {Clocked.call: timed.share(AGAIN)})


def _options(way: str) -> dict[str, Any]:
    """As the server understands a way's ``early_exit``."""
    from calm.policies import Full, Static

    wish = early_exit(way) or {}
    if wish.get("policy") == "static":
        return {"policy": Static(wish["layer"])}
    return {"policy": Full()} if wish.get("policy") == "full" else wish


def _bodies(config: HttpShareConfig, name: str, way: str, texts: Sequence[str], stream: bool) -> list[bytes]:
    from .load_client import body_of

    fields = {"early_exit": early_exit(way), "max_tokens": config.tokens, "ignore_eos": True, "truncate": True}
    return [body_of(name, text, stream, **fields) for text in texts]


async def _ask_all(client: "Client", bodies: Sequence[bytes], config: HttpShareConfig, batch: int) -> int:
    """Tokens of all answers; ``queued`` batches of requests are under way at any time."""
    from .load_stream import Completion, Reply

    coming = iter(bodies)
    stream = b'"stream": true' in bodies[0]
    kind: Callable[[], Reply] = Completion if stream else Reply
    tokens = 0

    async def ask() -> None:
        nonlocal tokens
        for body in coming:
            reply = await client.answer(body, kind)  # before the sum is read: others add to it meanwhile
            tokens += _tokens(reply)

    await asyncio.gather(*(ask() for _ in range(min(len(bodies), round(config.queued * batch)))))
    return tokens


def _tokens(reply: "Reply") -> int:
    from .load_stream import Completion

    if reply.status != 200:
        raise CalmError(f"the server answers {reply.status}: {reply.message}")
    if isinstance(reply, Completion):
        reply.check()
        return reply.tokens or 0
    return int(json.loads(bytes(reply.body))["usage"]["completion_tokens"])


def as_text(records: Sequence[dict[str, Any]]) -> str:
    """A table for the terminal; shares of the direct call's tokens a second."""
    rows = [list(COLUMNS)]
    for each in records:
        share = each.get("share", {})
        shown = [f"{share[name]:.3f}" if name in share else "" for name in (WHOLE, STREAMED, AGAIN)]
        direct = f"{each['direct_tokens_per_s']:.0f}" if share else ""
        rows.append([each["model"], str(each["batch"]), each["way"], direct, *shown, str(each["noise"]["noisy"])])
    return "\n".join(aligned(rows))


main = program("http_share", HttpShareConfig, run)

if __name__ == "__main__":
    main()
