"""What a run imports before starting Ray, what its ranks import, and what the user sees meanwhile."""

from __future__ import annotations

import io
import subprocess
import sys
import time

import pytest
from rich.console import Console

from pentad.orchestrator.run.startup import Startup


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("pentad.orchestrator.cli.cli", {"torch", "ray", "pydantic"}),
        ("pentad.orchestrator.run.driver", {"torch", "ray"}),
        ("pentad.orchestrator.run.training", {"torch", "aiohttp"}),
        # These take a second of CPU time on every rank.
        ("pentad.workers.runtime.runner", {"torch._dynamo", "torch._inductor", "ray", "pydantic"}),
    ],
)
def test_slow_modules_are_not_imported_at_start_up(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*{forbidden!r}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_log_has_a_line_with_the_elapsed_time_of_each_phase() -> None:
    out = io.StringIO()
    with Startup(Console(file=out), time.monotonic() - 2.5) as startup:
        startup.phase("starting Ray")
        startup.phase("placing 4 ranks")
    assert out.getvalue() == "   2.5 s  starting Ray\n   2.5 s  placing 4 ranks\n"


def test_a_terminal_shows_one_line_that_is_erased() -> None:
    out = io.StringIO()
    with Startup(Console(file=out, force_terminal=True, width=60)) as startup:
        startup.phase("starting Ray")
        time.sleep(0.2)
        assert "starting Ray" in out.getvalue() and "\n" not in out.getvalue().strip()
        startup.phase("placing 4 ranks")
        time.sleep(0.2)
        assert "placing 4 ranks" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")
