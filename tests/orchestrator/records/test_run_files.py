"""What a run records is in its files once and in order, whichever thread records it and whatever interrupts it."""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pentad.orchestrator.records import run_files
from pentad.orchestrator.records.hash_chain import linked, read_chain
from pentad.orchestrator.records.json_lines import append, read_lines
from pentad.orchestrator.records.run_files import RunFiles
from pentad.schedules.ir.errors import PentadError
from pentad.workers import background

pytestmark = pytest.mark.timeout(60)


def test_lines_of_several_threads_are_there_once_and_in_the_order_of_each(tmp_path: Path) -> None:
    files, path, count = RunFiles(tmp_path), tmp_path / "journal.jsonl", 400

    def record(who: int) -> None:
        for number in range(count):
            files.append(path, {"who": who, "number": number})

    threads = [threading.Thread(target=record, args=(who,)) for who in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    files.settle()
    rows = read_lines(path)
    assert [[row["number"] for row in rows if row["who"] == who] for who in range(3)] == [[*range(count)]] * 3


@pytest.mark.parametrize("starts", [False, True])
def test_a_line_whose_recording_is_interrupted_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    """By Ctrl-C, before or after the writing thread has started."""
    files, path, hash_ = RunFiles(tmp_path), tmp_path / "audit.jsonl", ""
    interrupted = [True]

    def in_daemon(write: Any) -> Any:
        if starts or not interrupted:
            background.in_daemon(write)
        if interrupted:
            interrupted.pop()
            raise KeyboardInterrupt

    monkeypatch.setattr(run_files, "in_daemon", in_daemon)
    for step in range(4):
        entry = linked({"event": "step", "step": step}, hash_)
        hash_ = entry["hash"]
        with suppress(KeyboardInterrupt):
            files.append(path, entry)
    files.settle()
    entries = read_chain(path.read_bytes().splitlines(), "audit.jsonl")
    assert [entry["step"] for entry in entries] == [0, 1, 2, 3]


def test_what_waits_is_written_in_order_by_one_thread_that_ends_at_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, path, writers = RunFiles(tmp_path), tmp_path / "journal.jsonl", set[int]()

    def seen(where: Path, lines: str, size: int) -> None:
        writers.add(threading.get_ident())
        append(where, lines, size)

    monkeypatch.setattr(run_files, "append", seen)
    before = threading.active_count()
    with files.lock:  # keeps the writer from beginning
        for number in range(3):
            files.append(path, {"number": number})
        files.replace(path, b"")
        files.append(path, {"number": 3})
    files.settle()
    for number in range(4, 9):  # one by one: the thread waits for each
        files.append(path, {"number": number})
        files.wait()
        time.sleep(0.01)
    files.close()
    assert [row["number"] for row in read_lines(path)] == [*range(3, 9)] and len(writers) == 1
    assert threading.get_ident() not in writers
    until = time.monotonic() + run_files.IDLE_SECONDS / 2
    while threading.active_count() > before:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_writer_without_lines_ends_and_another_one_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "IDLE_SECONDS", 0.05)
    files, path, before = RunFiles(tmp_path), tmp_path / "journal.jsonl", threading.active_count()
    for number in range(3):
        files.append(path, {"number": number})
        while threading.active_count() > before:
            time.sleep(0.01)
    assert [row["number"] for row in read_lines(path)] == [0, 1, 2]


@pytest.mark.parametrize("is_known", [False, True])
def test_a_line_whose_writer_is_woken_while_ctrl_c_comes_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Before or after the writer notices."""
    files, path = RunFiles(tmp_path), tmp_path / "journal.jsonl"
    files.append(path, {"number": 0})
    files.wait()
    notify = files.writer_woken.notify

    def interrupted() -> None:
        if is_known:
            notify()
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(files.writer_woken, "notify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.append(path, {"number": 1})
    began = time.monotonic()
    files.append(path, {"number": 2})
    files.settle()
    assert time.monotonic() - began < run_files.IDLE_SECONDS / 2
    assert [row["number"] for row in read_lines(path)] == [0, 1, 2]


def test_a_disk_that_hangs_holds_up_no_line_and_no_close_and_gets_all_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, path, hangs = RunFiles(tmp_path), tmp_path / "journal.jsonl", threading.Event()
    before = threading.active_count()
    monkeypatch.setattr(run_files, "WAIT_SECONDS", 0.1)
    files.append(path, {"number": 0})
    files.wait()

    def hanging(where: Path, lines: str, size: int) -> None:
        hangs.wait()
        append(where, lines, size)

    monkeypatch.setattr(run_files, "append", hanging)
    began = time.monotonic()
    for number in range(1, 50):
        files.append(path, {"number": number})
    files.close()
    assert time.monotonic() - began < 1.0 and threading.active_count() == before + 1
    hangs.set()
    while threading.active_count() > before:
        time.sleep(0.01)
    assert [row["number"] for row in read_lines(path)] == [*range(50)]


class FullDisk(io.FileIO):
    """A file on a disk that is full while `fails` names what fails: a write, part of which gets through; removing that
    part as well; or only closing the file, with the whole line written, as a file server may report."""

    fails = ""

    def write(self, data: Any) -> int:
        if self.fails in ("write", "truncate") and len(data) > 1:
            super().write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        if self.fails == "truncate":
            raise OSError(errno.EIO, "Input/output error")
        return super().truncate(size)

    def close(self) -> None:
        reports = self.fails == "close" and not self.closed
        super().close()
        if reports:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("fails", ["write", "truncate", "close"])
def test_lines_that_a_full_disk_has_taken_in_part_are_there_once_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    files, path, other = RunFiles(tmp_path), tmp_path / "metrics.jsonl", tmp_path / "journal.jsonl"
    for each in (path, other):
        files.open(each)
    open_ = Path.open
    opened = lambda path, mode="r", *given, **more: (  # noqa: E731
        FullDisk(path, mode.replace("b", "")) if "a" in mode else open_(path, mode, *given, **more)
    )
    monkeypatch.setattr(Path, "open", opened)
    for step in range(9):
        monkeypatch.setattr(FullDisk, "fails", fails if 2 <= step < 5 else "")
        files.append(path, {"step": step})
        files.append(other, {"step": step}, {"step": step, "more": "lines"})
        files.wait()
        assert [row["step"] for row in files.rows(path)] == list(range(step + 1))
        assert len(files.rows(other)) == 2 * (step + 1)
    assert not files.waiting
    assert [row["step"] for row in read_lines(path)] == list(range(9))
    assert [row["step"] for row in read_lines(other)] == [step for step in range(9) for _ in range(2)]


def test_lines_of_another_driver_are_not_cut_off(tmp_path: Path) -> None:
    """Of one that took over while this one was stopped between two attempts."""
    path = tmp_path / "journal.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    append(path, '{"step": 7}\n', 12)
    assert [row["step"] for row in read_lines(path)] == [0, 1, 7]


def test_what_was_appended_is_on_the_disk_before_a_checkpoint_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = list[str](), os.fsync

    def recorded(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", recorded)
    files, paths = RunFiles(tmp_path), [tmp_path / "journal.jsonl", tmp_path / "metrics.jsonl"]
    for path in paths:
        files.append(path, {"step": 1})
    files.sync()
    files.sync()
    assert synced == [*map(str, paths)]


def test_nobody_waits_for_a_slow_disk_again_before_it_has_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(where: Path, lines: str, size: int) -> None:
        time.sleep(0.3)
        append(where, lines, size)

    monkeypatch.setattr(run_files, "append", slow)
    monkeypatch.setattr(run_files, "WAIT_SECONDS", 0.1)
    files, path, began = RunFiles(tmp_path), tmp_path / "journal.jsonl", time.monotonic()
    for number in range(6):
        files.append(path, {"number": number})
        files.wait()
    assert time.monotonic() - began < 1.0 and not files.problem()
    files.settle()
    assert [row["number"] for row in read_lines(path)] == [*range(6)]
    assert not files.is_behind


def test_a_folder_that_is_another_one_meanwhile_takes_no_line(tmp_path: Path) -> None:
    """For example, a mount point without its file system, below which a rank has created folders again."""
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    files, path = RunFiles(folder), folder / "metrics.jsonl"
    files.append(path, {"number": 0})
    files.settle()
    folder.rename(away)
    folder.mkdir()
    files.append(path, {"number": 1})
    with pytest.raises(PentadError, match=r"metrics.jsonl is gone: expected the 14 bytes that were written to it"):
        files.flush(5.0)
    assert not path.exists()
    folder.rmdir()
    away.rename(folder)
    files.settle()
    assert [row["number"] for row in read_lines(path)] == [0, 1]
