"""Figures of GPUs from their data sheets, by CUDA's names."""

from __future__ import annotations

from typing import NamedTuple

GB, GIB, TFLOPS = 10**9, 2**30, 1e12


class Gpu(NamedTuple):
    """`memory` are the bytes that CUDA offers, `bf16` and `fp8` the FLOP/s of dense products with float32 sums (fp8 0:
    the GPU has none). `bandwidth` is that of its memory, `link` that to another GPU of its host, and `host_link` that
    to the host, each in one direction, in bytes/s."""

    memory: int
    bf16: float
    fp8: float
    bandwidth: float
    link: float
    host_link: float
    source: str


def _gpu(gib: int, bf16: float, fp8: float, bandwidth: float, link: float, host_link: float, source: str) -> Gpu:
    """From GiB, TFLOP/s and GB/s."""
    return Gpu(gib * GIB, bf16 * TFLOPS, fp8 * TFLOPS, bandwidth * GB, link * GB, host_link * GB, source)


PCIE4, PCIE5 = 32, 64  # GB/s of 16 lanes in one direction
GPUS = {
    "NVIDIA B200": _gpu(178, 2250, 4500, 8000, 900, PCIE5, "HGX B200 data sheet"),
    "NVIDIA H200": _gpu(139, 989, 1979, 4800, 450, PCIE5, "H200 data sheet"),
    "NVIDIA H200 NVL": _gpu(139, 835, 1671, 4800, 450, PCIE5, "H200 data sheet"),
    "NVIDIA H100 80GB HBM3": _gpu(79, 989, 1979, 3350, 450, PCIE5, "H100 data sheet"),
    "NVIDIA H100 NVL": _gpu(93, 835, 1671, 3900, 300, PCIE5, "H100 data sheet"),
    "NVIDIA H100 PCIe": _gpu(79, 756, 1513, 2000, 300, PCIE5, "H100 data sheet"),
    "NVIDIA H800": _gpu(79, 989, 1979, 3350, 200, PCIE5, "H100 data sheet, NVLink of 400 GB/s"),
    "NVIDIA A100-SXM4-80GB": _gpu(79, 312, 0, 2039, 300, PCIE4, "A100 data sheet"),
    "NVIDIA A100-SXM4-40GB": _gpu(39, 312, 0, 1555, 300, PCIE4, "A100 data sheet"),
    "NVIDIA A100 80GB PCIe": _gpu(79, 312, 0, 1935, PCIE4, PCIE4, "A100 data sheet, without NVLink bridges"),
    "NVIDIA A800-SXM4-80GB": _gpu(79, 312, 0, 2039, 200, PCIE4, "A100 data sheet, NVLink of 400 GB/s"),
    "NVIDIA L40S": _gpu(44, 362, 733, 864, PCIE4, PCIE4, "L40S data sheet"),
    "NVIDIA RTX 6000 Ada Generation": _gpu(47, 364, 728, 960, PCIE4, PCIE4, "RTX 6000 Ada data sheet"),
    "NVIDIA L4": _gpu(22, 121, 242, 300, PCIE4, PCIE4, "L4 data sheet"),
    "NVIDIA GeForce RTX 5090": _gpu(31, 209, 419, 1792, PCIE5, PCIE5, "RTX Blackwell GPU architecture white paper"),
    "NVIDIA GeForce RTX 4090": _gpu(23, 165, 330, 1008, PCIE4, PCIE4, "Ada GPU architecture white paper"),
}
ASSUMED_GPU = "NVIDIA H200"  # on a machine without GPUs, unless configured
