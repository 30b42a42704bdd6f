"""The engine runs where there is torch and nothing of Hugging Face's."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch
from serve.engine import Engine
from serve.model import ServedModel
from calm.config import BatchRule, Measure
from calm.models.base import BiasKind, DecoderSpec
from calm.policies import Confident
from calm.thresholds import ThresholdSchedule

torch.manual_seed(0)
tensors = {"embed": torch.randn(11, 8), "head": torch.randn(11, 8), "final_norm": torch.ones(8)}
tensors["bias"] = torch.randn(32, 2)
for layer in (1, 2, 3):
    for norm in ("self_norm", "cross_norm", "ffn_norm"):
        tensors[f"{layer}.{norm}"] = torch.ones(8)
    for name in ("self", "cross"):
        for part in "qkvo":
            tensors[f"{layer}.{name}_{part}"] = torch.randn(8, 8)
    tensors[f"{layer}.ffn_up"], tensors[f"{layer}.ffn_down"] = torch.randn(16, 8), torch.randn(8, 16)
spec = DecoderSpec(
    num_layers=3, num_heads=2, num_kv_heads=2, d_model=8, d_kv=4, d_ff=16, vocab_size=11, norm_eps=1e-6,
    activation="relu", gated=False, bias_kind=BiasKind.relative_buckets, bias_buckets=32, bias_max_distance=128,
    cross_attention=True, attention_scale=1.0, head_scale=1.0, start_token_id=0, eos_token_id=1,
    pad_token_id=0, tensors=tensors,
)
model = ServedModel(
    spec=spec, encode=lambda ids, mask: tensors["embed"][ids], classifier=None,
    to_ids=lambda text, cut=True: [int(word) for word in text.split()], to_text=lambda ids: " ".join(map(str, ids)),
    exit_layers=(1, 2), max_source=8, max_target=6,
)
policy = Confident(Measure.softmax, ThresholdSchedule(0.5, length=6))
for rule in BatchRule:
    answers = Engine(model, rule=rule, max_batch=2).generate(["3 4 1", [5, 6, 1], "7 1"], policy=policy)
    assert all(answer.status.value == "finished" for answer in answers), answers
print(" ".join(sorted({name.split(".")[0] for name in sys.modules})))
"""
FOREIGN = {"transformers", "tokenizers", "accelerate", "datasets", "evaluate", "hydra", "omegaconf", "scipy", "wandb"}


def test_an_engine_needs_torch_and_nothing_of_hugging_face() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split("\n")[-2].split())
    assert {"torch", "serve", "calm"} <= loaded
    assert not loaded & FOREIGN
