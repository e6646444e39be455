"""Progress of a data build: one changing line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys

import pytest

from pentad.orchestrator.cli.commands.data import _ProgressLine, progress_text
from pentad.workers.preprocess.build import BuildProgress


def at(seconds: float, done: int = 0, phase: str = "encoding") -> BuildProgress:
    return BuildProgress(phase, done, 100, int(2e6 * seconds), seconds)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (at(10.0), "encoding: 20 MB of text, 2.0 MB/s"),
        (at(10.0, 25), "encoding: 20 MB of text, 2.0 MB/s, 25%, 30 s left"),
        (at(100.0, 25), "encoding: 200 MB of text, 2.0 MB/s, 25%, 5 min 0 s left"),
        (at(3000.0, 25), "encoding: 6,000 MB of text, 2.0 MB/s, 25%, 2 h 30 min left"),
        (at(10.0, 100), "encoding: 20 MB of text, 2.0 MB/s"),
        (at(0.0), "encoding: 0 MB of text, 0.0 MB/s"),
    ],
)
def test_what_is_left_is_known_once_a_part_is_done(progress: BuildProgress, text: str) -> None:
    assert progress_text(progress) == text


def test_where_a_line_cannot_be_rewritten_there_is_one_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with _ProgressLine() as line:
        line.note("12 files")
        for each in (at(1.0), at(11.0), at(12.0), at(20.9), at(22.0), at(0.5, phase="writing"), at(1.0)):
            line.show(each)
    printed = capsys.readouterr().err.splitlines()
    seconds = [text.partition(" MB of")[0].rpartition(" ")[2] for text in printed[1:]]
    assert printed[0] == "12 files" and seconds == ["22", "44", "1"]
    assert printed[-1].startswith("writing: "), "another phase is said at once"


def test_on_a_terminal_the_line_is_rewritten(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with _ProgressLine() as line:
        line.show(at(1.0))
        line.show(at(2.0, 50))
    shown = capsys.readouterr().err
    assert "2 MB of text" in shown or "4 MB of text, 2.0 MB/s, 50%" in shown
    assert shown.count("\n") <= 2 and "\x1b[" in shown, "written over, and cleared in the end"
