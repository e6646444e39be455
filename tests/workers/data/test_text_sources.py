"""Reading text: chunks lose nothing, and errors name the file and the position."""

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
from pentad.workers.data.text_sources import TextChunk, read_chunks, rechunk, source_files
from pentad.workers.data.tokenizer import train_tokenizer

POEM = "Über den Bergen,\r\nweit zu wandern,\n\n  say <|endoftext|> people — 山の向こう 🏔\n"
TOKENIZER = train_tokenizer([POEM], 290)
PRE_TOKENIZER = TOKENIZER.pre_tokenizer


def build(source: Path, tokenizer: Path | None) -> None:
    build_corpus(source, source.parent / "out", tokenizer=tokenizer, vocab=300, progress=lambda line: None)


def chunked(text: str, part: int) -> list[TextChunk]:
    """Chunks of about 9 characters of a text that arrives in parts of `part` characters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_sources, "CHUNK", 9)
        return list(rechunk(text[start : start + part] for start in range(0, len(text), part)))


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab é\n"), max_size=60), part=st.integers(1, 9))
@example(text="a a" + "b" * 23 + " " + "b" * 9, part=9)
def test_chunks_are_short_and_lose_nothing(text: str, part: int) -> None:
    found = chunked(text, part)
    assert "".join(chunk.text for chunk in found) == text
    assert [chunk.last for chunk in found] == [False] * (len(found) - 1) + [True] * bool(text)
    assert all(0 < len(chunk.text) <= 18 for chunk in found)


words = st.text(st.sampled_from("aé山'1-"), min_size=1, max_size=3)
gaps = st.text(st.sampled_from(" \n\t\u00a0\x1c"), max_size=2).map(lambda rest: " " + rest)


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.tuples(words, gaps)).map(lambda pairs: "".join(map("".join, pairs))), part=st.integers(1, 9))
def test_chunks_end_where_the_pre_tokenizer_splits(text: str, part: int) -> None:
    found = [word for chunk in chunked(text, part) for word, _ in PRE_TOKENIZER.pre_tokenize_str(chunk.text)]
    assert found == [word for word, _ in PRE_TOKENIZER.pre_tokenize_str(text)]


def test_a_long_document_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "CHUNK", 64)
    source = tmp_path / "long.txt"
    source.write_bytes(POEM.encode() * 40)
    found = list(read_chunks([source], "text"))
    assert len(found) > 20 and max(len(chunk.text) for chunk in found) <= 128
    assert "".join(chunk.text for chunk in found) == POEM * 40


MISTAKES: dict[str, tuple[str, bytes, str]] = {
    "ending": ("a.csv", b"x", r"SOURCE is '.*a.csv': expected a file that ends in .txt"),
    "empty text": ("a.txt", b"", r"SOURCE holds no text"),
    "empty JSONL": ("a.jsonl", b'\n{"text": ""}\n', r"SOURCE holds no text"),
    "not JSON": ("a.jsonl", b'{"text": "a"}\n{"text"', r"a.jsonl line 2 is not JSON"),
    "not an object": (
        "a.jsonl",
        b'{"text": "a"}\n\n[1]\n',
        r"a.jsonl line 3 is a JSON list: expected an object with 'text'",
    ),
    "no field": ("a.jsonl", b'{"b": "a", "c": 1}', r"a.jsonl line 1 has the fields 'b', 'c': expected 'text'"),
    "not a string": ("a.jsonl", b'{"text": 5}', r"line 1 has 'text' of type int: expected a string"),
    "surrogate": ("a.jsonl", b'{"text": "\\ud800"}', r"line 1 has half a surrogate pair"),
    "JSONL not in UTF-8": ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl is not UTF-8 at byte 24"),
    "not UTF-8": ("a.txt", b"x" * 100_000 + b"\xe5\xb1" + b"x", r"a.txt is not UTF-8 at byte 100000"),
    "not UTF-8 across chunks": ("a.txt", b"x" * 65_535 + b"\xe5\xb1x", r"a.txt is not UTF-8 at byte 65535"),
    "truncated UTF-8": ("a.txt", b"x\xe5\xb1", r"a.txt is not UTF-8 at byte 1:"),
    "not Parquet": ("a.parquet", b"PAR0", r"a.parquet cannot be read .*: expected a Parquet file"),
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
def test_a_wrong_parquet_column_is_named(tmp_path: Path, table: dict, message: str) -> None:
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(PentadError, match=message):
        list(read_chunks([tmp_path / "a.parquet"], "text"))


def test_parquet_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    column = pa.array([b"ok", b"\xff"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(PentadError, match=r"a.parquet row 1 is not UTF-8 at byte 0"):
        list(read_chunks([tmp_path / "a.parquet"], "text"))


def test_a_missing_or_empty_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(PentadError, match=r"SOURCE is '.*gone', which does not exist"):
        source_files(tmp_path / "gone")
    (tmp_path / "in").mkdir()
    with pytest.raises(PentadError, match=r"SOURCE is '.*in': expected a file that ends in"):
        source_files(tmp_path / "in")
