"""Reading text and rows: nothing is lost or read twice, and errors name the file and the position."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import build, content
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.tokenizer import train_tokenizer
from pentad.workers.preprocess import parts, readers
from pentad.workers.preprocess.readers import Columns, FileSpan, read_rows, read_text
from pentad.workers.preprocess.source_files import find_files

POEM = "Über den Bergen,\r\nweit zu wandern,\n\n  say <|endoftext|> people — 山の向こう 🏔\n"
TOKENIZER = train_tokenizer([POEM], 290)
TEXT = Columns((("text",),))
ROWS = [{"id": number, "text": POEM * (number % 3) or None, "tools": [number]} for number in range(600)]


def rows_of(path: Path, columns: Columns = TEXT) -> list[dict[str, Any]]:
    return [row.values for file in find_files([str(path)]) for row in read_rows(FileSpan(file), columns)]


def write_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def write_file(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "\n\n".join(json.dumps(row) for row in rows).encode()


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(jsonl(ROWS)),
    "members.jsonl.gz": lambda path: path.write_bytes(
        b"\n".join([gzip.compress(jsonl(ROWS[:9]) + b"\n"), b""])[:-1] + gzip.compress(jsonl(ROWS[9:]))
    ),
    "a.jsonl.zst": lambda path: path.write_bytes(pa.compress(jsonl(ROWS), "zstd", asbytes=True)),
    "a.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=70),
    "stream.arrow": write_stream,
    "file.arrow": write_file,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    columns = Columns((("gone",), ("text",)), ("tools",))
    assert rows_of(tmp_path / name, columns) == [{"text": row["text"], "tools": row["tools"]} for row in ROWS]


def test_csv_fields_may_be_quoted_and_span_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        ('\ufeffid,text\r\n1,"say ""a"",\nand\r\nb"\r\n\r\n2,' + "é" * 9 + "\r\n3,\r\n").encode()
    )
    assert [row["text"] for row in rows_of(tmp_path / "a.csv")] == ['say "a",\nand\r\nb', "é" * 9, ""]


@pytest.mark.parametrize("codec", ["", ".gz", ".zst"])
def test_text_is_read_in_blocks_that_cut_no_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr(readers, "_BLOCK", 7)
    raw = (POEM * 40).encode()
    compress = {"": lambda raw: raw, ".gz": gzip.compress, ".zst": lambda raw: pa.compress(raw, "zstd", asbytes=True)}
    (tmp_path / f"a.txt{codec}").write_bytes(compress[codec](raw))
    (file,) = find_files([str(tmp_path)])
    blocks = list(read_text(file))
    assert "".join(blocks) == POEM * 40 and len(blocks) > 100


LINES = st.lists(st.sampled_from([b'{"text": "a"}', b'{"text": "\xc3\xa9\xc3\xa9"}', b"", b'{"text": null, "b": 1}']))


@given(LINES, st.integers(1, 40), st.booleans())
def test_spans_of_a_file_hold_every_line_once(tmp_path_factory: Any, lines: list[bytes], size: int, ends: bool) -> None:
    path = tmp_path_factory.mktemp("spans") / "a.jsonl"
    path.write_bytes(b"\n".join([*lines, b""] if ends else lines))
    (file,) = find_files([str(path)])
    whole = [row.values for row in read_rows(FileSpan(file), TEXT)]
    spans = [span for span, _ in parts._spans(file, size)]
    assert [row.values for span in spans for row in read_rows(span, TEXT)] == whole
    assert len(whole) == sum(bool(line) for line in lines)


def test_row_groups_are_read_once(tmp_path: Path) -> None:
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    (file,) = find_files([str(tmp_path)])
    spans = [span for span, _ in parts._spans(file, file.size // 4)]
    assert len(spans) > 3
    found = [row for span in spans for row in read_rows(span, TEXT)]
    assert [row.values["text"] for row in found] == [row["text"] for row in ROWS]
    assert found[321].where() == f"{tmp_path / 'a.parquet'} row 321"


MISTAKES: dict[str, tuple[str, bytes, str]] = {
    "empty text": ("a.txt", b"", r"SOURCE holds no text"),
    "empty JSONL": ("a.jsonl", b'\n{"text": ""}\n', r"SOURCE holds no text"),
    "not JSON": ("a.jsonl", b'{"text": "a"}\n{"text"', r"a.jsonl line 2 is not JSON"),
    "not an object": ("a.jsonl", b'{"text": "a"}\n\n[1]\n', r"a.jsonl line 3 is a JSON list: expected an object"),
    "no field": ("a.jsonl", b'{"b": "a", "c": 1}', r"a.jsonl line 1 has the fields 'b', 'c': expected 'text'"),
    "not a string": ("a.jsonl", b'{"text": 5}', r"line 1 has 'text' of type int: expected a string"),
    "surrogate": ("a.jsonl", b'{"text": "\\ud800"}', r"line 1 has half a surrogate pair"),
    "JSONL not in UTF-8": ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl is not UTF-8 at byte 24"),
    "not UTF-8": ("a.txt", b"x" * 1_100_000 + b"\xe5\xb1" + b"x", r"a.txt is not UTF-8 at byte 1100000"),
    "not UTF-8 across blocks": ("a.txt", b"x" * (2**20 - 1) + b"\xe5\xb1x", r"a.txt is not UTF-8 at byte 1048575"),
    "truncated UTF-8": ("a.txt", b"x\xe5\xb1", r"a.txt is not UTF-8 at byte 1:"),
    "not Parquet": ("a.parquet", b"PAR0", r"a.parquet cannot be read .*: expected a Parquet file"),
    "not Arrow": ("a.arrow", b"ARROW1\0\0", r"a.arrow cannot be read .*: expected an Arrow IPC file or stream"),
    "not gzip": ("a.txt.gz", b"text", r"a.txt.gz cannot be read"),
    "truncated gzip": ("a.txt.gz", gzip.compress(b"text" * 99)[:-9], r"a.txt.gz cannot be read"),
    "no CSV column": ("a.csv", b"a,b\n1,2\n", r"a.csv has the columns 'a', 'b': expected 'text'"),
    "ragged CSV": ("a.csv", b"a,text\n1,2\n3\n", r"a.csv line 3 has 1 values: expected 2, as in the first line"),
    "not CSV": ("a.csv", b'text\n"a" b\n', r"a.csv line 2 is not CSV"),
    "CSV not in UTF-8": ("a.csv", b"text\nab\xff\n", r"a.csv is not UTF-8 at byte 7"),
    "compressed Parquet": ("a.parquet.gz", gzip.compress(b"PAR1"), r"a.parquet.gz is compressed as a whole"),
}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("given_tokenizer", [False, True])
def test_a_bad_source_is_named_and_leaves_nothing(tmp_path: Path, mistake: str, given_tokenizer: bool) -> None:
    name, raw, message = MISTAKES[mistake]
    (tmp_path / name).write_bytes(raw)
    TOKENIZER.save(str(tmp_path / "t.json"))
    before = content(tmp_path)
    with pytest.raises(PentadError, match=message):
        build(tmp_path / name, tokenizer=tmp_path / "t.json" if given_tokenizer else None)
    assert content(tmp_path) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"a": ["x"], "b": [1]}, "has the columns 'a', 'b': expected 'text'"),
        ({"text": [1]}, "row 0 has 'text' of type int: expected a string"),
    ],
)
def test_a_wrong_parquet_column_is_named(tmp_path: Path, table: dict, message: str) -> None:
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(PentadError, match=message):
        build(tmp_path / "a.parquet")


def test_a_parquet_column_whose_name_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"], "more": ["b"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"more", b"m\xffre"))
    with pytest.raises(PentadError, match=r"a.parquet cannot be read .*: expected a Parquet file"):
        build(path)


def test_parquet_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    column = pa.array([b"ok", b"\xff"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(PentadError, match=r"a.parquet row 1 is not UTF-8 at byte 0"):
        rows_of(tmp_path / "a.parquet")


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (file,) = find_files([str(tmp_path)])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(PentadError, match=r"a.txt cannot be read \(No such file or directory\): expected a readable"):
        list(read_text(file))


def test_a_field_of_text_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"body": "hello"}\n')  # JSONL, but for its name
    with pytest.raises(PentadError, match=r"^--field is 'body', but .*a.json is read as text: expected"):
        build(tmp_path / "a.json", field="body")
    assert not (tmp_path / "out").exists()
