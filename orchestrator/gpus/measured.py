"""Figures of a GPU that the table lacks: measured in a separate process, in about ten seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

from pentad.orchestrator.gpus.table import PCIE4, Gpu
from pentad.schedules.ir.errors import PentadError

MEASURED = "measured"  # the source of its figures
TIMEOUT = 120.0
PROBE = "pentad.kernels.gpu_figures"


@cache
def measured_gpu(name: str) -> Gpu:
    """Measures this machine's first GPU, called `name`. Raises PentadError if it cannot be measured."""
    command = [sys.executable, "-P", "-m", PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
        return gpu_of(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
        text = f"GPU {name} is unknown and could not be measured ({''.join(reason)})"
        raise PentadError(f"{text}: expected cluster.gpu, the name of a GPU like it") from None


def gpu_of(found: dict[str, float]) -> Gpu:
    """The attained figures; links between GPUs are assumed to be PCIe, like the link to the host."""
    link = found["host_link"] or PCIE4
    return Gpu(int(found["memory"]), found["bf16"], found["fp8"], found["bandwidth"], link, link, MEASURED)
