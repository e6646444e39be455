"""Byte-level BPE: training one, and loading any `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pentad.schedules.ir.errors import PentadError

END = "<|endoftext|>"
# End-of-document tokens of the well-known families, in order of preference.
_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
_SMALLEST = 257  # each byte, and the end token
_LARGEST = 2**24  # room is made ahead for so many


def train_tokenizer(texts: Iterable[str], vocab: int, argument: str = "--vocab") -> Tokenizer:
    """A lossless tokenizer of at most `vocab` tokens, the same for the same texts; `<|endoftext|>` is token 0.

    It has fewer than `vocab` tokens if the texts run out of pairs to merge.
    """
    if vocab < _SMALLEST:
        raise PentadError(f"{argument} is {vocab}: expected at least {_SMALLEST}: {END} and each byte")
    if vocab > _LARGEST:
        raise PentadError(f"{argument} is {vocab}: expected at most {_LARGEST}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _for_plain_text(tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in the file `path`. Raises PentadError if there is none or it has no end-of-document token."""
    if not path.is_file():
        raise PentadError(f"--tokenizer is '{path}', which is no file; expected a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise PentadError(
            f"--tokenizer is '{path}', which is unreadable ({error}); expected a tokenizer.json"
        ) from None
    if _end(tokenizer) is None:
        raise PentadError(f"--tokenizer '{path}' has no end-of-document token: expected one of {', '.join(_ENDS)}")
    return _for_plain_text(tokenizer)


def end_token(tokenizer: Tokenizer) -> int:
    """Id of the token that ends every document."""
    end = _end(tokenizer)
    assert end is not None
    return end


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id; ids may have gaps."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without any beginning or end token."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids`; end-of-document tokens are spelled out."""
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _end(tokenizer: Tokenizer) -> int | None:
    return next((token for token in map(tokenizer.token_to_id, _ENDS) if token is not None), None)


def _for_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """Encodes a document that spells a special token as text, else a page about tokenizers would end in its middle."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
