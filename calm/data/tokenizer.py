"""A byte-pair tokenizer from scratch in T5's layout: pad 0, eos 1, unk 2.

Decoding the ids of a text gives the text back, but for characters outside the alphabet, which become unk and
are counted (``calm.data.audit``). The alphabet holds every character seen at least 50 times, printable ASCII
where the vocabulary has room, and then the commonest others. Composed and decomposed forms are one text (NFC).
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import DataError

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
BLANK = "\u2581"  # Metaspace's mark of a word's beginning
SURE = 50  # a character seen this often in training text survives the round trip
_MIN_MERGES = 16


def _normalizer(lowercase: bool) -> normalizers.Normalizer:
    """NFC and single blanks, as ``clean_text``; a typed U+2581 would turn into a blank, so it becomes unk."""
    steps: list[normalizers.Normalizer] = [normalizers.NFC()]
    if lowercase:
        steps += [normalizers.Lowercase(), normalizers.NFC()]
    steps += [
        normalizers.Replace(BLANK, "\ufffd"),
        normalizers.Replace(Regex(r"[\s\p{Cc}]+"), " "),
        normalizers.Strip(),
    ]
    return normalizers.Sequence(steps)


def _alphabet(counts: Counter[str], vocab_size: int, lowercase: bool) -> list[str]:
    """The characters that get a token of their own, in a fixed order.

    Raises:
        DataError: the characters seen at least 50 times do not fit into the vocabulary.
    """
    counts = Counter({char: n for char, n in counts.items() if char not in (" ", "\ufffd")})
    alphabet = {char for char, n in counts.items() if n >= SURE} | {BLANK}
    needed = len(alphabet) + 3 + _MIN_MERGES
    if needed > vocab_size:
        raise DataError(
            f"a vocabulary of {vocab_size} is too small: this text uses {len(alphabet)} characters "
            f"at least {SURE} times; set model.shape.vocab_size to {needed} or more"
        )
    ascii_letters = {c for c in string.printable.strip() if not (lowercase and c.isupper())}
    if len(alphabet | ascii_letters) + 3 <= vocab_size // 3:
        alphabet |= ascii_letters
    for char, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(alphabet) >= vocab_size // 8:
            break
        alphabet.add(char)
    return sorted(alphabet)


def train_tokenizer(texts: Iterable[str], vocab_size: int, lowercase: bool = False) -> PreTrainedTokenizerBase:
    """Byte-pair vocabulary of at most ``vocab_size`` tokens over ``texts``; the same texts give the same ids.

    ``lowercase`` makes an uncased model: capitals are read as small letters and never written.
    The result saves as tokenizer.json + tokenizer_config.json and is opened by AutoTokenizer.

    Raises:
        DataError: no text at all, or a vocabulary too small for the alphabet.
    """
    normalizer = _normalizer(lowercase)
    normalized = [text for text in map(normalizer.normalize_str, texts) if text]
    if not normalized:
        raise DataError("cannot train a tokenizer: the training texts are empty")
    counts: Counter[str] = Counter()
    for text in normalized:
        counts.update(text)
    alphabet = _alphabet(counts, vocab_size, lowercase)
    backend = Tokenizer(models.BPE(unk_token=UNK))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme="always"),
            pre_tokenizers.Punctuation(),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    backend.decoder = decoders.Metaspace(replacement=BLANK, prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, UNK],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        min_frequency=2,
        show_progress=False,
    )
    backend.train_from_iterator(normalized, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )
