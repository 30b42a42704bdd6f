"""Metrics: their names and values, and that no client can make more of them."""

import asyncio
import re
from math import isnan
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serve.http.metrics import Metrics
from serve.messages import Batch, Ended, Load, Refused, Silent, Spoke
from serve.requests import Reason, Status, Timing

from .fakes import INFO, NAME, FakeEngine
from .running import app_of, ask

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
SPEC = """
num_requests_running num_requests_waiting num_requests_parked kv_cache_usage_perc prompt_tokens_total
generation_tokens_total admission_rejections_total request_success_total requests_cancelled_total requests_failed_total
requests_expired_total certified_answers_total time_to_first_token_seconds inter_token_latency_seconds
request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds iteration_tokens_total
request_prompt_tokens request_generation_tokens exit_layer layers_executed_total layers_skipped_total
kv_backfill_tokens_total involuntary_tokens_total rebatch_total engine_steps_total http_requests_total
kv_blocks_used kv_blocks_free preemptions_total
""".split()  # fmt: skip


def samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            found[each.name, tuple(sorted(each.labels.items()))] = each.value
    return found


def scraped(app: Any) -> Samples:
    response = ask(app, "GET", "/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(response.text)


def ended(name: str, layers: tuple[int, ...], **changes: Any) -> Ended:
    values: dict[str, Any] = {
        "id": name, "status": Status.finished, "reason": Reason.eos, "text": "", "prompt_tokens": 7,
        "tokens": len(layers), "certified": True, "emission_layers": layers, "executed_layers": layers,
        "involuntary": 0, "timing": Timing(10.0, 10.2, 10.5, 12.5),
    }  # fmt: skip
    return Ended(**{**values, **changes})


def load(**changes: Any) -> Load:
    values: dict[str, Any] = {
        "beat": 0.0, "steps": 0, "running": 0, "waiting": 0, "parked": 0, "layers_executed": 0, "layers_skipped": 0,
        "backfilled_tokens": 0, "rebatches": 0,
    }  # fmt: skip
    return Load(**{**values, **changes})


def told(*batches: Batch, now: Load | None = None) -> Samples:
    metrics = Metrics(lambda: now or load(), lambda: INFO)
    for batch in batches:
        metrics.saw(batch)
    return samples(metrics.exposition().decode())


def test_every_metric_is_there_from_the_start_and_none_is_no_number() -> None:
    """Fault 43: the format parses, without NaN."""
    found = scraped(app_of())
    names = {name for name, _ in found}
    for name in SPEC:
        if not name.startswith(("admission", "http")):
            assert {f"calm_{name}", f"calm_{name}_count"} & names, name
    assert not any(isnan(value) for value in found.values())
    assert found["calm_request_success_total", (("finished_reason", "stop"),)] == 0


def test_no_name_that_a_client_makes_up_becomes_a_label() -> None:
    """Fault 43: cardinality is fixed under 10^4 random names."""

    async def flood(app: Any, count: int) -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for number in range(count):
                name = f"{number * 2654435761 % 2**32:x}"
                await client.get(f"/{name}" if number % 2 else f"/v1/models/{name}")
                if not number % 10:
                    await client.post("/v1/completions", json={"model": name, "prompt": name, name: name})
                    await client.post("/v1/completions", json={"model": name, "prompt": name, "user": name})
                    await client.request("GET", "/version", headers={"x-request-id": name, "user-agent": name})
            for batch in range(10):  # and as names of fields
                fields = {f"{(batch * count + number) * 2654435761 % 2**32:x}": 1 for number in range(count)}
                await client.post("/v1/completions", json=fields)

    app = app_of()
    asyncio.run(flood(app, 40))
    scraped(app)
    before = set(scraped(app))
    asyncio.run(flood(app, 1000))
    assert set(scraped(app)) == before
    assert {value for _, labels in before for name, value in labels if name == "route"} == {
        "other", "/v1/models/{model:path}", "/v1/completions", "/version", "/metrics"
    }  # fmt: skip


def test_a_route_is_told_by_its_template() -> None:
    labels = {dict(labels)["route"] for name, labels in scraped(app_of()) if name == "calm_http_requests_total"}
    assert labels <= {"/metrics"}


def test_what_steps_bring_is_counted() -> None:
    first = Batch((Spoke("a", "x", (5,), (2,)), Spoke("b", "y", (6,), (8,))), load(beat=10.5, steps=1, running=2))
    second = Batch((Spoke("a", "x", (5, 6), (3, 2)), Refused("c", "QueueFull", "full")), load(beat=11.5, steps=2))
    last = Batch(
        (ended("a", (2, 3, 2), involuntary=2), ended("b", (8,), reason=Reason.length, certified=False)),
        load(beat=11.6, steps=2),
    )
    found = told(first, second, last)
    buckets = {name: found["calm_exit_layer_bucket", (("le", name),)] for name in ("1.0", "2.0", "3.0", "8.0", "+Inf")}
    assert buckets == {"1.0": 0, "2.0": 2, "3.0": 3, "8.0": 4, "+Inf": 4}
    assert (found["calm_exit_layer_count", ()], found["calm_exit_layer_sum", ()]) == (4, 15)
    assert found["calm_generation_tokens_total", ()] == 4
    assert found["calm_prompt_tokens_total", ()] == 14
    assert found["calm_request_success_total", (("finished_reason", "stop"),)] == 1
    assert found["calm_request_success_total", (("finished_reason", "length"),)] == 1
    assert found["calm_certified_answers_total", ()] == 1
    assert found["calm_involuntary_tokens_total", ()] == 2
    # the second step gave a two tokens a second after its first: half a second each
    assert found["calm_inter_token_latency_seconds_count", ()] == 2
    assert found["calm_inter_token_latency_seconds_sum", ()] == 1.0
    assert found["calm_iteration_tokens_total_count", ()] == 2
    assert found["calm_iteration_tokens_total_sum", ()] == 4


def test_tokens_of_answers_that_are_told_whole_are_counted_all_the_same() -> None:
    first = Batch((Spoke("a", "x", (5,), (2,)),), load(beat=10.5, steps=1), Silent((8, 3)))
    second = Batch((), load(beat=11.0, steps=2), Silent((3, 1), (0.5, 0.25)))
    found = told(first, second)
    assert (found["calm_exit_layer_count", ()], found["calm_exit_layer_sum", ()]) == (5, 17)
    assert found["calm_generation_tokens_total", ()] == 5
    assert found["calm_inter_token_latency_seconds_count", ()] == 2
    assert found["calm_inter_token_latency_seconds_sum", ()] == 0.75
    assert found["calm_iteration_tokens_total_sum", ()] == 5


def test_times_of_a_request_are_those_of_its_clock() -> None:
    """Arrived 10.0, admitted 10.2, first token 10.5, ended 12.5, three tokens."""
    found = told(Batch((ended("a", (2, 3, 2)),), load(steps=1)))
    sums = {
        "time_to_first_token_seconds": 0.5,
        "e2e_request_latency_seconds": 2.5,
        "request_queue_time_seconds": 0.2,
        "request_prefill_time_seconds": 0.3,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.3,
        "request_time_per_output_token_seconds": 1.0,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 3,
    }
    assert {name: round(found[f"calm_{name}_sum", ()], 9) for name in sums} == sums
    assert found["calm_time_to_first_token_seconds_bucket", (("le", "0.25"),)] == 0
    assert found["calm_time_to_first_token_seconds_bucket", (("le", "0.5"),)] == 1
    assert found["calm_time_to_first_token_seconds_bucket", (("le", "2560.0"),)] == 1


def test_ends_that_are_no_answers_are_told_apart() -> None:
    gone = ended("a", (2,), status=Status.cancelled, reason=Reason.cancelled)
    late = ended("b", (), status=Status.cancelled, reason=Reason.cancelled, expired=True)
    bad = ended("c", (), status=Status.failed, reason=Reason.failed)
    found = told(Batch((gone, late, bad), load(steps=1)))
    assert found["calm_requests_failed_total", ()] == 1
    assert found["calm_requests_expired_total", ()] == 1
    assert found["calm_e2e_request_latency_seconds_count", ()] == 0
    assert found["calm_request_success_total", (("finished_reason", "stop"),)] == 0


def test_where_the_engine_stands_is_read_at_a_scrape() -> None:
    now = load(
        steps=9, running=3, waiting=5, parked=1, layers_executed=70, layers_skipped=30, backfilled_tokens=4, rebatches=2
    )
    found = told(now=now)
    assert found["calm_num_requests_running", ()] == 3 and found["calm_num_requests_waiting", ()] == 5
    assert found["calm_kv_cache_usage_perc", ()] == 3 / INFO.max_batch
    assert found["calm_num_requests_parked", ()] == 1
    assert found["calm_layers_executed_total", ()] == 70 and found["calm_layers_skipped_total", ()] == 30
    assert found["calm_kv_backfill_tokens_total", ()] == 4 and found["calm_rebatch_total", ()] == 2
    assert found["calm_engine_steps_total", ()] == 9


def test_a_paged_cache_tells_its_blocks_and_who_lost_them() -> None:
    found = told(now=load(running=2, blocks=20, blocks_used=15, preemptions=3))
    assert found["calm_kv_cache_usage_perc", ()] == 0.75
    assert (found["calm_kv_blocks_used", ()], found["calm_kv_blocks_free", ()]) == (15, 5)
    assert found["calm_preemptions_total", ()] == 3


def test_a_new_engine_starts_counting_anew() -> None:
    found = told(
        Batch((Spoke("a", "x", (5,), (2,)),), load(beat=1.0, steps=5)),
        Batch((Spoke("a", "x", (5,), (2,)),), load(beat=99.0, steps=1)),
    )
    assert found["calm_inter_token_latency_seconds_count", ()] == 0
    assert found["calm_generation_tokens_total", ()] == 2


def test_refusals_are_counted_by_reason() -> None:
    from .running import complete

    engine = FakeEngine(max_waiting=0)
    app = app_of(engine)
    complete(app)
    complete(app, n=0)
    complete(app, foo=1)
    complete(app, model="x")
    engine.state = "draining"
    complete(app)
    found = scraped(app)
    reasons = {
        dict(labels)["reason"]: value
        for (name, labels), value in found.items()
        if "admission" in name and "total" in name
    }
    assert reasons == {"queue_full": 1, "invalid_request": 1, "unknown_field": 1, "model_not_found": 1, "draining": 1}
    statuses = {dict(labels)["status"] for name, labels in found if name == "calm_http_requests_total"}
    assert statuses == {"429", "400", "404", "503"}


def test_the_help_of_a_metric_is_a_sentence() -> None:
    text = ask(app_of(), "GET", "/metrics").text
    lines = re.findall(r"^# HELP (calm_\w+) (.*)$", text, re.MULTILINE)
    assert len(lines) > 25 and all(said.endswith(".") for name, said in lines)
    assert NAME not in text
