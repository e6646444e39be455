"""What devices and links attain, from data sheets and from rates assumed until a run has measured its own; and the GPUs
of this machine, found without torch, Ray or NVML."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from pentad.orchestrator.config.errors import nearest
from pentad.orchestrator.config.sections import ClusterSection
from pentad.orchestrator.gpus.measured import MEASURED, measured_gpu
from pentad.orchestrator.gpus.rate_table import CPU, place_of, read_rates, read_table
from pentad.orchestrator.gpus.table import ASSUMED_GPU, GB, GPUS, Gpu
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import expanded
from pentad.schedules.simulate.rates import HOST_ORDER, AttentionRates, ExpertRates, KernelTimes, Link, Links, Rates
from pentad.schedules.spec.mesh import Axis, Mesh
from pentad.schedules.spec.model import Experts, Scaling

NODE_GPUS = 8  # of a host, with fast links between them


# The shares of a GPU's data-sheet figures that training attains, measured on H200s with NVLink. FLOP/s are under the
# power limit: products of 8192^3 start at 780 TFLOP/s and 1,980 MHz and fall to 660 and 1,455 within seconds
# (jitter-2xh200.json).
ATTAINED_FLOPS, ATTAINED_BANDWIDTH, ATTAINED_LINK, ATTAINED_HOST_LINK = 660 / 989, 3 / 4.8, 330 / 450, 50 / 64
INTER_HOST = 40 * GB  # 400 Gbit/s a GPU
# Seconds that the host needs to issue an exchange inside a layer, by NCCL and by peer copies: fitted
# (docs/performance.md).
ISSUE, PEER_ISSUE = 200e-6, 250e-6
LAYER_ISSUE = (3.8e-4, 8e-4, 0.9e-4)  # to issue F, B and W of a layer (tests/bench/results/llama-1b-4xh200.json)
TP_HIDDEN = 0.5  # share of tp's bytes on a host that overlap, fitted to runs with 2 and 4 ranks (docs/performance.md)
GROUPED_EFFICIENCY = 0.5  # FLOP/s of the grouped products of experts, relative to other products


def _uniform(
    flops: float, memory: float, links: tuple[Links, Links], host_memory: Link, launch: float, issue: float, source: str
) -> Rates:
    """Rates that depend neither on the size of a product nor on the kind of operation on a link. `links` are those
    inside a host and between hosts."""
    constant = ((1.0, flops),)
    return Rates(
        products=constant,
        products_8bit=(),
        experts=(ExpertRates.uniform(*(GROUPED_EFFICIENCY * flops,) * 3),),
        attention=(AttentionRates(128, constant, constant),),
        memory=memory,
        elementwise=memory,
        update=memory,
        intra_host=links[0],
        inter_host=links[1],
        peer=links[0],
        host_memory=host_memory,
        launch=launch,
        issue=issue,
        source=source,
    )


# A CPU core; transfers go through memory.
CPU_RATES = _uniform(
    20e9, 10 * GB, 2 * (Links.uniform(100e-6, GB),), Link(100e-6, 5 * GB), 50e-6, 0.0, "assumed for a CPU core"
)


@cache
def rates_of(device: str, gpu: str = "") -> Rates:
    """The rates assumed for a rank on a 'cpu', or with 'cuda' on a GPU of this name ('': the assumed one)."""
    if device == "cpu":
        return CPU_RATES
    name = gpu or ASSUMED_GPU
    found = figures_of(name)
    is_measured = found.source == MEASURED
    narrow = ((1.0, found.fp8),) if is_measured and found.fp8 else ()
    share = [1.0] * 4 if is_measured else [ATTAINED_FLOPS, ATTAINED_BANDWIDTH, ATTAINED_LINK, ATTAINED_HOST_LINK]
    rates = _uniform(
        share[0] * found.bf16,
        share[1] * found.bandwidth,
        (Links.uniform(30e-6, share[2] * found.link), Links.uniform(60e-6, INTER_HOST)),
        Link(30e-6, share[3] * found.host_link),
        15e-6,
        ISSUE,
        f"assumed for an {name} ({found.source})",
    )
    return replace(rates, products_8bit=narrow, tp_hidden=TP_HIDDEN, peer_issue=PEER_ISSUE, layer_issue=LAYER_ISSUE)


def rates_for(section: ClusterSection, device: str) -> Rates:
    """The rates that plans for 'cpu' or 'cuda' devices are made with (cluster.rates). Raises PentadError for a table
    that cannot be read."""
    rates = _rates_for(section, device)
    return launched(rates) if section.cuda_graphs else rates


def launched(rates: Rates) -> Rates:
    """Rates with CUDA graphs: the host issues nothing that is in a graph."""
    return replace(rates, issue=0.0, peer_issue=0.0, layer_issue=(0.0, 0.0, 0.0))


def _rates_for(section: ClusterSection, device: str) -> Rates:
    gpu = CPU if device == "cpu" else gpu_of(section)
    place = _table_place(section, gpu)
    return rates_of(device, gpu) if place is None else read_rates(place[0], gpu, place[1])


def kernel_times(section: ClusterSection) -> tuple[KernelTimes, ...]:
    """How long kernel implementations take on the GPU of plans, from the table that their rates come from; () without
    one."""
    gpu = gpu_of(section)
    place = _table_place(section, gpu)
    return () if place is None else read_table(place[0], gpu, place[1]).kernels


def _table_place(section: ClusterSection, gpu: str) -> tuple[Path, str] | None:
    """The file of a device's table and the setting that selected it; None if the rates of its data sheet apply."""
    if section.rates not in ("auto", "builtin"):
        return expanded(section.rates), "cluster.rates"
    path = place_of(gpu)
    return None if section.rates == "builtin" or not path.exists() else (path, "cluster.rates is auto, which")


# Speedup of products in FP8 on a Hopper GPU, by granularity of scales (tests/bench/results/fp8-h200.json).
FP8_SPEEDUPS: dict[Scaling, float] = {"tensor": 1.8, "row": 1.75, "block": 1.5}
# FLOP/s of experts on an H200 in F, B and W: in the compute dtype, and in FP8
# (tests/bench/results/fp8-experts-h200.json).
EXPERT_FLOPS = ((6.4e14, 6.3e14, 4.5e14), (5.9e14, 6.4e14, 4.1e14))


def expert_rows(experts: Experts, tokens: int, mesh: Mesh) -> float:
    """Mean rows of an expert in a product, with this many `tokens` of a microbatch on each rank of an ep group."""
    return tokens * mesh.ep * experts.top_k / experts.num_experts


def expert_flops(rates: Rates, rows: float, *, in_8_bits: bool) -> tuple[float, ...]:
    """FLOP/s of F, B and W of experts with so many rows each. If FP8 was not measured, it speeds up as on an H200."""
    if in_8_bits and len(rates.experts) > 1:
        return rates.experts[1].at(rows)
    known = rates.experts[0].at(rows)
    return tuple(flops * b / a for flops, a, b in zip(known, *EXPERT_FLOPS, strict=True)) if in_8_bits else known


def ranks_on_host(mesh: Mesh, axes: Collection[Axis], order: Sequence[str] = HOST_ORDER) -> int:
    """How many of the ranks along these axes share a host of NODE_GPUS, which ranks fill in this order of axes."""
    room, found = NODE_GPUS, 1
    for axis in reversed(order):
        inside = max(1, min(room, getattr(mesh, axis)))
        room //= inside
        found *= inside if axis in axes else 1
    return found


def is_on_host(mesh: Mesh, axes: Collection[Axis], order: Sequence[str] = HOST_ORDER) -> bool:
    """Whether all ranks along these axes share a host of NODE_GPUS."""
    return ranks_on_host(mesh, axes, order) == math.prod(getattr(mesh, axis) for axis in axes)


@lru_cache(maxsize=4096)
def links_of(rates: Rates, mesh: Mesh, axes: tuple[Axis, ...], *, in_layers: bool = False, group: int = 0) -> Links:
    """The slowest links along the axes, or within each `group` of consecutive ranks along them, for exchanges between
    or inside layers. On one host, transfers and ZeRO's collectives take the rates of peer copies, but exchanges inside
    layers those of NCCL: their copies also wait for slots, and peer rates predicted runs with tp4 and ep4 worse."""
    held, ranks = ranks_on_host(mesh, axes, rates.host_order), math.prod(getattr(mesh, axis) for axis in axes)
    if group:
        held, ranks = math.gcd(held, group), group
    if held < ranks:
        return rates.inter_host.shared(held, rates.intra_host)
    return rates.intra_host if in_layers else rates.peer


def require_tp_on_node(mesh: Mesh, *, across: bool) -> None:
    """Raises PentadError for more tp ranks than a host has GPUs, unless they may span hosts (`across`)."""
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


def local_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


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
    """The driver's name for this machine's first GPU; '' if there is none."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key == "Model":
                return value.strip()
    return ""


def figures_of(name: str) -> Gpu:
    """The figures of a GPU, from the table; if the table lacks it and it is this machine's, by measurement. Raises
    PentadError for others."""
    if name in GPUS:
        return GPUS[name]
    if name == gpu_name():
        return measured_gpu(name)
    by_words = {each.lower().replace(" ", "_"): each for each in GPUS}
    near = nearest(name.replace(" ", "_"), by_words)
    hint = f" (did you mean {by_words[near]}?)" if near else ""
    raise PentadError(f"cluster.gpu is '{name}'{hint}: expected one of {', '.join(GPUS)}, or null")


def gpu_of(section: ClusterSection) -> str:
    """The GPU that plans are for: the configured one, else this machine's, else the assumed one."""
    return section.gpu or gpu_name() or ASSUMED_GPU
