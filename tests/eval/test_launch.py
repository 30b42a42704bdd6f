"""Several processes of a launch: no article lost, none repeated, none out of order. And Ctrl-C."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import calm
from calm.config import DataConfig, SplitConfig
from calm.data.splits import split_of
from calm.decode_spec import DecodeSpec
from calm.errors import ConfigError
from calm.models.settings import EarlyExitSettings
from calm.models.t5 import EarlyExitT5
from eval.common import open_decoder

from ..scripted import scripted
from .folders import tell_corpus

ROOT = Path(__file__).parents[2]
# what the model says, and the reference; ROUGE-L 2/3, 2/3, 2/3, 0, 1
PAIRS = [
    ("the library parses dates", "parses dates"),
    ("fast hash map", "a fast hash map for strings"),
    ("read The file", "write the file"),
    ("", "small http server"),
    ("graph drawing tool", "graph drawing\ntool"),
]
SPLIT = SplitConfig(dev=0.1, calibration=0.2, test=0.6)
QUIET = ["tracking.mode=disabled", "bootstrap=20", "batch_size=2", "measures=[softmax]", "device=cpu"]


def speaking_folder(parent: Path) -> Path:
    """A model that says the left side of ``PAIRS``, each word a token of its own; the corpus holds the right side."""
    starts: dict[int, int] = {}
    following: dict[int, int] = {}
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    sources = [f"article{i}" for i in range(len(PAIRS))]
    for word in [*sources, *(word for said, _ in PAIRS for word in said.split())]:
        words.setdefault(word, len(words))
    for source, (said, _) in zip(sources, PAIRS, strict=True):
        chain = [words[word] for word in said.split()] + [1]
        starts[words[source]] = chain[0]
        following.update(zip(chain, chain[1:], strict=False))
    hf = scripted(len(words), nxt=following, start=starts, late={}, layers=2)
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    model = EarlyExitT5(hf, tokenizer, EarlyExitSettings([1], 16, 8)).eval()
    path = parent / "pairs.jsonl"
    path.write_text("".join(_lines(sources)), encoding="utf-8")
    data = DataConfig(
        name="jsonl", path=str(path), family_column="family", id_column="id", max_source_tokens=16,
        max_target_tokens=8, split=SPLIT,
    )  # fmt: skip
    tell_corpus(model, data)
    return calm.save(model, parent / "model")


def _lines(sources: list[str]) -> list[str]:
    """Families that fall into test for the five articles, and one row each for dev and calibration."""
    wanted = [("test", source, pair[1]) for source, pair in zip(sources, PAIRS, strict=True)]
    wanted += [("dev", "article0 article1", "x"), ("calibration", "article1 article0", "y")]
    lines = []
    for number, (split, source, target) in enumerate(wanted):
        family = next(name for k in range(1000) if split_of(name := f"{number}-{k}", SPLIT) == split)
        lines.append(json.dumps({"id": f"r{number}", "family": family, "source": source, "target": target}) + "\n")
    return lines


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(module: str, argv: list[str], cwd: Path, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", module, *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def group_ends(group: int, within_s: float = 30.0) -> bool:
    """Whether the last process of a group goes away; multiprocessing's own tracker outlives its parent by a moment."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def check_five_records(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    ids = json.loads((run / "rows.json").read_text())["test"]["ids"]
    assert sorted(ids) == ["r0", "r1", "r2", "r3", "r4"]
    records = pq.read_table(run / "records.parquet").to_pandas()
    full = records[records["row"] == "full"].set_index("id")
    assert full.index.tolist() == ids
    for number, (said, _) in enumerate(PAIRS):
        assert full.loc[f"r{number}", "text"] == said
    assert full.loc["r3", "tokens"].tolist() == [1]
    row = next(row for row in summary["table1"] if row["row"] == "full")
    assert round(row["rouge_l"], 4) == 0.6
    return summary


def test_two_ranks_score_five_ragged_articles_once_each_and_in_order(tmp_path: Path) -> None:
    folder = speaking_folder(tmp_path)
    argv = [f"checkpoint={folder}", f"hydra.run.dir={tmp_path / 'run'}", *QUIET]
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start("eval.table1", argv, tmp_path, RANK=str(r), LOCAL_RANK=str(r), **launched) for r in (0, 1)]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    summary = check_five_records(tmp_path / "run")
    assert json.loads(outputs[0][0].splitlines()[-1]) == summary
    assert outputs[1][0] == ""  # only the first process speaks
    assert "Traceback" not in outputs[0][1] + outputs[1][1]


@pytest.mark.slow
def test_ctrl_c_ends_at_once_with_one_word_and_leaves_no_process(certified: Path, tmp_path: Path) -> None:
    argv = [f"checkpoint={certified / 'model'}", f"hydra.run.dir={tmp_path / 'run'}", "processes=2", "tolerance=0.45"]
    run = start("eval.table1", [*argv, "tracking.mode=disabled", "batch_size=4"], tmp_path)
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("corpus:"):
            break
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert group_ends(run.pid)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_launch_contradicted_by_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    spec = DecodeSpec("no folder is opened")
    with pytest.raises(ConfigError, match="processes=3, but the launcher started 2; drop processes="):
        with open_decoder(spec, 3):
            pass


@pytest.mark.slow
def test_accelerate_launch_scores_every_article_once(tmp_path: Path) -> None:
    folder = speaking_folder(tmp_path)
    argv = ["launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    argv += ["--main_process_port", str(free_port()), "--dynamo_backend", "no", "-m", "eval.table1"]
    argv += [f"checkpoint={folder}", f"hydra.run.dir={tmp_path / 'run'}", *QUIET]
    done = start("accelerate.commands.accelerate_cli", argv, tmp_path)
    output, errors = done.communicate(timeout=280)
    assert done.returncode == 0, errors
    assert json.loads(output.splitlines()[-1]) == check_five_records(tmp_path / "run")
