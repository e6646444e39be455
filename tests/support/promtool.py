"""Prometheus's own checker, if installed; required in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Next to the tests' Python, or on PATH.
FOLDERS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def promtool(*arguments: str | Path, given: bytes = b"") -> None:
    """Runs `promtool ARGUMENTS` with `given` as its input; fails if it reports a problem."""
    program = shutil.which("promtool", path=FOLDERS)
    if program is None:
        assert os.environ.get("CI") != "true", "CI has no promtool: expected .ci/run to install it"
        pytest.skip("promtool is not installed (Debian has it in the package prometheus)")
    done = subprocess.run([program, *map(str, arguments)], input=given, capture_output=True, timeout=50)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    assert not done.stderr, done.stderr.decode()
