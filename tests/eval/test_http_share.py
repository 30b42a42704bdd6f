"""What the server costs: the same requests, directly and over HTTP, and the same tokens from both."""

import json
from pathlib import Path

import pytest

from calm.errors import CalmError
from calm.soak_config import HttpShareConfig
from eval import http_share
from eval.http_share import AGAIN, DIRECT, STREAMED, WHOLE, Timed
from eval.load_stream import Reply


def test_a_share_is_the_median_of_the_rounds() -> None:
    timed = Timed(100, {DIRECT: [1.0, 2.0, 3.0], WHOLE: [2.0, 2.0, 4.0]})
    assert timed.share(WHOLE) == 0.75


def reply(status: int, body: str) -> Reply:
    made = Reply()
    made.head(status, {})
    made.data(0.0, body.encode())
    return made


def test_tokens_are_the_server_s_and_a_refusal_ends_it() -> None:
    assert http_share._tokens(reply(200, json.dumps({"usage": {"completion_tokens": 7}}))) == 7
    with pytest.raises(CalmError, match="503: come later"):
        http_share._tokens(reply(503, json.dumps({"error": {"message": "come later"}})))


def test_texts_are_the_same_once_more_and_others_for_another_turn(tmp_path: Path) -> None:
    (model,) = http_share._models(HttpShareConfig(shapes=["tiny"], source_tokens=8), tmp_path)
    assert model.texts(3, 0) == model.texts(3, 0) != model.texts(3, 1)
    assert [len(text.split()) for text in model.texts(2, 5)] == [7, 7]


def test_directly_and_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = HttpShareConfig(
        shapes=["tiny"], batches=[2], ways=["static=2"], source_tokens=8, tokens=4, waves=2, turn_s=0.0, repeats=2,
        allow_noisy=True,
    )  # fmt: skip
    assert http_share.run(config, tmp_path) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    (case,) = told["cases"]
    assert case["tokens"] == 2 * 2 * 4 and case["direct_tokens_per_s"] > 0
    assert set(case["share"]) == {WHOLE, STREAMED, AGAIN} and all(share > 0 for share in case["share"].values())
    assert {name: len(seconds) for name, seconds in case["seconds"].items()} == dict.fromkeys(
        (DIRECT, WHOLE, STREAMED, AGAIN), 2
    )


def test_a_turn_lasts(tmp_path: Path) -> None:
    """A fast model is asked for more, so that the beginning and the end of a turn count for little."""
    config = HttpShareConfig(
        shapes=["tiny"], batches=[2], ways=["full"], source_tokens=8, tokens=4, waves=1, turn_s=0.2, repeats=1,
        warmups=0, allow_noisy=True,
    )  # fmt: skip
    assert http_share.run(config, tmp_path) == 0
    (case,) = json.loads((tmp_path / "summary.json").read_text())["cases"]
    assert case["tokens"] > 5 * 2 * 4 and min(case["seconds"][DIRECT]) > 0.05


def test_a_noisy_machine_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.clocks.LIMIT", -1.0)
    config = HttpShareConfig(
        shapes=["tiny"], batches=[1], ways=["full"], source_tokens=4, tokens=2, waves=1, repeats=1, warmups=0
    )
    assert http_share.run(config, tmp_path) == http_share.REFUSED
    (case,) = json.loads((tmp_path / "summary.json").read_text())["cases"]
    assert "share" not in case and "too busy" in case["refused"] and case["seconds"]
