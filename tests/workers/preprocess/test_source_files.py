"""Which files SOURCE means, in which order."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from corpora import build, texts

from pentad.schedules.ir.errors import PentadError
from pentad.workers.preprocess.source_files import find_files

NAMES = [
    "b.txt",
    "a/z.md",
    "a/b/c.rst",
    "a/code.py",
    "x.PDF",
    "UPPER.TXT",
    "t.txt.gz",
    ".hidden/h.txt",
    "a/.h.txt",
    "[1].txt",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    return tmp_path / "in"


def found(folder: Path, *sources: str) -> list[str]:
    files = find_files([str(folder / source) for source in sources])
    return [os.path.relpath(file.uri, folder) for file in files]


def test_a_folder_is_read_in_path_order_without_hidden_and_unknown_files(folder: Path) -> None:
    known = ["UPPER.TXT", "[1].txt", "a/b/c.rst", "a/z.md", "b.txt", "t.txt.gz"]
    assert found(folder, ".") == known
    assert [file.format for file in find_files([str(folder)])] == [".txt"] * 6


def test_sources_keep_their_order_and_every_file_is_read_once(folder: Path) -> None:
    assert found(folder, "b.txt", "a", "b.txt", "*.txt") == ["b.txt", "a/b/c.rst", "a/z.md", "[1].txt"]


def test_a_named_file_is_text_whatever_its_ending(folder: Path) -> None:
    (folder / "noending").write_text("plain")
    assert texts(build(folder / "noending")) == ["plain"]
    assert found(folder, "a/code.py", "x.PDF") == ["a/code.py", "x.PDF"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.py", ["a/code.py"]),
        ("**/*", ["UPPER.TXT", "[1].txt", "a/b/c.rst", "a/code.py", "a/z.md", "b.txt", "t.txt.gz", "x.PDF"]),
        ("*/*", ["a/code.py", "a/z.md"]),
        ("a/**", ["a/b/c.rst", "a/code.py", "a/z.md"]),
        ("[a-c].txt", ["b.txt"]),
        ("[!a].txt", ["b.txt"]),
        ("[[]1].txt", ["[1].txt"]),
        ("?.txt", ["b.txt"]),
        (".hidden/*", [".hidden/h.txt"]),
        ("**/.h*", ["a/.h.txt"]),
    ],
)
def test_patterns_match_as_those_of_a_shell(folder: Path, pattern: str, expected: list[str]) -> None:
    assert found(folder, pattern) == expected
    assert sorted(path for path in map(str, _glob(folder, pattern)) if (folder / path).is_file()) == expected


def _glob(folder: Path, pattern: str) -> list[str]:
    return glob.glob(pattern, root_dir=folder, recursive=True)


def test_a_uri_names_a_file_or_a_folder_or_a_pattern(folder: Path) -> None:
    for source in (f"file://{folder}/a", f"file://{folder}/a/**/*.*d"):
        assert f"file://{folder}/a/z.md" in [file.uri for file in find_files([source])]
    (file,) = find_files([f"file://{folder}/b.txt"])
    with file.open() as source:
        assert source.read() == b"b.txt"
    file.require_unchanged()


@pytest.mark.parametrize(
    "source", ["gone", "gone/*.txt", "empty", "*.gone", "file://HERE/gone", "nowhere://x/y", "pipe"]
)
def test_a_source_without_files_is_named(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    source = source.replace("HERE", str(tmp_path)) if "://" in source else str(tmp_path / source)
    with pytest.raises(PentadError, match=r"SOURCE is '.*(gone|empty|gone/..txt|//x/y|pipe)'.*: expected files"):
        find_files([source])


def save_to_disk(folder: Path, texts: list[str]) -> None:
    """What `datasets` writes: streams, their names in state.json, and files of its cache beside them."""
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        table = pa.table({"text": [text]})
        for name in (f"data-{number:05d}-of-{len(texts):05d}.arrow", f"cache-{number}.arrow"):
            with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
                writer.write_table(table)
    names = [{"filename": f"data-{number:05d}-of-{len(texts):05d}.arrow"} for number in range(len(texts))]
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_data_set_on_disk_is_read_without_its_cache(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "data", ["one", "two"])
    assert texts(build(tmp_path / "data")) == ["one", "two"]


def test_a_data_set_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "data" / "train", ["one"])
    save_to_disk(tmp_path / "data" / "test", ["two"])
    (tmp_path / "data" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(PentadError, match=r"data', which holds the splits train, test: expected the folder of one"):
        find_files([str(tmp_path / "data")])
    assert len(find_files([str(tmp_path / "data" / "train")])) == 1
