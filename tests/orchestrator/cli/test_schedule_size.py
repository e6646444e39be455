"""`pentad schedule` is quick for large programs and does not print grids too wide to read."""

from __future__ import annotations

import io
import time

import pytest
from commands import Pentad
from rich.console import Console

from pentad.orchestrator.cli.arguments import ScheduleArguments
from pentad.orchestrator.cli.show_schedule import MOST_CELLS, show_schedule


@pytest.mark.quiet
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "chunks"), [("zb-v", None), ("interleaved", 2), ("dualpipe", None)])
def test_64_ranks_and_256_microbatches_take_little_longer_than_compiling(name: str, chunks: int | None) -> None:
    """CPU seconds of verification, simulation and text; usually a third of the bound."""
    seconds = []
    for _ in range(2):
        out = io.StringIO()
        started = time.process_time()
        show_schedule(ScheduleArguments(name, 64, 256, chunks), Console(file=out))
        seconds.append(time.process_time() - started)
        assert out.getvalue().count("bubble") == 2
    assert min(seconds) < 1.2


def test_a_wide_grid_is_printed_only_with_an_option(pentad: Pentad) -> None:
    sizes = ("--ranks", "4", "--microbatches", "80")
    status, out, _ = pentad("schedule", "1f1b", *sizes)
    assert status == 0
    assert out.startswith("schedule    1f1b, 4 ranks, 80 microbatches, proven")
    assert "grid        249 cells wide: print it with --grid" in out
    with_grid = pentad("schedule", "1f1b", *sizes, "--grid")[1]
    assert with_grid.startswith(" F0  F1  F2") and "cells wide" not in with_grid
    assert len(with_grid.splitlines()[0].split()) == 249 > MOST_CELLS


def test_a_narrow_grid_is_printed_unless_a_file_is_written(pentad: Pentad) -> None:
    sizes = ("--ranks", "4", "--microbatches", "60")
    assert pentad("schedule", "1f1b", *sizes)[1].startswith(" F0  F1  F2")
    assert pentad("schedule", "1f1b", *sizes, "--csv", "a.csv")[1].startswith("schedule ")
