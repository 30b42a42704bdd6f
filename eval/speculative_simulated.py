"""What drafts would bring, from one pass over full depth's own answers.

Up to its first wrong word a draft reads the answer itself, so what its layer says there is what it would draft: words
and rounds are those of a decode. Behind a wrong word the draft is taken to go on as it would on the answer, which
changes nothing of what is said, only how many words are drafted, and so read, in vain: acceptance is a little too high.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from calm.config import Measure
from calm.drafting import Draft, accepted, said
from calm.errors import ConfigError
from calm.experiment_config import SpeculativeConfig

from .trials import Row

if TYPE_CHECKING:
    from calm.models.base import DecoderSpec
    from calm.models.speaking import SpeakingModel
    from calm.records import Example


@dataclass(frozen=True)
class Course:
    """Full depth's answer, and at each of its tokens what every layer says and how sure it is.

    Attributes:
        begin: the first token that a draft could say: of a decoder-only model the prompt says the one before.
    """

    tokens: tuple[int, ...]
    words: Int[np.ndarray, "layers tokens"]
    confidence: Float[np.ndarray, "layers tokens"]
    begin: int


@dataclass(frozen=True)
class Spent:
    """Of an answer: words that were said, passes of the upper layers, words drafted and of them accepted; positions
    that the draft's layers read, one pass each; and looks at the head while drafting.
    """

    said: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    read: int = 0
    looks: int = 0


def paths(
    model: "SpeakingModel", articles: "Sequence[Example]", measure: Measure, batch_size: int
) -> tuple[list[Course], int]:
    """Each article's answer at full depth, and how many tokens the pass over it says otherwise at the last layer."""
    import torch

    from calm.confidence import CONFIDENCE
    from calm.data.text import encode_source
    from calm.decode_batch import BatchDecoder
    from calm.models.causal import CausalModel
    from calm.policies import Full

    from .layer_answers import views

    found, otherwise = [], 0
    for trace, article in zip(BatchDecoder(model, batch_size=batch_size)(articles, Full()), articles, strict=True):
        source = encode_source(model.tokenizer, article.source, model.settings)
        with torch.inference_mode():
            seen = views(model, source, trace.tokens)
            words = np.stack([view.argmax.cpu().numpy() for view in seen])
            sure = np.stack([CONFIDENCE[measure](view).float().cpu().numpy() for view in seen])
        otherwise += int((words[-1] != np.array(trace.tokens)).sum())
        found.append(Course(trace.tokens, words, sure, int(isinstance(model, CausalModel))))
    return found, otherwise


def drafts_of(config: SpeculativeConfig, num_layers: int) -> list[Draft]:
    """Every layer, length and threshold; without those that say nothing (``state`` at layer 1).

    Raises:
        ConfigError: a layer is not below the model's last, or there is none at all.
    """
    found = []
    for layer in config.layers or range(1, num_layers):
        Draft(layer).check_depth(num_layers)
        for length in config.lengths:
            for threshold in config.thresholds:
                if threshold == 0.0:
                    found.append(Draft(layer, length))
                elif not (layer == 1 and config.measure is Measure.state):
                    found.append(Draft(layer, length, config.measure, threshold))
    if not found:
        raise ConfigError("layers, lengths and thresholds leave no draft; add a threshold of 0, or another layer")
    return found


def spent(path: Course, draft: Draft, limit: int, eos_token_id: int, by_head: bool) -> Spent:
    """What a draft takes for one answer.

    Args:
        limit: tokens of an answer at most.
        by_head: the measure reads the head, so that a word that is thrown away was looked at too.
    """
    words, sure = path.words[draft.layer - 1], path.confidence[draft.layer - 1]
    at, end, total = path.begin, len(path.tokens), np.zeros(6, dtype=np.int64)
    while at < end:
        drafted, thrown = list[int](), 0
        while len(drafted) < draft.length and at + len(drafted) + 1 < limit and at + len(drafted) < end:
            step = at + len(drafted)
            if draft.measure is not None and not sure[step] >= draft.threshold:
                thrown = 1
                break
            drafted.append(int(words[step]))
            if drafted[-1] == eos_token_id:
                break
        read = len(drafted) + (not (drafted and drafted[-1] == eos_token_id))
        right = path.tokens[at : at + read]
        spoken = len(said(drafted, right, eos_token_id))
        looks = len(drafted) + (thrown if by_head else 0)
        total += (spoken, 1, len(drafted), accepted(drafted, right), read, looks)
        at += spoken
    return Spent(*total.tolist())


def by_draft(
    config: SpeculativeConfig, model: "SpeakingModel", spec: "DecoderSpec", articles: "Sequence[Example]"
) -> tuple[list[tuple[Draft, list[Spent]]], int]:
    """What each draft takes for each article; and, as ``paths`` has it, how many tokens are said otherwise."""
    from calm.confidence import HEAD_MEASURES

    along, otherwise = paths(model, articles, config.measure, config.batch_size)
    limit, by_head = model.settings.max_target_tokens, config.measure in HEAD_MEASURES
    found = [
        (draft, [spent(path, draft, limit, spec.eos_token_id, by_head) for path in along])
        for draft in drafts_of(config, spec.num_layers)
    ]
    return found, otherwise


def simulated(
    config: SpeculativeConfig, model: "SpeakingModel", spec: "DecoderSpec", articles: "Sequence[Example]"
) -> list[Row]:
    """A row for each draft, means over tokens with intervals over articles; see ``draft_row``."""
    found, otherwise = by_draft(config, model, spec, articles)
    return [draft_row(config, spec, draft, each) | {"near_ties": otherwise} for draft, each in found]


def chosen(
    config: SpeculativeConfig, model: "SpeakingModel", spec: "DecoderSpec", articles: "Sequence[Example]"
) -> list[Row]:
    """The drafts of fewest passes of weights, each of another layer, on other articles than those that are reported.

    Returns:
        ``fewer_passes``: full depth's by the draft's, on these articles.
    """
    rows, full = list[Row](), spec.num_layers + head_layers(spec)
    for draft, each in by_draft(config, model, spec, articles)[0]:
        total = {name: sum(getattr(one, name) for one in each) for name in vars(Spent())}
        fewer = full * total["said"] / passes(spec, draft, total)["passes"]
        rows.append({**draft_values(draft), "fewer_passes": fewer})
    of_layer: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: -row["fewer_passes"]):
        of_layer.setdefault(row["layer"], row)
    return list(of_layer.values())[: config.drafts]


def draft_row(config: SpeculativeConfig, spec: "DecoderSpec", draft: Draft, each: Sequence[Spent]) -> Row:
    """What one draft brings.

    Returns:
        ``acceptance`` (of the words drafted; None where none was), ``words_a_round``; per word said ``layer_passes``,
        ``head_passes`` (each reads its weights once, for one position or for several) and ``layers_run`` (a position in
        a layer, so products; L at full depth); ``passes``: of both; ``fewer_passes``: full depth's by these, a bound on
        the gain where time goes by weights, as at batch 1.
    """
    from calm.metrics import with_ratio

    columns = {name: np.array([getattr(one, name) for one in each]) for name in vars(Spent())}
    words, layers, again = columns["said"], spec.num_layers, (config.seed, config.bootstrap)
    row: Row = {**draft_values(draft), "articles": len(each)}
    row |= {name: int(values.sum()) for name, values in columns.items()}
    row |= dict.fromkeys(("acceptance", "acceptance_low", "acceptance_high"))
    if columns["drafted"].sum():
        row |= with_ratio("acceptance", columns["accepted"], columns["drafted"], *again)
    row |= with_ratio("words_a_round", words, columns["rounds"], *again)
    for name, values in {**passes(spec, draft, columns), "layers_run": layers * columns["read"]}.items():
        row |= with_ratio(name, values, words, *again)
    full, ends = layers + head_layers(spec), {"": "", "_low": "_high", "_high": "_low"}
    return row | {f"fewer_passes{end}": full / row[f"passes{other}"] for end, other in ends.items()}


def passes(spec: "DecoderSpec", draft: Draft, taken: Mapping[str, Any]) -> dict[str, Any]:
    """Of the layers' weights and of the head's; and of both, a head counted as so many layers as its weights weigh.

    Args:
        taken: what Spent counts, as numbers or as arrays.
    """
    layer = draft.layer * taken["read"] + (spec.num_layers - draft.layer) * taken["rounds"]
    head = taken["looks"] + taken["rounds"]
    return {"layer_passes": layer, "head_passes": head, "passes": layer + head_layers(spec) * head}


def head_layers(spec: "DecoderSpec") -> float:
    """How many layers the head weighs."""
    from calm.cost import head_work, layer_work

    return head_work(spec).weight_bytes / layer_work(spec).weight_bytes


def draft_values(draft: Draft) -> dict[str, Any]:
    """Columns of a draft's rows."""
    measure = None if draft.measure is None else draft.measure.value
    by = "" if measure is None else f", {measure} {draft.threshold:g}"
    return {
        "way": f"draft {draft.layer} x {draft.length}{by}",
        "layer": draft.layer,
        "length": draft.length,
        "measure": measure,
        "threshold": draft.threshold,
    }


def draft_from(row: Row) -> Draft:
    """The draft of a row with these columns."""
    measure = None if row["measure"] is None else Measure(row["measure"])
    return Draft(int(row["layer"]), int(row["length"]), measure, float(row["threshold"]))
