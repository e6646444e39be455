"""What a check finds, and what it may ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.workers.health.gpu_facts import GpuFacts

Verdict = Literal["ok", "warning", "failure", "not applicable"]
NO_FIGURES: Mapping[str, Any] = MappingProxyType({})
START_SECONDS = 120.0  # for a probe to import torch and to open all GPUs


class Finding(NamedTuple):
    """A sentence, without its full stop; what to do about a warning or failure; and measured `figures` for `--json`
    and for comparisons between nodes."""

    verdict: Verdict
    text: str
    remedy: str = ""
    figures: Mapping[str, Any] = NO_FIGURES


class Subject(NamedTuple):
    """What is examined: the machine of this process, for a configuration. `burn` are the seconds to burn on, 0: not at
    all; `gpus` all GPUs of the machine."""

    config: RunConfig
    gpus: tuple[GpuFacts, ...]
    burn: float


class Check(NamedTuple):
    name: str
    examine: Callable[[Subject], Finding]
    seconds: Callable[[Subject], float] = lambda _: 0.0  # that it takes, if it is long


class Row(NamedTuple):
    """A check's finding; `node` is the address of a cluster's node, '' for this machine or the cluster."""

    check: str
    finding: Finding
    node: str = ""


# Surrounds a check, by its name and the seconds that it takes.
UnderWay = Callable[[str, float], AbstractContextManager[None]]


class ProbeError(Exception):
    """Why a probe did not measure."""


NO_GPU = Finding("not applicable", "no GPU")


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    order: tuple[Verdict, ...] = ("failure", "warning", "ok")
    return next((each for each in order if each in verdicts), "not applicable")


def probe(module: str, *arguments: str, seconds: float = 0.0) -> Any:
    """What a module of workers/health prints, in a process of its own: a sick GPU can hang whoever touches it, and
    what is in its memory goes with the process. It may take `seconds` after its start. Raises ProbeError."""
    command = [sys.executable, "-P", "-m", f"pentad.workers.health.{module}", *arguments]
    limit = START_SECONDS + seconds
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=True)
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {limit:.0f} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or "").strip().splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line.partition(":")[0]]
        raise ProbeError((named or lines or [f"exit status {error.returncode}"])[-1].strip()) from None
    except (OSError, ValueError) as error:
        raise ProbeError(str(error)) from None


def listed(names: Sequence[object]) -> str:
    """'a, b and c'"""
    texts = list(map(str, names))
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def gpus_named(indices: Sequence[int]) -> str:
    """'GPU 3', 'GPUs 0, 2 and 3'"""
    return f"GPU{'s' * (len(indices) > 1)} {listed(indices)}"
