"""Byte-level BPE: trains a tokenizer, and loads any `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus_index import END, require_vocab

# End-of-document tokens of the well-known families, in order of preference.
_END_TOKENS = (END, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")


def train_tokenizer(texts: Iterable[str], vocab: int, argument: str = "--vocab") -> Tokenizer:
    """A lossless tokenizer of at most `vocab` tokens; the same texts give the same one. `<|endoftext|>` is token 0.

    It has fewer than `vocab` tokens when the texts run out of pairs to merge.
    """
    require_vocab(vocab, argument)
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
    """The tokenizer in the file `path`. Raises PentadError if it is unreadable or has no end-of-document token."""
    if not path.is_file():
        raise PentadError(f"--tokenizer is '{path}', which is not a file: expected a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        fault = f"which cannot be read ({error})"
        raise PentadError(f"--tokenizer is '{path}', {fault}: expected a tokenizer.json") from None
    if _find_end(tokenizer) is None:
        expected = ", ".join(_END_TOKENS)
        raise PentadError(f"--tokenizer is '{path}', which has no end-of-document token: expected one of {expected}")
    return _for_plain_text(tokenizer)


def end_token(tokenizer: Tokenizer) -> int:
    """Id of the token that ends every document."""
    end = _find_end(tokenizer)
    assert end is not None
    return end


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id; ids may have gaps."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without begin and end tokens."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids`, with end-of-document tokens spelled out."""
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _find_end(tokenizer: Tokenizer) -> int | None:
    return next((token for token in map(tokenizer.token_to_id, _END_TOKENS) if token is not None), None)


def _for_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """Encodes a special token that a document spells out as plain text, else a page about tokenizers would be cut."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
