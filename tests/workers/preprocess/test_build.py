"""Building a corpus: from any source, complete or not at all, and errors name the user's mistake."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import build, content, texts
from pool import process_context

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus import open_corpus
from pentad.workers.data.tokenizer import load_tokenizer, train_tokenizer
from pentad.workers.preprocess import build_folder, part_builder, parts
from pentad.workers.preprocess.build import BuildProgress
from pentad.workers.preprocess.inspect import inspect_corpus

POEM = "Über den Bergen,\r\nweit zu wandern,\n\n  say <|endoftext|> people — 山の向こう 🏔\n"


def write_source(folder: Path, suffix: str, rows: Sequence[str | None]) -> Path:
    source = folder / f"source{suffix}"
    if suffix == ".jsonl":
        source.write_text("\n\n".join(json.dumps({"id": 1, "text": row}) for row in rows))
    elif suffix == ".parquet":
        pq.write_table(pa.table({"id": range(len(rows)), "text": rows}), source)
    else:
        source.write_bytes("".join(filter(None, rows)).encode())
    return source


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_documents(tmp_path: Path, suffix: str) -> None:
    rows = [POEM, None, "b", "", POEM * 5]
    corpus = build(write_source(tmp_path, suffix, rows))
    assert texts(corpus) == [POEM, "b", POEM * 5]
    assert corpus == open_corpus(corpus.path, verify=True)
    assert inspect_corpus(corpus.path, 0, 1)["origin"] == {
        "fields": "text",
        "chat_template": "",
        "empty_rows": 2,
        "untrained_conversations": 0,
    }


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    assert texts(build(write_source(tmp_path, ".md", [POEM, POEM]))) == [POEM + POEM]


def test_shards_hold_complete_documents_up_to_their_limit(tmp_path: Path) -> None:
    rows = ["x" * 50, "long " * 200, "y" * 49, "z" * 49, *("short",) * 30]
    corpus = build(write_source(tmp_path, ".jsonl", rows), vocab=257, shard_tokens=100)
    shards = json.loads((corpus.path / "index.json").read_text())["shards"]
    assert all(shard["tokens"] <= 100 or shard["documents"] == 1 for shard in shards)
    assert [shard["tokens"] for shard in shards[:3]] == [51, 1001, 100]
    assert texts(corpus) == rows


def test_the_text_field_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "hello"}\n')
    assert texts(build(tmp_path / "a.jsonl", field="body")) == ["hello"]


def test_a_given_tokenizer_is_used_and_stored(tmp_path: Path) -> None:
    trained = train_tokenizer(["the cat sat on the mat"] * 9, 270)
    trained.save(str(tmp_path / "tokenizer.json"))
    corpus = build(write_source(tmp_path, ".txt", ["the cat sat"]), tokenizer=tmp_path)
    assert corpus.read(0, corpus.tokens).tolist() == [*trained.encode("the cat sat").ids, 0]
    assert load_tokenizer(corpus.path).get_vocab() == trained.get_vocab()


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of several formats that are cut into more than ten parts."""
    monkeypatch.setattr(parts, "_SMALLEST", 2**10)
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [f"{POEM}{number} " * (number % 4 + 1) for number in range(30)]
    write_source(folder, ".jsonl", rows)
    pq.write_table(pa.table({"text": rows}), folder / "rows.parquet", row_group_size=7)
    for number in range(9):
        (folder / f"{number}.txt").write_text(POEM * number)
    train_tokenizer([POEM], 290).save(str(tmp_path / "t.json"))
    return folder


def test_parts_hold_every_document_once_and_in_order(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = build(many, tokenizer=tmp_path / "t.json")
    assert len(list(corpus.path.glob("*.arrow"))) > 10
    monkeypatch.setattr(parts, "_SMALLEST", 2**20)
    whole = build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "whole")
    assert len(list(whole.path.glob("*.arrow"))) == 1
    assert texts(corpus) == texts(whole)
    assert [text for text in texts(whole) if text == POEM * 3] == [POEM * 3]
    assert len(texts(whole)) == 8 + 30 + 30


def test_training_a_tokenizer_is_reported_within_files(many: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def trained(out: str) -> tuple[bytes, set[int]]:
        reports = list[BuildProgress]()
        corpus = build(many, progress=reports.append, out=tmp_path / out)
        read = {each.bytes for each in reports if each.phase == "training the tokenizer"}
        return (corpus.path / "tokenizer.json").read_bytes(), read

    found, read = trained("many")
    monkeypatch.setattr(parts, "_SMALLEST", 2**20)
    expected, of_one = trained("one")
    assert found == expected and len(read) > 10 and len(of_one) == 2 and max(read) == max(of_one)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a build start from one that has imported torch and Arrow, which saves seconds."""
    context = process_context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["t.json", None])
def test_the_number_of_processes_changes_nothing(many: Path, tmp_path: Path, tokenizer: str | None) -> None:
    path = tmp_path / tokenizer if tokenizer else None
    expected = content(build(many, tokenizer=path).path)
    assert content(build(many, tokenizer=path, out=tmp_path / "three", workers=3).path) == expected


@pytest.mark.usefixtures("forked")
def test_two_processes_build_what_one_builds(many: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    expected = content(build(many, tokenizer=path, out=tmp_path / "expected").path)
    assert content(build(many, tokenizer=path, out=tmp_path / "two", workers=2).path) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_processes_build_what_one_builds_and_one_that_fails_or_dies_ends_the_build(many: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "t.json", tmp_path / "out"
    expected = content(build(many, tokenizer=path, out=tmp_path / "expected").path)
    (many / "rows.jsonl").write_text("no JSON")
    with pytest.raises(PentadError, match=r"is not JSON .*the same command continues"):
        build(many, tokenizer=path, out=out, workers=2)
    (many / "rows.jsonl").unlink()

    others = {*multiprocessing.active_children()}  # ranks of other tests

    def kill_one(_: Any) -> None:
        next(each for each in multiprocessing.active_children() if each not in others).kill()

    with pytest.raises(PentadError, match=r"^a process of the build has exit code -9: .*memory for --workers 2"):
        build(many, tokenizer=path, out=out, workers=2, progress=kill_one)
    assert others.issuperset(multiprocessing.active_children())
    assert content(build(many, tokenizer=path, out=out, workers=2).path) == expected


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_fastokens_that_raises_costs_one_line_and_no_token(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    notes: list[str] = []
    expected = content(build(many, tokenizer=tmp_path / "t.json", note=notes.append).path)
    assert len(notes) == 1  # how many files there are
    broken = tmp_path / "broken" / "fastokens"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("class Tokenizer:\n    def from_json_str(text): raise RuntimeError('odd')\n")
    monkeypatch.syspath_prepend(broken.parent)
    monkeypatch.delitem(sys.modules, "fastokens")
    out = tmp_path / "slow"
    assert (
        content(build(many, tokenizer=tmp_path / "t.json", out=out, workers=workers, note=notes.append).path)
        == expected
    )
    line = "`tokenizers` encodes the text, 15 to 200 times slower: fastokens has failed (RuntimeError: odd)"
    assert notes == [notes[0], notes[0], line]


@pytest.mark.slow
def test_a_build_of_several_processes_that_is_killed_leaves_none_and_continues(many: Path, tmp_path: Path) -> None:
    expected = content(build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "expected").path)
    code = (
        "import sys; from pentad.workers.preprocess import parts; parts._SMALLEST = 2**10\n"
        "from pentad.orchestrator.cli.cli import main; sys.exit(main())"
    )
    words = [
        "data",
        "build",
        str(many),
        str(tmp_path / "out"),
        "--tokenizer",
        str(tmp_path / "t.json"),
        "--workers",
        "2",
    ]
    process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("out/.partial/*/index.json")):
        assert process.poll() is None
        time.sleep(0.001)
    children = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == [".partial"]
    resumed = build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "out", workers=2)
    assert content(resumed.path) == expected


class KilledError(BaseException):
    """Stands for the death of the process: nothing cleans up after it."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("trained", [False, True])
def test_a_build_that_is_killed_at_any_moment_continues_to_the_same_bytes(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    """A process may die before any change of the disk; the next one continues from there."""
    tokenizer = None if trained else tmp_path / "t.json"
    expected = content(build(many, tokenizer=tokenizer, out=tmp_path / "expected").path)
    left, replace, rename, unlink, rmtree = 0, os.replace, os.rename, Path.unlink, shutil.rmtree

    def dying(change):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return change(*arguments, **options)

        return call

    monkeypatch.setattr(os, "replace", dying(replace))
    monkeypatch.setattr(os, "rename", dying(rename))
    monkeypatch.setattr(Path, "unlink", dying(unlink))
    monkeypatch.setattr(shutil, "rmtree", dying(rmtree))
    kills = 0
    while kills < 200:
        left = 1 + kills % 8
        try:
            build(many, tokenizer=tokenizer, out=tmp_path / "out")
        except KilledError:
            kills += 1
        else:
            break
    assert 10 < kills < 200
    assert content(tmp_path / "out") == expected


def test_a_change_of_a_source_between_two_calls_builds_its_parts_again(many: Path, tmp_path: Path) -> None:
    (many / "rows.jsonl").write_text("no JSON")
    with pytest.raises(PentadError, match=r"is not JSON .*what is built stays in OUT, and the same command continues"):
        build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "out")
    notes: list[str] = []
    (many / "rows.jsonl").write_text('{"text": "mended"}\n')
    fresh = build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "fresh")
    resumed = build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "out", note=notes.append)
    assert any(note.startswith("continues an unfinished build: ") for note in notes)
    assert content(resumed.path) == content(fresh.path) and "mended" in texts(fresh)


def test_an_unfinished_build_with_other_options_starts_over(many: Path, tmp_path: Path) -> None:
    (many / "rows.jsonl").write_text("no JSON")
    with pytest.raises(PentadError, match="is not JSON"):
        build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "out")
    (many / "rows.jsonl").unlink()
    fresh = build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "fresh", shard_tokens=50)
    other = build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "out", shard_tokens=50)
    assert content(other.path) == content(fresh.path)


@pytest.mark.parametrize("moment", ["moving", "finished"])
def test_another_build_replaces_an_unfinished_corpus_and_no_finished_one(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    remove = shutil.rmtree

    def stop(*arguments: Any, **options: Any) -> None:
        if moment == "moving" or (tmp_path / "out" / "index.json").exists():
            raise KilledError
        remove(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(*((build_folder, "index_of") if moment == "moving" else (shutil, "rmtree")), stop)
        with pytest.raises(KilledError):
            build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "out")
    arguments: dict[str, Any] = {"tokenizer": tmp_path / "t.json", "shard_tokens": 50}
    if moment == "moving":
        fresh = build(many, out=tmp_path / "fresh", **arguments)
        assert content(build(many, out=tmp_path / "out", **arguments).path) == content(fresh.path)
    else:
        with pytest.raises(PentadError, match="which exists and is not empty"):
            build(many, out=tmp_path / "out", **arguments)
        assert open_corpus(tmp_path / "out", verify=True).documents == 68


def test_a_source_that_changes_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path, ".txt", ["a"])
    read = part_builder.read_text

    def read_and_append(file):
        yield from read(file)
        source.write_text("ab")

    monkeypatch.setattr(part_builder, "read_text", read_and_append)
    train_tokenizer([POEM], 290).save(str(tmp_path / "t.json"))
    with pytest.raises(
        PentadError, match=r"source.txt changed while it was read: expected files that stay as they are$"
    ):
        build(source, tokenizer=tmp_path / "t.json")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_sentence_and_the_build_continues(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = part_builder.write_shards, 0

    def write_a_few(*arguments):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    monkeypatch.setattr(part_builder, "write_shards", write_a_few)
    expected = r"OUT is '.*out', which cannot be written \(No space left on device\): .*the same command continues\)$"
    with pytest.raises(PentadError, match=expected):
        build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "out")
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == [".partial"]
    assert len(list((tmp_path / "out" / ".partial").iterdir())) == 3
    fresh = build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "fresh")
    assert content(build(many, tokenizer=tmp_path / "t.json", out=tmp_path / "out").path) == content(fresh.path)


def test_a_folder_that_another_build_is_writing_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(
        PentadError, match=r"OUT is '.*out', which another build is writing: expected a folder of its own"
    ):
        build(write_source(tmp_path, ".txt", ["a"]))
    os.close(descriptor)
    assert texts(build(tmp_path / "source.txt")) == ["a"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_output_folder_with_content_is_not_touched(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    (out / "precious" if kind == "folder" else out).write_text("precious")
    with pytest.raises(PentadError, match=r"OUT is '.*out', which exists and is not empty"):
        build(write_source(tmp_path, ".txt", ["a"]))
    assert (out / "precious" if kind == "folder" else out).read_text() == "precious"


def test_a_finished_corpus_is_not_built_again(tmp_path: Path) -> None:
    build(write_source(tmp_path, ".txt", ["a"]))
    with pytest.raises(PentadError, match=r"OUT is '.*out', which exists and is not empty"):
        build(tmp_path / "source.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab": 256}, "--vocab is 256: expected at least 257"),
        ({"vocab": 2**64}, "--vocab is 18446744073709551616: expected at most"),
        ({"shard_tokens": 0}, "shard_tokens is 0: expected at least 1"),
        ({"workers": 0}, "--workers is 0: expected at least 1"),
        ({"vocab": 300, "tokenizer": Path("t.json")}, "--vocab is 300 beside --tokenizer t.json: expected one of them"),
        ({"tokenizer": Path("gone.json")}, "--tokenizer is 'gone.json', which does not exist"),
        ({"chat": True}, "--chat is given without --tokenizer: expected the folder"),
        ({"template": Path("a.jinja")}, "--chat-template is 'a.jinja' without --chat: expected both or neither"),
    ],
)
def test_a_bad_option_is_named_and_leaves_nothing(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(PentadError, match=message):
        build(write_source(tmp_path, ".txt", ["a"]), **options)
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = write_source(tmp_path, ".txt", ["a"])
    expected = r"OUT is '.*source.txt/out', which cannot be written \(.*\): expected a writable"
    with pytest.raises(PentadError, match=expected):
        build(source, out=source / "out")
