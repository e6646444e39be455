"""GPUs for the ranks of a test. A GPU has places for RANKS_A_GPU ranks: one, unless the environment says otherwise.

Ranks that share a GPU pretend to be on several hosts, so that NCCL connects them by sockets: slow, with the same
results. So tests of four ranks can run on two GPUs, or on one. There NCCL moves about 1 MB/s (measured on an H200), too
little for the largest messages of the tests within their time-outs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pentad.schedules.compiler import NO_MEMORY_OPTIONS, compile_program
from pentad.schedules.passes.post_validation import has_post_validation
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions

RANKS_A_GPU = int(os.environ.get("RANKS_A_GPU", "1"))


def num_places() -> int:
    return torch.cuda.device_count() * RANKS_A_GPU


two_gpus = pytest.mark.skipif(num_places() < 2, reason="two GPUs are needed")


def gpu_of(place: int) -> int:
    """The GPU of this rank process; 0 on a machine without GPUs."""
    os.environ.update(_host(place))
    return place % max(1, torch.cuda.device_count())


def node_of(places: Sequence[int]) -> dict[str, str]:
    """The environment of a node whose ranks have these places, all on one host."""
    gpus = [str(place % torch.cuda.device_count()) for place in places]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **(_host(places[0]) if places else {})}


def on_gpu(
    plan: Plan,
    transport: str = "peer",
    dtype: str | None = None,
    memory_options: MemoryOptions = NO_MEMORY_OPTIONS,
    chunks: int | None = None,
    hosts: tuple[int, ...] = (),
) -> Plan:
    """A plan from `plan_of` on GPUs, with its program compiled anew and the same recomputation and offloading. Ranks
    pretend to be on these hosts. Skips the test if there are too few GPUs."""
    mesh, placed = plan.mesh, replace(plan, transport=transport, hosts=hosts)
    recomputed = frozenset(stage for stage, mode in enumerate(plan.recompute) if mode != "none")
    offloaded = frozenset(stage for stage, fraction in enumerate(plan.offload) if fraction)
    given: dict[str, Any] = {
        "units": plan.program.units,
        "sizes": plan.program.sizes,
        "recompute": recomputed,
        "offload": offloaded,
    }
    if mesh.size > num_places():
        pytest.skip(f"{mesh.size} GPUs are needed")
    program = compile_program(
        plan.program.name,
        mesh.pp,
        plan.batch.microbatches,
        gated=placed.transport_along("pp") == "nccl",
        replicas=mesh.dp * mesh.cp * mesh.ep,
        post_validation=has_post_validation(plan.program),
        options=ScheduleOptions(chunks),
        memory_options=memory_options._replace(**given),
    )
    return replace(placed, device="cuda", dtype=dtype or plan.dtype, program=program)


def as_is_on_gpu(plan: Plan, transport: str, dtype: str = "bfloat16") -> Plan:
    """A plan on GPUs with its program unchanged. Skips the test if there are too few."""
    if plan.mesh.size > num_places():
        pytest.skip(f"{plan.mesh.size} GPUs are needed")
    return replace(plan, device="cuda", transport=transport, dtype=dtype)


def _host(place: int) -> dict[str, str]:
    return {"NCCL_HOSTID": f"host-{place // max(1, torch.cuda.device_count())}"} if RANKS_A_GPU > 1 else {}
