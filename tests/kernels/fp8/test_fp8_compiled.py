"""The casts compile for the GPUs they are for, on a machine without one."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from paths import ROOT


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_casts_compile_and_read_matrices_in_vectors() -> None:
    """Triton may read what it transposes one number at a time; only the weight of a norm is read so, by column."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(ROOT / "tests/support/compile_fp8_kernels.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for name, reads in json.loads(done.stdout).items():
        vectors = sum(count for kind, count in reads.items() if kind in ("v2.b32", "v4.b32"))
        assert vectors >= 4, (name, reads)
        assert reads.get("b16", 0) <= name.startswith("normed again"), (name, reads)
