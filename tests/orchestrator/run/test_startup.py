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


DEFERRED = """
import sys
from pentad.workers.torch_import import defer_meta_kernels, load_meta_kernels

defer_meta_kernels()
import torch
import pentad.workers.runtime.runner

assert "torch._decomp" not in sys.modules
x, attend = torch.ones(1, 2, 3, 4, device="meta"), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
try:
    attend(x, x, x)
except NotImplementedError:
    print("deferred")
load_meta_kernels()
print(*attend(x, x, x)[0].shape)
"""


def test_ranks_leave_meta_kernels_to_models_that_may_need_them() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", DEFERRED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["deferred", "1", "2", "3", "4"]
