"""The answer of a report, from made-up records with known winners."""

from dataclasses import replace
from typing import Any

from eval.report.answer import Worth, answered
from eval.report.evidence import Evidence, Quality, Span, Way, gathered
from eval.report.readings import shallow_ways

LOSS = Span(-0.010, -0.014, -0.006)
CERTIFIED = Quality("exit", "state", LOSS, 0.5, 0.97, 0.05, 4.0, picked=True)


def exit_way(batch: int = 8, speed: float = 1.4, **more: Any) -> Way:
    values = {"rule": "compact", "threshold": 0.97, "tolerance": 0.05, "quality": LOSS, **more}
    return Way("exit", values.pop("name", "state"), batch, around(speed), **values)


def static(batch: int = 8, speed: float = 1.5, at: float = -0.02, depth: float = 4.0) -> Way:
    return Way("static", f"static depth {depth:g}", batch, around(speed), quality=Span(at, at - 0.003, at + 0.003))


def around(middle: float) -> Span:
    return Span(middle, middle - 0.02, middle + 0.02)


def test_exits_win_where_the_faster_fixed_depth_is_clearly_worse() -> None:
    found = answered(Evidence([exit_way(), exit_way(rule="own", speed=1.2), static()], [CERTIFIED]))
    assert found.worth is Worth.yes and found.headline == "Early exit here is worth it at batch 8."
    text = found.sentences["Speed and quality"][0]
    assert text == (
        "Batch 8: at risk 0.05 decode steps run 1.40 [1.38, 1.42] times as fast as full depth's (state at 0.97, rule "
        "compact) at a loss of 1.0 [0.6, 1.4] points of ROUGE-L; static depth 4 gives 1.50 [1.48, 1.52] at a loss of "
        "2.0 [1.7, 2.3] points of ROUGE-L."
    )
    assert found.sentences["Threshold and batch rule"] == [
        "Recommended, certified for risk 0.05: state at 0.97 under rule compact at batch 8."
    ]
    assert "experiment breakdown" in found.sentences["Why not more"][0]


def test_a_fixed_depth_that_is_as_good_and_faster_wins() -> None:
    found = answered(Evidence([exit_way(), static(at=-0.009)], [CERTIFIED]))
    assert found.worth is Worth.no and found.headline == "Early exit here is not worth it at batch 8."
    assert (
        "not worth it, for that is faster, and its ROUGE-L cannot be told apart"
        in found.sentences["Speed and quality"][0]
    )
    assert found.best == {} and "full depth or a fixed one" in found.sentences["Threshold and batch rule"][0]


def test_what_cannot_be_told_apart_is_not_decided() -> None:
    unknown = Way("static", "static depth 4", 8, around(1.5))
    wide = replace(unknown, quality=Span(0.004, -0.030, 0.039))
    for rival in (static(speed=1.41, at=-0.0101), static(at=-0.012), unknown, wide):
        found = answered(Evidence([exit_way(), rival], [CERTIFIED]))
        assert found.worth is Worth.open, rival
        assert "not shown to be better than static depth 4" in found.sentences["Speed and quality"][0]
    calls = answered(Evidence([exit_way(call=Span(1.0, 0.98, 1.03))], [CERTIFIED]))
    assert calls.worth is Worth.open and "Whole calls are not shown to be faster" in " ".join(calls.flat())


def test_exits_that_are_slower_than_full_depth_are_not_worth_it() -> None:
    cases = ((0.9, Worth.no, "slower than full depth"), (1.01, Worth.open, "cannot be told from full depth"))
    for speed, worth, said in cases:
        found = answered(Evidence([exit_way(speed=speed)], [CERTIFIED]))
        assert found.worth is worth and said in found.sentences["Speed and quality"][0]


def test_batch_sizes_may_differ_in_verdict_measure_and_rule() -> None:
    ways = [exit_way(1, 0.9), exit_way(8), exit_way(32, 2.0, name="softmax", threshold=0.5, rule="rebatch")]
    found = answered(Evidence(ways, [CERTIFIED]))
    assert found.headline == "Early exit here is worth it at batch 8 and 32; not worth it at batch 1."
    assert "softmax at 0.5 under rule rebatch at batch 32" in found.sentences["Threshold and batch rule"][0]


def test_measures_in_conflict_are_both_told() -> None:
    gentle = exit_way(speed=1.2, name="softmax", threshold=0.5, quality=Span(-0.002, -0.003, -0.001))
    found = answered(Evidence([exit_way(), gentle], [CERTIFIED]))
    text = found.sentences["Speed and quality"][0]
    assert "softmax at 0.5 gives 1.20" in text and "none is best in both" in text
    worse = exit_way(speed=1.2, name="softmax", threshold=0.5, quality=Span(-0.03, -0.031, -0.029))
    assert "softmax" not in answered(Evidence([exit_way(), worse], [CERTIFIED])).sentences["Speed and quality"][0]


def test_a_rule_that_breaks_certificates_is_never_recommended() -> None:
    ways = [exit_way(), exit_way(speed=3.0, rule="quantile 0.5"), exit_way(speed=2.0, tolerance=None)]
    assert answered(Evidence(ways, [CERTIFIED])).best[8].speed.at == 1.4
    assert answered(Evidence(ways[1:], [CERTIFIED])).worth is Worth.unknown


def test_without_clocks_nothing_is_said_of_speed() -> None:
    found = answered(Evidence((), [CERTIFIED], unknown=["How fast? Run it."]))
    assert found.worth is Worth.unknown and "not timed beside full depth" in found.headline
    text = " ".join(found.flat())
    assert "dev picked state at 0.97: 50.0 % of the decoder layers skipped (a share of layers, no speed-up)" in text
    assert "How fast? Run it." in text and "times as fast" not in text


def test_nothing_certified_and_noise_stand_at_the_top() -> None:
    nothing = Quality("exit", "state", Span(0.0, 0.0, 0.0), 0.0, 1.0, 0.05, 8.0, picked=True)
    found = answered(Evidence((), [nothing]))
    assert found.worth is Worth.no and "no threshold that skips a layer is certified" in found.headline
    busy = answered(Evidence([exit_way()], [CERTIFIED], noisy=True))
    assert "timed on a busy machine" in busy.headline and "busy machine" in busy.sentences["Speed and quality"][0]


def timed(way: str, role: str, ratio: float, kind: str = "measured") -> dict[str, Any]:
    values = {f"{name}_ratio{end}": ratio for name in ("tokens", "decode_tokens") for end in ("", "_low", "_high")}
    return {"kind": kind, "way": way, "role": role, "batch": 8, "noisy": False, **values}


def test_records_become_evidence() -> None:
    batching = {
        "measure": "state", "thresholds": {"state": {"threshold": 0.97, "certified_for": 0.05}},
        "rows": [
            timed("full", "full", 1.0), timed("static 4", "static", 1.5), timed("between", "mean depth", 1.4),
            timed("compact", "exit", 1.4), timed("sync", "exit", 1.1), timed("own", "exit", 9.9, "simulated"),
        ],
    }  # fmt: skip
    point = {
        "rouge_l_minus_full": -0.01,
        "rouge_l_minus_full_low": -0.02,
        "rouge_l_minus_full_high": 0.0,
        "layers_skipped": 0.5,
        "head": "full",
    }
    thresholds = {
        "rows": [
            {"kind": "static", "layer": 4, **point},
            {"kind": "certified", "measure": "state", "threshold": 0.95, "tolerance": 0.05, **point, "head": "thin"},
            {"kind": "certified", "measure": "state", "threshold": 0.96, "tolerance": 0.05, **point},
        ]
    }
    found = gathered({"batching": batching, "thresholds": thresholds}, None, {"breakdown": ["The head."]}, ())
    assert [(way.kind, way.name, way.rule, way.speed.at) for way in found.ways] == [
        ("static", "static depth 4", None, 1.5), ("exit", "state", "compact", 1.4), ("exit", "state", "sync", 1.1)
    ]  # fmt: skip
    quality = found.ways[1].quality
    assert quality == Span(-0.01, -0.02, 0.0)
    assert found.ways[1].quality_at == 0.96 and found.ways[0].quality is not None and found.gap == ["The head."]
    assert "of its certified threshold in fp32, 0.96" in " ".join(answered(found).flat())
    other = gathered({"batching": {"rows": [{"speed": 2}]}, "thresholds": {}, "shallow": {"rows": 3}}, None, {}, ())
    assert not other.ways and not other.qualities


def beside(gained: float, ratio: float, model: str = "m") -> dict[str, Any]:
    """A record of eval.shallow: an exit, a static depth, a shallow model and one of full depth, at batch 8."""

    def row(role: str, depth: float | None, **more: Any) -> dict[str, Any]:
        values = {f"{name}{end}": 1.5 for name in ("decode_tokens_ratio", "tokens_ratio") for end in ENDS}
        values |= {f"rouge_l_minus_full{end}": -0.01 for end in ENDS}
        return {"way": f"{role} {depth}", "role": role, "depth": depth, "batch": 8, "rule": "compact", **values, **more}

    exits = [row("exit", None, measure="state", threshold=t, tolerance=0.05, marked=t == 0.97) for t in (0.9, 0.97)]
    exits = [{**each, "way": f"state {each['threshold']}"} for each in exits]
    ends = {"rouge_l_gained": gained, "decode_tokens_ratio": ratio}
    width = {"rouge_l_gained": 0.001, "decode_tokens_ratio": 0.01}
    spans = {f"{n}{e}": v + width[n] * ENDS[e] for n, v in ends.items() for e in ENDS}
    pairs = [{"exit": "state 0.97", "batch": 8, "role": r, "depth": 4, **spans} for r in ("static", "trained")]
    rows = [row("full", 8), row("static", 4), row("trained", 4), row("trained", 8), *exits]
    return {"rows": rows, "pairs": pairs, "num_layers": 8, "dtype": "int8", "models": [{"model": model}]}


ENDS = {"": 0, "_low": -1, "_high": 1}


def test_fixed_depths_of_one_run_are_compared_pair_by_pair() -> None:
    def verdict(gained: float, ratio: float) -> Worth:
        return answered(gathered({"shallow": beside(gained, ratio)}, None, {}, ())).worth

    ways = shallow_ways(beside(0.0, 1.0))
    assert [(way.kind, way.name) for way in ways] == [
        ("static", "static depth 4"), ("shallow", "a model of 4 layers"), ("exit", "state")
    ]  # fmt: skip
    assert ways[2].threshold == 0.97 and ways[2].ahead == dict.fromkeys(
        ("static depth 4", "a model of 4 layers"), (0, 0)
    )
    assert verdict(0.0, 1.0) is Worth.open  # nothing can be told
    assert verdict(0.0, 0.8) is Worth.no and verdict(-0.01, 1.0) is Worth.no
    assert verdict(0.01, 0.8) is Worth.yes and verdict(0.0, 1.2) is Worth.yes


def test_what_was_timed_by_batch_size_is_joined_only_where_it_is_the_same_decoding() -> None:
    batching = {
        "measure": "state", "thresholds": {"state": {"threshold": 0.97, "certified_for": 0.05}}, "dtype": "int8",
        "identity": {"model": "m"},
        "rows": [timed("compact", "exit", 9.0), timed("own", "exit", 1.2), {**timed("own", "exit", 1.3), "batch": 64}],
    }  # fmt: skip
    found = gathered({"batching": batching, "shallow": beside(0.01, 0.8)}, None, {}, ())
    exits = [(way.batch, way.rule, way.speed.at) for way in found.ways if way.kind == "exit"]
    assert exits == [(8, "compact", 1.5), (8, "own", 1.2), (64, "own", 1.3)]
    own = next(way for way in found.ways if way.rule == "own" and way.batch == 8)
    assert own.ahead["static depth 4"] == (1, -1) and own.quality == Span(-0.01, -0.01, -0.01)
    other = gathered({"batching": batching, "shallow": beside(0.01, 0.8, model="another")}, None, {}, ())
    assert {way.kind for way in other.ways} == {"exit"} and "another model" in other.unknown[0]
