"""What devices and links attain, by data sheets and by rates assumed until a run has measured its own; and the GPUs of
this machine, found without torch, Ray or NVML."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pentad.orchestrator.config.errors import nearest
from pentad.orchestrator.config.sections import ClusterSection
from pentad.orchestrator.gpus.measured import MEASURED, measured_gpu
from pentad.orchestrator.gpus.table import ASSUMED_GPU, GB, GPUS, Gpu
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Axis, Mesh
from pentad.schedules.spec.model import Scaling

NODE_GPUS = 8  # of a host, with fast links among them
# Axes in the order in which ranks fill hosts, outermost first: replicas communicate once a step only.
HOST_ORDER: tuple[Axis, ...] = ("dp", "pp", "ep", "cp", "tp")


@dataclass(frozen=True)
class Rates:
    """What a rank attains: FLOP/s of products, bytes/s of its memory, to ranks on its host, to other hosts and to host
    memory; seconds before an operation on either link, to launch an instruction, and of the host to start an operation
    inside a layer with the kernels around it.

    Also FLOP/s of attention (0: as of products), seconds of the host to start a layer's F, B or RECOMPUTE where it does
    no such operation, the share of tp's bytes that products hide, and the order in which ranks fill hosts.
    """

    flops: float
    memory: float
    intra_host: float
    inter_host: float
    host_memory: float
    intra_host_latency: float
    inter_host_latency: float
    launch: float
    issue: float
    attention: float = 0.0
    layer_issue: float = 0.0
    tp_hidden: float = 0.0
    host_order: tuple[Axis, ...] = HOST_ORDER


# Of the figures of a GPU what training attains: measured on H200s with NVLink.
ATTAINED_FLOPS, ATTAINED_BANDWIDTH, ATTAINED_LINK, ATTAINED_HOST_LINK = 660 / 989, 3 / 4.8, 330 / 450, 50 / 64
INTER_HOST = 40 * GB  # 400 Gbit/s a GPU
# A CPU core with transfers through memory.
CPU_RATES = Rates(
    flops=20e9,
    memory=10 * GB,
    intra_host=GB,
    inter_host=GB,
    host_memory=5 * GB,
    intra_host_latency=100e-6,
    inter_host_latency=100e-6,
    launch=50e-6,
    issue=0.0,
)


@cache
def rates_of(device: str, gpu: str = "") -> Rates:
    """What a rank on a 'cpu' attains, or with 'cuda' on a GPU of this name ('': the assumed one)."""
    if device == "cpu":
        return CPU_RATES
    found = figures_of(gpu or ASSUMED_GPU)
    is_measured = found.source == MEASURED
    share = [1.0] * 4 if is_measured else [ATTAINED_FLOPS, ATTAINED_BANDWIDTH, ATTAINED_LINK, ATTAINED_HOST_LINK]
    return Rates(
        flops=share[0] * found.bf16,
        memory=share[1] * found.bandwidth,
        intra_host=share[2] * found.link,
        inter_host=INTER_HOST,
        host_memory=share[3] * found.host_link,
        intra_host_latency=30e-6,
        inter_host_latency=60e-6,
        launch=15e-6,
        issue=230e-6,
    )


# How many times faster products in 8 bits are on a Hopper GPU, by what has a scale (tests/bench/results/fp8-h200.json).
FP8_SPEEDUPS: dict[Scaling, float] = {"tensor": 1.8, "row": 1.75, "block": 1.5}
# FLOP/s of the experts' products in F, B and W on a Hopper GPU (tests/bench/results/fp8-experts-h200.json).
EXPERT_FLOPS = {"compute": (6.0e14, 6.0e14, 3.9e14), "block": (5.9e14, 6.4e14, 1.6e14)}
PASSED_ON = ("all_gather", "reduce_scatter", "all_reduce")  # collectives whose bytes pass from rank to rank


def ranks_on_host(mesh: Mesh, axes: Sequence[Axis], order: Sequence[Axis] = HOST_ORDER) -> int:
    """How many of the ranks along these axes share a host of NODE_GPUS."""
    room, found = NODE_GPUS, 1
    for axis in reversed(order):
        inside = max(1, min(room, getattr(mesh, axis)))
        room //= inside
        found *= inside if axis in axes else 1
    return found


def spans_hosts(mesh: Mesh, axis: Axis, order: Sequence[Axis] = HOST_ORDER) -> bool:
    """Whether the ranks along an axis are on several hosts."""
    return ranks_on_host(mesh, (axis,), order) < getattr(mesh, axis)


def link_of(rates: Rates, mesh: Mesh, axes: Sequence[Axis], kind: str = "send") -> tuple[float, float]:
    """(seconds before an operation, bytes/s of each rank) along these axes. Between hosts, collectives that pass
    through all ranks of a host use the links of all of them; sends and exchanges each rank its own."""
    held = ranks_on_host(mesh, axes, rates.host_order)
    if held >= math.prod(getattr(mesh, axis) for axis in axes):
        return rates.intra_host_latency, rates.intra_host
    shared = held if kind in PASSED_ON else 1
    return rates.inter_host_latency, min(rates.intra_host, shared * rates.inter_host)


def require_tp_on_node(mesh: Mesh, *, across: bool) -> None:
    """Raises PentadError for more tp ranks than a host has GPUs, unless they may be on several (`across`)."""
    if mesh.tp > NODE_GPUS and not across:
        expected = f"at most {NODE_GPUS}, the GPUs of a node, or mesh.tp_across_nodes = true"
        raise PentadError(f"mesh.tp is {mesh.tp}: expected {expected}")


def local_gpus() -> int:
    """Number of GPUs that CUDA_VISIBLE_DEVICES leaves a process on this machine."""
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return min(found, len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]))


def local_device(section: ClusterSection, ranks: int) -> tuple[str, str]:
    """The device of a local run's ranks, 'cpu' or 'cuda', and a note for the user. With fewer GPUs than ranks, 'auto'
    is 'cpu', and the note says so."""
    if section.device != "auto":
        return section.device, ""
    gpus = local_gpus()
    if 0 < gpus < ranks:
        return "cpu", f"{ranks} ranks need a GPU each, but this machine has {gpus}: training on CPUs"
    return ("cuda" if gpus else "cpu"), ""


def gpu_name() -> str:
    """The driver's name of this machine's first GPU, '' without one."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key == "Model":
                return value.strip()
    return ""


def figures_of(name: str) -> Gpu:
    """Of a GPU by the table; of this machine's by measurement if the table lacks it. Raises PentadError for others."""
    if name in GPUS:
        return GPUS[name]
    if name == gpu_name():
        return measured_gpu(name)
    by_words = {each.lower().replace(" ", "_"): each for each in GPUS}
    near = nearest(name.replace(" ", "_"), by_words)
    hint = f" (did you mean {by_words[near]}?)" if near else ""
    raise PentadError(f"cluster.gpu is '{name}'{hint}: expected one of {', '.join(GPUS)}, or null")


def gpu_of(section: ClusterSection) -> str:
    """The GPU that plans are for: that of the configuration, else this machine's, else the assumed one."""
    return section.gpu or gpu_name() or ASSUMED_GPU
