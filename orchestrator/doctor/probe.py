"""Runs the measurements of workers/health, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

START_SECONDS = 120.0  # for a probe to import torch and open all GPUs


class ProbeError(Exception):
    """A probe failed; the message says why."""


def probe(module: str, *arguments: object, seconds: float = 0.0) -> Any:
    """Runs a module of workers/health and returns the JSON that it prints. It has a process of its own because a sick
    GPU can hang any process that touches it, and so that its GPU memory is freed. It may take `seconds` after its
    start. Raises ProbeError."""
    command = [sys.executable, "-P", "-m", f"pentad.workers.health.{module}", *map(str, arguments)]
    limit = START_SECONDS + seconds
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=True)
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {limit:.0f} s") from None
    except subprocess.CalledProcessError as error:
        raise ProbeError(last_error(error.stderr or "", error.returncode)) from None
    except (OSError, ValueError) as error:
        raise ProbeError(str(error)) from None


def last_error(printed: str, status: int) -> str:
    """The last error that a process printed on stderr, else its last line, else its exit status."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.partition(":")[0]]
    return (named or lines or [f"exit status {status}"])[-1]
