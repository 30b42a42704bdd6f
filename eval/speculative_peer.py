"""transformers' own early-exit drafts (``generate(assistant_early_exit=k)``), beside its own greedy search.

It cuts the model by ``num_hidden_layers`` while it drafts, which decoder-only models of the Llama kind heed; T5's
decoder does not. Its length and its threshold are its defaults; one text at a time, as it has it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from calm.experiment_config import SpeculativeConfig

from .trials import Row

if TYPE_CHECKING:
    from calm.models.causal import CausalModel
    from calm.records import Example

NO_T5 = "transformers' early-exit drafts take decoder-only models, not T5"
GREEDY = "transformers"


class Generated:
    """``generate`` over the first ``n`` prompts, which are tokenised before; remembers the last answers to all."""

    def __init__(self, model: "CausalModel", articles: "Sequence[Example]", layer: int | None) -> None:
        import torch

        from calm.data.text import encode_source

        self.model, self.asked = model, {} if layer is None else {"assistant_early_exit": layer}
        ids = [encode_source(model.tokenizer, each.source, model.settings) for each in articles]
        self.prompts = [torch.tensor([each], device=model.device) for each in ids]
        self.answers: list[list[int]] = []

    def __call__(self, n: int) -> None:
        import torch

        hf: Any = self.model.hf
        self.answers = []
        for ids in self.prompts[:n]:
            said = hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.model.settings.max_target_tokens,
                do_sample=False, num_beams=1, **self.asked,
            )  # fmt: skip
            self.answers.append(said[0, ids.shape[1] :].tolist())


def peer_rows(
    config: SpeculativeConfig, model: "CausalModel", layers: Sequence[int], articles: "Sequence[Example]"
) -> list[Row]:
    """Its greedy search and its drafts by these layers, in turns over the first articles, in fp32.

    Returns:
        ``tokens_per_s`` of every round; ``tokens_ratio``: its median by greedy's, with its interval; ``changed``:
        answers that are not greedy's.

    Raises:
        CalmError: the machine stays busy through all attempts and that is not allowed.
    """
    from calm.metrics import with_median

    from .clocks import Clocked, Contender, paired, until_quiet
    from .serving_cells import load_of

    first = articles[: config.timed]
    ways = {GREEDY: Generated(model, first, None)}
    ways |= {f"{GREEDY} draft {layer}": Generated(model, first, layer) for layer in layers}
    contenders = [Contender(name, way) for name, way in ways.items()]
    found = until_quiet(
        config,
        lambda: paired(
            contenders, 1, len(first), config.repeats, config.warmups, allow_noisy=None,
            load=load_of(config.allow_noisy),
        ),
    )  # fmt: skip
    greedy, base = ways[GREEDY].answers, found.seconds(GREEDY, Clocked.call)
    rows = []
    for (name, way), layer in zip(ways.items(), [None, *layers], strict=True):
        seconds, tokens = found.seconds(name, Clocked.call), sum(map(len, way.answers))
        row: Row = {"way": name, "layer": layer, "noisy": found.noise.noisy, "foreign_cpu": found.noise.foreign}
        row |= {"tokens_per_s": [tokens / each for each in seconds], "tokens": tokens}
        row |= with_median("tokens_ratio", [b / s for b, s in zip(base, seconds, strict=True)])
        row["changed"] = sum(mine != right for mine, right in zip(way.answers, greedy, strict=True))
        rows.append(row)
    return rows
