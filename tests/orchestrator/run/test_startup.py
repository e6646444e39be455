"""What a run imports before starting Ray, and what its ranks import."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("pentad.orchestrator.cli.cli", {"torch", "ray", "pydantic"}),
        ("pentad.orchestrator.run.train", {"torch", "ray"}),
        ("pentad.orchestrator.run.driver", {"torch", "aiohttp"}),
        # These take a second of CPU time on every rank.
        ("pentad.workers.runtime.runner", {"torch._dynamo", "torch._inductor", "ray", "pydantic"}),
    ],
)
def test_slow_modules_are_not_imported_at_start_up(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*{forbidden!r}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
