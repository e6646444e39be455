"""Damaged input of every kind costs one sentence, or nothing: the first cases that `fuzz.py` plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzz import READERS, play
from fuzz_guard import Broken, Guard

from pentad.schedules.ir.errors import ScheduleError

FEW, SOME = 2, 300
SLOW_TO_START = {"torch checkpoints", "run folders", "run statuses", "planned configurations"}
QUICK = [name for name in READERS if name not in SLOW_TO_START]


@pytest.mark.parametrize("name", QUICK)
def test_damaged_input_costs_a_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    play(name, range(FEW), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", READERS)
def test_more_damaged_input_costs_a_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    guard = play(name, range(SOME), tmp_path)
    assert guard.accepted + guard.refused == SOME


@pytest.mark.parametrize("name", QUICK)
def test_intact_input_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else damage would be tested in vain."""
    monkeypatch.chdir(tmp_path)
    with READERS[name][0](tmp_path) as reader:
        for content in reader.intact:
            reader.read(content)


def test_the_guard_finds_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard, files = Guard(tmp_path), list[Any]()
    monkeypatch.setattr("fuzz_guard.MOST_BYTES", 40 << 20)
    monkeypatch.setattr("fuzz_guard.SETTLE_SECONDS", 0.1)

    def fails(content: bytes) -> None:
        raise ScheduleError("x" * 5000)

    broken = {
        "leaves": lambda content: (tmp_path / "left").write_bytes(content),
        "descriptors": lambda content: files.extend((tmp_path / "left").open() for _ in range(50)),
        "a sentence of 5000": fails,
        r"it takes \d+ MiB": lambda content: len(b"x" * (60 << 20)),
    }
    for words, read in broken.items():  # more than earlier tests may still close
        with pytest.raises(Broken, match=words):
            guard.check(read, b"content")
    monkeypatch.setattr("fuzz_guard.MOST_SECONDS", 0.05)
    with pytest.raises(Broken, match=r"it takes .* s: expected"):
        guard.check(lambda content: sum(range(10**7)), b"content")
    for file in files:
        file.close()
