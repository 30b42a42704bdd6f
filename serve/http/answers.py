"""What POST /v1/completions answers: OpenAI's shape, and per choice how early its tokens left."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, Field

from ..messages import Ended, Spoke
from ..requests import Reason
from .plan import Job

Json = dict[str, Any]
FINISH_REASONS = {Reason.eos: "stop", Reason.stop: "stop", Reason.length: "length"}


class EarlyExitFacts(BaseModel):
    """Of one choice."""

    certified: bool = Field(description="The model's certificate speaks of this answer.")
    tokens: int = Field(description="Of the answer, the end-of-sequence token included.")
    mean_exit_layer: float = Field(description="Layers that gave the tokens, on average; 0 without tokens.")
    layers_skipped: float = Field(description="1 - mean_exit_layer / decoder layers: a share of layers, no speed-up.")
    drafted: int | None = Field(None, description="Words that the first layers drafted, where they were asked to.")
    accepted: int | None = Field(None, description="Of those, words that the whole stack said too.")
    exit_layers: list[int] | None = Field(
        None,
        description="Layer of each token, where asked for; in a stream of those since the last chunk.",
    )


class Choice(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"]
    early_exit: EarlyExitFacts


class Usage(BaseModel):
    """Each prompt once; the tokens of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """Choices in order of their index, which is i * n + j for choice j of prompt i."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class TokenLayers(BaseModel):
    """Layers of a chunk's tokens."""

    exit_layers: list[int]


class ChunkChoice(BaseModel):
    """What became final of one answer since its last chunk."""

    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"] | None = Field(description="Null until the answer's last chunk.")
    early_exit: EarlyExitFacts | TokenLayers | None = Field(
        None, description="Of the whole answer in its last chunk; before, only layers, where they are asked for."
    )


class Chunk(BaseModel):
    """The content of an event."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = Field(None, description="In the last chunk, which has no choices, where it is asked for.")


@dataclass
class Told:
    """What a call has said so far, and its sums.

    Args:
        head: id, object, created and model.
        num_layers: of the decoder.
        layers: tell the exit layer of every token.
    """

    head: Json
    num_layers: int
    layers: bool
    texts: dict[int, list[str]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, tuple[Job, Ended]] = field(default_factory=dict)

    def hear(self, job: Job, said: Spoke | Ended) -> list[Json]:
        """Keep it; its choices as a stream tells them: one for each index that the job answers."""
        first = job.choices[0]
        self.texts.setdefault(first, []).append(said.text)
        told = self.counts.get(first, 0)
        if isinstance(said, Spoke):
            self.counts[first] = told + len(said.tokens)
            early = {"exit_layers": list(said.layers)} if self.layers else None
            return [_choice(index, said.text, None, early) for index in job.choices]
        self.ends[first] = (job, said)
        early = facts(said, self.num_layers, said.emission_layers[told:] if self.layers else None)
        return [_choice(index, said.text, FINISH_REASONS[said.reason], early) for index in job.choices]

    def chunk(self, choices: list[Json], usage: Json | None = None, show_usage: bool = False) -> Json:
        """One object of a stream."""
        return {**self.head, "choices": choices, **({"usage": usage} if show_usage else {})}

    def whole(self) -> Json:
        """The answer in one piece."""
        choices = []
        for first, (job, ended) in sorted(self.ends.items()):
            text = "".join(self.texts[first])
            early = facts(ended, self.num_layers, ended.emission_layers if self.layers else None)
            choices += [_choice(index, text, FINISH_REASONS[ended.reason], early) for index in job.choices]
        return {**self.head, "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        prompts = {job.number: ended.prompt_tokens for job, ended in self.ends.values()}
        completion = sum(ended.tokens * len(job.choices) for job, ended in self.ends.values())
        prompt = sum(prompts.values())
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def summary(self) -> Json:
        """Facts for the log."""
        layers = [layer for _, ended in self.ends.values() for layer in ended.emission_layers]
        mean = sum(layers) / len(layers) if layers else 0.0
        return {
            **self.usage(),
            "certified": sum(ended.certified for _, ended in self.ends.values()),
            "answers": len(self.ends),
            "mean_exit_layer": round(mean, 4),
            "layers_skipped": round(1.0 - mean / self.num_layers, 4) if layers else 0.0,
            "involuntary": sum(ended.involuntary for _, ended in self.ends.values()),
        }


def facts(ended: Ended, num_layers: int, layers: Sequence[int] | None) -> Json:
    """``EarlyExitFacts`` of an answer; ``layers``: those to tell, None for none."""
    emitted = ended.emission_layers
    mean = sum(emitted) / len(emitted) if emitted else 0.0
    told: Json = {
        "certified": ended.certified,
        "tokens": ended.tokens,
        "mean_exit_layer": round(mean, 4),
        "layers_skipped": round(1.0 - mean / num_layers, 4) if emitted else 0.0,
    }
    if ended.drafted is not None:
        told |= {"drafted": ended.drafted, "accepted": ended.accepted}
    return told if layers is None else {**told, "exit_layers": list(layers)}


def _choice(index: int, text: str, finish_reason: str | None, early: Json | None) -> Json:
    choice: Json = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return choice if early is None else {**choice, "early_exit": early}
