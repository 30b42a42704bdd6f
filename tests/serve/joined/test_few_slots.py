"""Fewer slots than requests, and prompts longer than the model reads."""

from typing import Any

import pytest

from serve.engine import Engine

from .conftest import NARROW
from .serving import LAYERS, Joined, alone, body_of, prompts, questions, same, together


def test_who_finds_no_slot_waits_and_is_answered_as_if_alone(narrow: Joined, here: Engine) -> None:
    """Fault 33: twenty requests, two slots; all of them are there before the first gets a token."""
    asked = questions(here, 20, seed=11)
    found = together(narrow, [each.body for each in asked], NARROW.max_batch)
    for answered, each in zip(found, asked, strict=True):
        same(answered, each.answer)
    assert narrow.site.load() == (0, 0)


def test_prompts_of_one_call_wait_for_slots_too(narrow: Joined, here: Engine) -> None:
    """Fault 33: choice i is the answer to prompt i, though two of nine run at a time."""
    asked = prompts(9, seed=12)
    choices = narrow.site.ask(asked).body["choices"]
    assert [choice["index"] for choice in choices] == list(range(9))
    for choice, prompt in zip(choices, asked, strict=True):
        answer = alone(here, prompt)
        assert (choice["text"], choice["early_exit"]["exit_layers"]) == (answer.text, list(answer.emission_layers))


@pytest.mark.parametrize("ids", [False, True], ids=["text", "ids"])
def test_a_prompt_of_one_token_too_many_is_refused_with_both_numbers(ids: bool, narrow: Joined, here: Engine) -> None:
    """Fault 33, and 27: nothing is cut unless the request says so, and then only the end is."""
    most = here.model.max_source
    words = [3 + number % 40 for number in range(most)]

    def prompt(count: int) -> Any:
        return [*words[: count - 1], 1] if ids else " ".join(f"w{word}" for word in words[: count - 1])

    fits = narrow.site.ask(prompt(most))
    assert fits.status == 200 and fits.body["usage"]["prompt_tokens"] == most
    long = narrow.site.ask(prompt(most + 1))
    assert long.status == 400 and long.error["param"] == "prompt"
    assert str(most) in long.error["message"] and str(most + 1) in long.error["message"]
    cut = narrow.site.send(body_of(prompt(most + 1), truncate=True, early_exit=LAYERS))
    assert cut.status == 200 and cut.body["usage"]["prompt_tokens"] == most
    assert cut.body["choices"] == fits.body["choices"]
    same(cut, here.generate([prompt(most)])[0])
