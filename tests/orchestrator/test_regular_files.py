"""A pipe, a device, a link to itself or a file too large for memory costs one sentence, wherever it is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Pentad

from pentad.orchestrator import checked_folders
from pentad.orchestrator.checked_folders import check_corpora, checked_folder
from pentad.orchestrator.cli import cli
from pentad.orchestrator.records import json_lines
from pentad.orchestrator.records.json_lines import complete_lines, read_lines, trim
from pentad.schedules.catalogue import generate
from pentad.schedules.diagnosis import rank_times
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.regular_files import MOST_BYTES, regular_file
from pentad.schedules.simulate.timeline import Timeline

pytestmark = pytest.mark.timeout(60)


def sparse(path: Path, size: int) -> Path:
    path.touch()
    os.truncate(path, size)
    return path


READERS = [
    *(regular_file, read_lines, trim, lambda path: [*complete_lines(path)]),
    *(Program.load, Timeline.load, rank_times.load),
]


@pytest.mark.parametrize("read", READERS)
def test_a_pipe_is_refused_at_once(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PentadError, match=r"pipe is a pipe or device: expected a file"):
        read(tmp_path / "pipe")


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = sparse(tmp_path / "program.arrow", MOST_BYTES + 1)
    with pytest.raises(PentadError, match=f"program\\.arrow has {MOST_BYTES + 1} bytes: expected at most {MOST_BYTES}"):
        regular_file(path)
    assert regular_file(path, None) == path
    assert regular_file(tmp_path / "none") == tmp_path / "none"


@pytest.mark.parametrize("file", ["own.py", "order.csv", "order.arrow"])
def test_a_schedule_of_ones_own_is_looked_at_before_it_is_read(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    os.mkfifo(path)
    with pytest.raises(PentadError, match=f"{path} is a pipe or device"):
        generate(f"{path}:function" if path.suffix == ".py" else str(path), 2, 4)


def test_a_folder_is_looked_at_before_its_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_folders, "MOST_JSON", 99)
    sparse(tmp_path / "model.safetensors", 100)
    (tmp_path / ".#README.md").symlink_to("user@host.1")  # an editor's lock
    assert checked_folder(tmp_path) == tmp_path
    check_corpora(["builtin:pydoc", "s3://a/b", str(tmp_path), str(tmp_path / "none")])
    sparse(tmp_path / "index.json", 100)
    with pytest.raises(PentadError, match=r"index\.json has 100 bytes: expected at most 99"):
        check_corpora([str(tmp_path)])
    (tmp_path / "index.json").unlink()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PentadError, match=r"loop cannot be read \(Too many levels of .* links\): expected a file"):
        checked_folder(tmp_path)


@pytest.mark.parametrize("read", [read_lines, trim])
def test_a_line_without_an_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    monkeypatch.setattr(json_lines, "MOST_OF_LINE", 64)
    path = tmp_path / "journal.jsonl"
    path.write_text('{"event": "start"}\n' * 20)
    assert read(path)
    assert len(read_lines(path)) == 20
    sparse(path, 1 << 20)
    with pytest.raises(PentadError, match=r"journal.jsonl.* has 64 bytes or more: expected less"):
        read(path)
    assert path.stat().st_size == 1 << 20


def test_an_include_that_is_a_link_to_itself_costs_a_sentence(pentad: Pentad, tmp_path: Path) -> None:
    Path("config.yaml").write_text("include: base.yaml")
    Path("base.yaml").symlink_to("base.yaml")
    status, _, err = pentad("plan", "config.yaml")
    assert status == 1 and err.count("\n") == 1
    assert "base.yaml" in err and "Too many levels of symbolic links" in err


def test_an_error_of_a_file_names_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*given: object, **more: object) -> None:
        raise IsADirectoryError(21, "Is a directory", "some/file")

    monkeypatch.setattr(cli, "app", fails)
    assert cli.main([]) == 1
    expected = "'some/file' cannot be read or written (Is a directory): expected one that can"
    assert capsys.readouterr().err == f"pentad: {expected}\n"
