"""Byte-level BPE: trains a tokenizer, and loads any `tokenizer.json`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus_index import END, TOKENIZER_FILE, require_vocab

# End-of-document tokens of the well-known families, in order of preference.
_END_TOKENS = (END, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")


def train_tokenizer(texts: Iterable[str], vocab: int, argument: str = "--vocab") -> Tokenizer:
    """A lossless tokenizer of at most `vocab` tokens; the same texts give the same one. `<|endoftext|>` is token 0.

    It has fewer than `vocab` tokens if the texts run out of pairs to merge.
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
    """The tokenizer in `path`, a tokenizer.json or a folder with one. Raises PentadError if it is unreadable."""
    file = path / TOKENIZER_FILE if os.path.isdir(path) else path
    if not os.path.isfile(file):
        fault = f"which has no {TOKENIZER_FILE}" if os.path.isdir(path) else "which does not exist"
        expected = f"expected a {TOKENIZER_FILE} or a folder with one (save_pretrained of transformers writes it)"
        raise PentadError(f"--tokenizer is '{path}', {fault}: {expected}")
    try:
        return parse_tokenizer(file.read_text("utf-8"))
    except Exception as error:  # the library raises nothing narrower
        fault = f"which cannot be read ({error})"
        raise PentadError(f"--tokenizer is '{path}', {fault}: expected a tokenizer.json") from None


def parse_tokenizer(text: str) -> Tokenizer:
    """The inverse of `tokenizer_text`."""
    return _for_plain_text(Tokenizer.from_str(text))


def tokenizer_text(tokenizer: Tokenizer) -> str:
    """The content of a tokenizer.json."""
    return str(tokenizer.to_str(pretty=True))


def end_token(tokenizer: Tokenizer, eos: str | None = None) -> int:
    """Id of the token that ends every document: the end-of-document token of a known family, else `eos`.

    `eos` comes second because instruction-tuned models use it for the end of a turn. Raises PentadError for a tokenizer
    that has neither.
    """
    names = [*_END_TOKENS, *([eos] if eos else [])]
    end = next((token for token in map(tokenizer.token_to_id, names) if token is not None), None)
    if end is None:
        expected = f"expected one of {', '.join(_END_TOKENS)}, or an eos_token in tokenizer_config.json"
        raise PentadError(f"--tokenizer has no end-of-document token: {expected}")
    return int(end)


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id; ids may have gaps."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without begin and end tokens."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids`, with end-of-document tokens spelled out."""
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _for_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """Has special tokens that a document spells out encoded as plain text; otherwise a page about tokenizers would be
    cut there."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
