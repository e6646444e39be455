"""What a run records is in its files once, in order, whichever thread records it and whatever interrupts that."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pentad.orchestrator.records import run_files
from pentad.orchestrator.records.hash_chain import linked, read_chain
from pentad.orchestrator.records.json_lines import append, read_lines
from pentad.orchestrator.records.run_files import RunFiles

pytestmark = pytest.mark.timeout(60)


def test_lines_of_several_threads_are_there_once_and_in_the_order_of_each(tmp_path: Path) -> None:
    files, path, count = RunFiles(), tmp_path / "journal.jsonl", 400

    def record(who: int) -> None:
        for number in range(count):
            files.append(path, {"who": who, "number": number})

    threads = [threading.Thread(target=record, args=(who,)) for who in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    rows = read_lines(path)
    assert [[row["number"] for row in rows if row["who"] == who] for who in range(3)] == [[*range(count)]] * 3


@pytest.mark.parametrize("writes", [False, True])
def test_a_line_that_is_interrupted_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    files, path, hash_ = RunFiles(), tmp_path / "audit.jsonl", ""
    calls = 0

    def interrupted(where: Path, lines: str) -> None:
        nonlocal calls
        calls += 1
        if calls != 2 or writes:
            append(where, lines)
        if calls == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_files, "append", interrupted)
    for step in range(4):
        entry = linked({"event": "step", "step": step}, hash_)
        hash_ = entry["hash"]
        try:
            files.append(path, entry)
        except KeyboardInterrupt:
            assert step == 1
    entries = read_chain(path.read_bytes().splitlines(), "audit.jsonl")
    assert [entry["step"] for entry in entries] == [0, 1, 2, 3]


def test_what_was_appended_is_on_the_disk_before_a_checkpoint_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = list[str](), os.fsync

    def recorded(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", recorded)
    files, paths = RunFiles(), [tmp_path / "journal.jsonl", tmp_path / "metrics.jsonl"]
    for path in paths:
        files.append(path, {"step": 1})
    files.sync()
    files.sync()
    assert synced == [*map(str, paths)]
