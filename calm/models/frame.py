"""What a decoder-only model's own tokenizer puts around a prompt."""

from transformers import PreTrainedTokenizerBase

from ..errors import CheckpointError

MARK = "THE-SOURCE-STANDS-HERE"


def frame_of(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids before and after every source: the chat template's for one user turn, where the tokenizer has one.

    Otherwise its BOS, if it puts one before texts, and a line break, after which the answer begins.

    Raises:
        CheckpointError: the template cannot be applied, or does not show the user's text once.
    """
    if tokenizer.chat_template is None:
        start: list[int] = tokenizer("")["input_ids"]
        end: list[int] = tokenizer("\n", add_special_tokens=False)["input_ids"]
        return start, end
    turn = [{"role": "user", "content": MARK}]
    try:
        text: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of its author's
        raise CheckpointError(f"the tokenizer's chat template fails: {' '.join(str(error).split())}") from None
    if text.count(MARK) != 1:
        raise CheckpointError(f"the tokenizer's chat template shows a user's text {text.count(MARK)} times")
    head, tail = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(MARK))
    return head, tail
