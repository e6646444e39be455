"""What devices and the links between them can do, from makers' data sheets; and what is guessed that ranks attain."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Axis, Mesh

NODE = 8  # GPUs of a host with fast links among them
GB = 10**9


@dataclass(frozen=True)
class Device:
    """Dense bf16 FLOP/s without sparsity, and bytes that CUDA offers."""

    flops: float
    memory: int


# By what CUDA calls the device (SXM modules).
DEVICES = {
    "NVIDIA H200": Device(989e12, 139 * 2**30),
    "NVIDIA H100 80GB HBM3": Device(989e12, 79 * 2**30),
    "NVIDIA A100-SXM4-80GB": Device(312e12, 79 * 2**30),
    "NVIDIA A100-SXM4-40GB": Device(312e12, 39 * 2**30),
}
ASSUMED = "NVIDIA H200"  # where no GPU is at hand


@dataclass(frozen=True)
class Rates:
    """Guesses of what a rank attains: FLOP/s, bytes/s of memory, of links to ranks of its host, to those of others and
    to the host itself, seconds before an operation on either kind of link and before a launch, and seconds of the host
    that an operation inside a layer takes with the kernels around it."""

    flops: float
    memory: float
    link: float
    far: float
    host: float
    latency: float
    far_latency: float
    launch: float
    issue: float


# Only to start with, until a run has measured: an H200 with NVLink and 400 Gbit/s a GPU between hosts, and one CPU core
# with transfers through memory.
GUESSES = {
    "cuda": Rates(
        660e12, 3e12, 330 * GB, 40 * GB, 50 * GB, latency=30e-6, far_latency=60e-6, launch=15e-6, issue=230e-6
    ),
    "cpu": Rates(20e9, 10 * GB, GB, GB, 5 * GB, latency=100e-6, far_latency=100e-6, launch=50e-6, issue=0.0),
}
# Of ranks laid out host by host, outermost first: replicas meet once a step.
LINE: tuple[Axis, ...] = ("dp", "pp", "ep", "cp", "tp")


def crosses(mesh: Mesh, axis: Axis) -> bool:
    """Whether ranks along an axis are on several hosts of NODE GPUs."""
    inner = LINE[LINE.index(axis) :]
    return getattr(mesh, axis) > 1 and math.prod(getattr(mesh, each) for each in inner) > NODE


def link(rates: Rates, mesh: Mesh, axis: Axis) -> tuple[float, float]:
    """(seconds before an operation, bytes/s) along an axis: those of its slowest link."""
    return (rates.far_latency, rates.far) if crosses(mesh, axis) else (rates.latency, rates.link)


def refuse_wide(mesh: Mesh, *, across: bool) -> None:
    """Raises PentadError where ranks that share layers may not be `across` hosts and one of NODE GPUs has no room."""
    if mesh.tp > NODE and not across:
        expected = f"at most {NODE}, the GPUs a node is taken to have, or mesh.tp_across_nodes = true"
        raise PentadError(f"mesh.tp is {mesh.tp}: expected {expected}")
