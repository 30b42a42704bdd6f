"""Prometheus metrics: vLLM's names under our prefix, and what early exit adds.

Labels come from fixed sets only, never from what a client sends. Times of a request are those of its own clock in the
engine's process; time to the first token starts when the request arrived there, before it is tokenised.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..messages import Batch, DriftState, Ended, Load, ModelInfo, Refused, Spoke
from ..requests import Status
from .answers import FINISH_REASONS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
BETWEEN_TOKENS = (
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    5,
    10,
    40,
    80,
)
REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
NO_LOAD = Load(0.0, 0, 0, 0, 0, 0, 0, 0, 0)
OTHER = "other"


class ExitLayers:
    """How many tokens each layer gave: one bucket a layer, which only a loaded model can tell."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def saw(self, layers: Iterable[int]) -> None:
        for layer in layers:
            if layer > len(self.counts):
                self.counts += [0] * (layer - len(self.counts))
            self.counts[layer - 1] += 1

    def family(self, num_layers: int) -> HistogramMetricFamily:
        counts = self.counts + [0] * (num_layers - len(self.counts))
        buckets, below = [], 0
        for layer, count in enumerate(counts, start=1):
            below += count
            buckets.append((f"{layer}.0", float(below)))
        buckets.append(("+Inf", float(below)))
        total = float(sum(layer * count for layer, count in enumerate(counts, start=1)))
        return HistogramMetricFamily("calm_exit_layer", "Layer that gave a token.", buckets=buckets, sum_value=total)


def _drift(state: DriftState) -> Iterable[Metric]:
    alarm = "1 while certified answers are not as deep as at calibration, or are kept deeper since they were not."
    yield GaugeMetricFamily("calm_drift_alarm", alarm, value=float(state.alarm))
    yield CounterMetricFamily("calm_drift_alarms", "Alarms that depth is not as at calibration.", value=state.alarms)
    evidence = "Log of the e-value against depth as at calibration; log(2 requests_per_alarm) raises the alarm."
    yield GaugeMetricFamily("calm_drift_evidence", evidence, value=state.log_evidence)


class Metrics:
    """One server's metrics.

    Args:
        load, info: where the engine stands, and its model; asked at each scrape.
    """

    def __init__(self, load: Callable[[], Load], info: Callable[[], ModelInfo | None]) -> None:
        self._load, self._info = load, info
        self._registry = CollectorRegistry(auto_describe=False)
        self._exit_layers = ExitLayers()
        self._spoke: dict[str, float] = {}  # when each running request last did
        self._steps = 0
        self._registry.register(self)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"calm_{name}", what, labels, registry=self._registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"calm_{name}", what, buckets=buckets, registry=self._registry)

        self._http = counter("http_requests", "Requests by route and status.", "route", "status")
        self._rejections = counter("admission_rejections", "Calls that were not taken, by reason.", "reason")
        self._cancelled = counter("requests_cancelled", "Requests that were given up: client gone, time over.")
        self._failed = counter("requests_failed", "Requests that failed in the engine.")
        self._expired = counter("requests_expired", "Requests whose time was over before their answer.")
        self._success = counter("request_success", "Answers, by why they ended.", "finished_reason")
        self._certified = counter("certified_answers", "Answers that the model's certificate speaks of.")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = counter("generation_tokens", "Tokens of answers.")
        self._involuntary = counter("involuntary_tokens", "Tokens that a mate made a request speak before it crossed.")
        self._drafted = counter("drafted_tokens", "Words that first layers drafted.")
        self._accepted = counter("accepted_tokens", "Drafted words that the whole stack said too.")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of a request.", BETWEEN_TOKENS)
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean of a request's.", BETWEEN_TOKENS)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the end.", REQUEST)
        self._queue = histogram("request_queue_time_seconds", "From arrival to a place in the batch.", REQUEST)
        self._prefill = histogram("request_prefill_time_seconds", "From the place to the first token.", REQUEST)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the end.", REQUEST)
        self._inference = histogram("request_inference_time_seconds", "From the place to the end.", REQUEST)
        self._iteration = histogram("iteration_tokens_total", "Tokens of one step.", TOKENS)
        self._prompt_lengths = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._answer_lengths = histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        for reason in sorted(set(FINISH_REASONS.values())):
            self._success.labels(reason)

    # what happens

    def responded(self, route: str | None, status: int, code: str | None) -> None:
        """A response is over; ``route``: its template, None for an unknown one; ``code``: of an error of ours."""
        self._http.labels(route or OTHER, str(status)).inc()
        if route == "/v1/completions" and code is not None and (status < 500 or status == 503):
            self._rejections.labels(code).inc()

    def cancelled(self, count: int) -> None:
        self._cancelled.inc(count)

    def saw(self, batch: Batch) -> None:
        """Everything of one step of the engine."""
        if batch.load.steps < self._steps:
            self._spoke.clear()  # another engine: nothing of the last one will end
        tokens = len(batch.silent.layers)
        self._exit_layers.saw(batch.silent.layers)
        for gap in batch.silent.gaps:
            self._itl.observe(gap)
        for event in batch.events:
            if isinstance(event, Spoke):
                tokens += len(event.tokens)
                self._said(event, batch.load.beat)
            elif isinstance(event, Ended):
                self._ended(event)
            elif isinstance(event, Refused):
                self._spoke.pop(event.id, None)
        self._generation_tokens.inc(tokens)
        if batch.load.steps != self._steps:
            self._steps = batch.load.steps
            self._iteration.observe(tokens)

    def _said(self, said: Spoke, now: float) -> None:
        if not said.tokens:
            return
        self._exit_layers.saw(said.layers)
        last = self._spoke.get(said.id)
        if last is not None:
            for _ in said.tokens:
                self._itl.observe(max(0.0, now - last) / len(said.tokens))
        self._spoke[said.id] = now

    def _ended(self, ended: Ended) -> None:
        self._spoke.pop(ended.id, None)
        self._involuntary.inc(ended.involuntary)
        self._drafted.inc(ended.drafted or 0)
        self._accepted.inc(ended.accepted or 0)
        if ended.expired:
            self._expired.inc()
        if ended.status is Status.failed:
            self._failed.inc()
        if ended.status is not Status.finished:
            return
        self._success.labels(FINISH_REASONS[ended.reason]).inc()
        self._certified.inc(ended.certified)
        self._prompt_tokens.inc(ended.prompt_tokens)
        self._prompt_lengths.observe(ended.prompt_tokens)
        self._answer_lengths.observe(ended.tokens)
        time = ended.timing
        decoding = time.ended - time.first_token
        self._e2e.observe(time.ended - time.arrived)
        self._queue.observe(time.waited)
        self._ttft.observe(time.first_token - time.arrived)
        self._prefill.observe(time.first_token - time.admitted)
        self._decode.observe(decoding)
        self._inference.observe(time.ended - time.admitted)
        if ended.tokens > 1:
            self._tpot.observe(decoding / (ended.tokens - 1))

    # what is asked

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """What the engine says of itself."""
        load, info = self._load(), self._info()
        rows = info.max_batch if info else 0
        yield GaugeMetricFamily("calm_num_requests_running", "Rows in the batch.", value=load.running)
        yield GaugeMetricFamily("calm_num_requests_waiting", "Requests in the queue.", value=load.waiting)
        yield GaugeMetricFamily("calm_num_requests_parked", "Rows that wait for company.", value=load.parked)
        used = load.blocks_used / load.blocks if load.blocks else load.running / rows if rows else 0.0
        yield GaugeMetricFamily("calm_kv_cache_usage_perc", "Share of the K/V memory in use, 0 to 1.", value=used)
        free = load.blocks - load.blocks_used
        of_rows = "Blocks of the cache, each of one layer, that rows have."
        yield GaugeMetricFamily("calm_kv_blocks_used", of_rows, value=load.blocks_used)
        yield GaugeMetricFamily("calm_kv_blocks_free", "Blocks of the cache that nobody has.", value=free)
        yield CounterMetricFamily("calm_preemptions", "Rows that gave their blocks up.", value=load.preemptions)
        waiting = "Bytes of keys and values of such rows that wait on the host."
        yield GaugeMetricFamily("calm_preempted_bytes", waiting, value=load.preempted_bytes)
        executed, skipped = load.layers_executed, load.layers_skipped
        yield CounterMetricFamily("calm_layers_executed", "Decoder layers that ran, by row.", value=executed)
        yield CounterMetricFamily("calm_layers_skipped", "Decoder layers that did not run, by row.", value=skipped)
        backfilled = load.backfilled_tokens
        yield CounterMetricFamily("calm_kv_backfill_tokens", "Tokens with K/V of skipped layers.", value=backfilled)
        yield CounterMetricFamily("calm_rebatch", "Waves that waited for company.", value=load.rebatches)
        yield CounterMetricFamily("calm_engine_steps", "Steps of the engine.", value=load.steps)
        yield from _drift(load.drift)
        yield self._exit_layers.family(info.num_layers if info else 0)
