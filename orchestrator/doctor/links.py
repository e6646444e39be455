"""Copies between the GPUs of a machine: which pairs have peer access, and how fast they are."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pentad.orchestrator.doctor.finding import Finding, Subject, spanned
from pentad.orchestrator.doctor.probe import ProbeError, probe
from pentad.orchestrator.planning.formatting import format_duration
from pentad.schedules.ir.errors import enumerated
from pentad.workers.health.results import Link

PAIR_SECONDS = 0.5  # upper bound for both directions of a pair, unless it is slow
SLOW, BROKEN = 0.85, 0.5  # shares of the usual bandwidth
NAMED = 4  # most slow links that are named
_REMEDY = "look at `nvidia-smi nvlink -s`, `nvidia-smi topo -m` and for XID 74 in `dmesg`"


def seconds_of_links(subject: Subject) -> float:
    return PAIR_SECONDS * len(subject.gpus) * (len(subject.gpus) - 1)


def examine_links(subject: Subject) -> Finding:
    if len(subject.gpus) < 2:
        return Finding("not applicable", "one GPU")
    try:
        rows = probe("links", seconds=20 * seconds_of_links(subject))
    except ProbeError as error:
        return Finding("failure", f"copies between GPUs failed: {error}", _REMEDY)
    links = [Link(**row) for row in rows]
    return judge_links(links, usual_bandwidth(links))


def usual_bandwidth(links: Sequence[Link]) -> float:
    return median(link.bandwidth for link in links)


def judge_links(links: Sequence[Link], usual: float) -> Finding:
    """Judges all ordered pairs by the `usual` bandwidth, even those without peer access, whose copies go through the
    host."""
    figures = {"links": [link._asdict() for link in links]}
    slow = [link for link in links if link.bandwidth < SLOW * usual]
    apart = [link for link in links if not link.has_peer_access]
    if slow:
        named = [f"{link.source} to {link.target} ({link.bandwidth / 1e9:.0f} GB/s)" for link in slow]
        text = f"slow from GPU {enumerated(named, NAMED)}: {usual / 1e9:.0f} GB/s is usual"
        is_broken = min(link.bandwidth for link in slow) < BROKEN * usual
        return Finding("failure" if is_broken else "warning", text, _REMEDY, figures)
    bandwidths = spanned([link.bandwidth / 1e9 for link in links], "GB/s")
    latency = format_duration(median(link.latency for link in links))
    text = f"{bandwidths} by the copy engine, {latency} a small copy"
    if apart:
        found = f"no peer access on {len(apart)} of {len(links)} links, which copy through the host: {text}"
        remedy = "set cluster.transport=nccl; in a container or VM look at IOMMU and ACS"
        return Finding("warning", found, remedy, figures)
    return Finding("ok", f"peer access between all; {text}", figures=figures)
