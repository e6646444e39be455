"""Submitted runs without interruptions."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from shared_cluster import shared_cluster
from submitted_runs import SMALL

from pentad.orchestrator.cli.cli import main


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def short(runs: Path, corpus: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of submitting the job 'short', a run of 20 steps."""
    return submit("short", f"data.path={corpus}", f"run.folder={runs}", "run.steps=20")


@pytest.fixture(scope="session")
def uninterrupted(runs: Path, corpus: str) -> None:
    """Runs the job 'whole', with which others are compared."""
    status, out, err = submit("whole", f"data.path={corpus}", f"run.folder={runs}")
    assert status == 0, out + err


def submit(name: str, *overrides: str) -> tuple[int, str, str]:
    at = ("--name", name, "--address", str(shared_cluster().dashboard))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")  # --address takes precedence
        status = main(["submit", *SMALL, *overrides, f"run.name={name}", *at])
    return status, out.getvalue(), err.getvalue()
