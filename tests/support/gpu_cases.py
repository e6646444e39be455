"""What test_training.py shares with other tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpus import room

from pentad.schedules.compiler import compile_program
from pentad.schedules.passes.validation import is_validated


def on_gpu(plan, transport: str, dtype: str):
    if plan.mesh.size > room():
        pytest.skip(f"{plan.mesh.size} GPUs are needed")
    program = compile_program(
        plan.program.name,
        plan.mesh.pp,
        plan.batch.microbatches,
        gated=transport == "nccl",
        replicas=plan.mesh.dp,
        validated=is_validated(plan.program),
    )
    return replace(plan, device="cuda", transport=transport, dtype=dtype, program=program)
