"""Laws of reading text: pieces lose nothing, and a mistake is told by file and place."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data import text_sources
from pentad.workers.data.build import build_corpus
from pentad.workers.data.text_sources import Piece, pieces, read_pieces, source_files
from pentad.workers.data.tokenizer import train_tokenizer

POEM = "Über den Bergen,\r\nweit zu wandern,\n\n  say <|endoftext|> people — 山の向こう 🏔\n"
TOKENIZER = train_tokenizer([POEM], 290)
WORDS = TOKENIZER.pre_tokenizer


def build(source: Path, tokenizer: Path | None) -> None:
    build_corpus(source, source.parent / "out", tokenizer=tokenizer, vocab=300, progress=lambda line: None)


def cut(text: str, chunk: int) -> list[Piece]:
    """The pieces of a text that arrives in chunks, with pieces of 9 characters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_sources, "PIECE", 9)
        return list(pieces(text[start : start + chunk] for start in range(0, len(text), chunk)))


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab é\n"), max_size=60), chunk=st.integers(1, 9))
@example(text="a a" + "b" * 23 + " " + "b" * 9, chunk=9)
def test_pieces_are_short_and_lose_nothing(text: str, chunk: int) -> None:
    found = cut(text, chunk)
    assert "".join(piece.text for piece in found) == text
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True] * bool(text)
    assert all(0 < len(piece.text) <= 18 for piece in found)


words = st.text(st.sampled_from("aé山'1-"), min_size=1, max_size=3)
gaps = st.text(st.sampled_from(" \n\t\u00a0\x1c"), max_size=2).map(lambda rest: " " + rest)


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.tuples(words, gaps)).map(lambda pairs: "".join(map("".join, pairs))), chunk=st.integers(1, 9))
def test_pieces_are_cut_where_the_tokenizer_cuts(text: str, chunk: int) -> None:
    parts = [part for piece in cut(text, chunk) for part, _ in WORDS.pre_tokenize_str(piece.text)]
    assert parts == [part for part, _ in WORDS.pre_tokenize_str(text)]


def test_a_long_document_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "PIECE", 64)
    source = tmp_path / "long.txt"
    source.write_bytes(POEM.encode() * 40)
    found = list(read_pieces([source], "text"))
    assert len(found) > 20 and max(len(piece.text) for piece in found) <= 128
    assert "".join(piece.text for piece in found) == POEM * 40


MISTAKES: dict[str, tuple[str, bytes, str]] = {
    "ending": ("a.csv", b"x", r"SOURCE is '.*a.csv': expected a folder or a file that ends in .txt"),
    "empty text": ("a.txt", b"", r"SOURCE holds no text"),
    "empty JSONL": ("a.jsonl", b'\n{"text": ""}\n', r"SOURCE holds no text"),
    "no JSON": ("a.jsonl", b'{"text": "a"}\n{"text"', r"a.jsonl line 2 is no JSON"),
    "no object": (
        "a.jsonl",
        b'{"text": "a"}\n\n[1]\n',
        r"a.jsonl line 3 is a JSON list: expected an object with 'text'",
    ),
    "no field": ("a.jsonl", b'{"b": "a", "c": 1}', r"a.jsonl line 1 has the fields 'b', 'c': expected 'text'"),
    "no string": ("a.jsonl", b'{"text": 5}', r"line 1 has 'text' of type int: expected a string"),
    "surrogate": ("a.jsonl", b'{"text": "\\ud800"}', r"line 1 has half of a surrogate pair"),
    "no UTF-8 line": ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl is no UTF-8 at byte 24"),
    "no UTF-8": ("a.txt", b"x" * 100_000 + b"\xe5\xb1" + b"x", r"a.txt is no UTF-8 at byte 100000"),
    "no UTF-8 across chunks": ("a.txt", b"x" * 65_535 + b"\xe5\xb1x", r"a.txt is no UTF-8 at byte 65535"),
    "cut UTF-8": ("a.txt", b"x\xe5\xb1", r"a.txt is no UTF-8 at byte 1,"),
    "no Parquet": ("a.parquet", b"PAR0", r"a.parquet is unreadable .*: expected a Parquet file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("given_tokenizer", [False, True])
def test_a_bad_source_is_named_and_leaves_nothing(tmp_path: Path, mistake: str, given_tokenizer: bool) -> None:
    name, content, message = MISTAKES[mistake]
    (tmp_path / name).write_bytes(content)
    TOKENIZER.save(str(tmp_path / "t.json"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(PentadError, match=message):
        build(tmp_path / name, tmp_path / "t.json" if given_tokenizer else None)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"a": ["x"], "b": [1]}, "has the columns 'a', 'b': expected 'text'"),
        ({"text": [1]}, "has column 'text' of type int64: expected string"),
    ],
)
def test_a_parquet_column_is_named(tmp_path: Path, table: dict, message: str) -> None:
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(PentadError, match=message):
        list(read_pieces([tmp_path / "a.parquet"], "text"))


def test_parquet_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    column = pa.array([b"ok", b"\xff"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(PentadError, match=r"a.parquet row 1 is no UTF-8 at byte 0"):
        list(read_pieces([tmp_path / "a.parquet"], "text"))


def test_a_missing_or_empty_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(PentadError, match=r"SOURCE is '.*gone', which does not exist"):
        source_files(tmp_path / "gone")
    (tmp_path / "in").mkdir()
    with pytest.raises(PentadError, match=r"SOURCE is '.*in', a folder without a file that ends in"):
        source_files(tmp_path / "in")
