"""The same texts give the same tokenizer, and text never turns into special tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.tokenizer import encode, end_token, load_tokenizer, train_tokenizer

POEM = "Über den Bergen,\r\nweit zu wandern,\n\n  say <|endoftext|> people — 山の向こう 🏔\n"


def test_training_is_deterministic_and_the_end_token_is_0() -> None:
    first, second = (train_tokenizer(iter([POEM, "the theme of them"]), 280) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.token_to_id("<|endoftext|>") == 0 and first.get_vocab_size() <= 280
    assert all(0 not in ids for ids in encode(first, [POEM, "<|endoftext|>"]))


def test_a_bad_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(PentadError, match=r"t.json', which cannot be read \(.*\): expected a tokenizer.json"):
        load_tokenizer(tmp_path / "t.json")
    with pytest.raises(PentadError, match=r"which has no tokenizer.json: expected a tokenizer.json or a folder"):
        load_tokenizer(tmp_path)
    with pytest.raises(PentadError, match=r"gone', which does not exist: expected a tokenizer.json"):
        load_tokenizer(tmp_path / "gone")


def test_documents_end_with_a_known_token_or_else_with_the_eos_token() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<|im_end|>": 1}, unk_token="a"))
    with pytest.raises(PentadError, match=r"--tokenizer has no end-of-document token: expected one of <\|"):
        end_token(tokenizer)
    assert end_token(tokenizer, "<|im_end|>") == 1
    tokenizer.add_special_tokens(["</s>"])
    assert end_token(tokenizer, "<|im_end|>") == 2
