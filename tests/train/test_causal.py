"""A decoder-only model learns by the same loss; that its padding is its EOS hides no end from it."""

from pathlib import Path

import torch

import calm
from calm.config import ClassifierConfig, FinetuneConfig
from calm.losses import IGNORED
from calm.models.folder import save
from calm.models.gguf_file import read_gguf
from calm.models.settings import EarlyExitSettings
from calm.progress import Progress
from calm.records import Example
from tests.calm.test_gguf import llama, write
from tests.causal import early_llama, random_llama
from train.batches import Feed
from train.exit_classifier import read
from train.rows import EncodedRows
from train.step import SpeakingLoss

ROWS = [Example(f"r{i}", f"f{i}", f"say {word}", word) for i, word in enumerate(["the", "a the", "2024", "xy"])]


def test_an_imported_model_learns_when_to_end(tmp_path: Path) -> None:
    settings = EarlyExitSettings([], max_source_tokens=48, max_target_tokens=12)
    model = calm.load(save(read_gguf(write(tmp_path / "tiny.gguf", llama()), settings), tmp_path / "model"))
    assert model.pad_token_id == model.eos_token_id == 2
    feed, config = Feed(model, ROWS, 4, seed=0), FinetuneConfig()
    targets = feed.targets(range(4))
    batch = feed.batch(range(4), targets)
    kept = batch.labels != IGNORED
    assert [row[mask][-1].item() for row, mask in zip(batch.labels, kept, strict=True)] == [2] * 4
    assert kept.sum().item() == sum(len(target) for target in targets)
    loss = SpeakingLoss(model.train(), config, seed=0)
    optimizer = torch.optim.AdamW(model.hf.parameters(), lr=3e-3)
    values = []
    for step in range(20):
        total, told = loss(batch, step)
        values.append(float(total.detach()) / int(kept.sum()))
        assert told.shape == (5,)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert values[-1] < values[0] / 2
    model.eval()
    ends = torch.tensor([len(target) - 1 for target in targets])
    with torch.no_grad():
        last = model.answer_hiddens(batch.source_ids, batch.source_mask, batch.decoder_ids)[-1]
        said = model.logits(last[torch.arange(4), ends]).argmax(dim=-1)
    assert said.tolist() == [2] * 4


def test_the_exit_classifier_reads_every_target_token() -> None:
    model = early_llama(random_llama())
    rows = EncodedRows(model, [Example("a", "a", "w5 w6", "w7 w8"), Example("b", "b", "w9", "w10")])
    features = read(model, rows[:], 2, torch.device("cpu"), Progress(2, "", shown=False), ClassifierConfig())
    assert features.hidden.shape == (5, 3, 32) and features.agrees.shape == (5, 3)
