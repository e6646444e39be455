"""Copies between the GPUs of this machine: which can reach each other's memory, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pentad.orchestrator.doctor.finding import NO_GPU, Finding, ProbeError, Subject, listed, probe
from pentad.orchestrator.planning.formatting import format_duration
from pentad.orchestrator.planning.hardware import local_gpus
from pentad.workers.health.links import Link

PAIR_SECONDS = 0.5  # for both directions of a pair, at most; a slow one takes longer than that
SLOW, BROKEN = 0.85, 0.5  # shares of the median bandwidth
_REMEDY = "look at `nvidia-smi nvlink -s`, `nvidia-smi topo -m` and for XID 74 in `dmesg`"


def seconds_of_links(subject: Subject) -> float:
    return PAIR_SECONDS * local_gpus() ** 2 if subject.gpus else 0.0


def examine_links(subject: Subject) -> Finding:
    if not subject.gpus:
        return NO_GPU
    if local_gpus() < 2:
        return Finding("not applicable", "one GPU")
    try:
        rows = probe("links", seconds=20 * seconds_of_links(subject))
    except ProbeError as error:
        return Finding("failure", f"copies between GPUs failed: {error}", _REMEDY)
    return judge_links([Link(**row) for row in rows])


def judge_links(links: Sequence[Link]) -> Finding:
    """Of all ordered pairs. Where peers cannot be reached at all, links are compared likewise: copies then take the way
    through the host."""
    figures = {"links": [link._asdict() for link in links]}
    usual = median(link.bandwidth for link in links)
    slow = [link for link in links if link.bandwidth < SLOW * usual]
    apart = [link for link in links if not link.has_peer_access]
    bandwidths = [link.bandwidth / 1e9 for link in links]
    latency = format_duration(median(link.latency for link in links))
    text = f"{min(bandwidths):.0f} to {max(bandwidths):.0f} GB/s by the copy engine, {latency} a small copy"
    if slow:
        worst = min(slow, key=lambda link: link.bandwidth)
        named = listed([f"{link.source} to {link.target} ({link.bandwidth / 1e9:.0f} GB/s)" for link in slow[:4]])
        more = f" and {len(slow) - 4} more" if len(slow) > 4 else ""
        verdict = "failure" if worst.bandwidth < BROKEN * usual else "warning"
        found = f"slow from GPU {named}{more}, where the median is {usual / 1e9:.0f} GB/s"
        return Finding(verdict, found, _REMEDY, figures)
    if apart:
        found = f"no peer access on {len(apart)} of {len(links)} links, which copy through the host: {text}"
        remedy = "set cluster.transport=nccl; in a container or VM look at IOMMU and ACS"
        return Finding("warning", found, remedy, figures)
    return Finding("ok", f"peer access between all; {text}", figures=figures)
