"""The network between a cluster's nodes: whether a node, or the link between two, is slower than the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_high

from pentad.orchestrator.doctor.finding import Finding
from pentad.orchestrator.doctor.probe import ProbeError, probe
from pentad.orchestrator.planning.formatting import format_duration
from pentad.schedules.ir.errors import enumerated
from pentad.workers.health.results import Link

SECONDS = 10.0
SLOW, BROKEN = 0.7, 0.5  # shares of the usual bandwidth: networks are shared
_REMEDY = "look at the node's interface (`ethtool`, `ibstat`), cable and switch port, and at NCCL_SOCKET_IFNAME"


def examine_network(device: str, address: str, rank: int, size: int) -> Finding:
    """Measures the network of this node, `rank` of `size` nodes, all of which call this and meet at `address`."""
    try:
        return Finding("ok", "", figures={"links": probe("network", device, address, rank, size, seconds=6 * SECONDS)})
    except ProbeError as error:
        return Finding("failure", f"no exchange with other nodes: {error}", f"open the ports between nodes; {_REMEDY}")


def judge_network(found: Mapping[str, Finding]) -> dict[str, Finding]:
    """Judges all nodes, given in the order of their ranks. A node counts as fast as its best link, so that a slow
    partner is not held against it."""
    names = list(found)
    links = {node: [Link(**row) for row in each.figures.get("links", ())] for node, each in found.items()}
    best = {node: max(link.bandwidth for link in its) for node, its in links.items() if its}
    usual = median_high(best.values()) if best else 0.0
    return {
        node: _judge(node, links[node], best, usual, names)._replace(figures=each.figures) if links[node] else each
        for node, each in found.items()
    }


def _judge(node: str, links: Sequence[Link], best: Mapping[str, float], usual: float, names: Sequence[str]) -> Finding:
    if best[node] < SLOW * usual:
        text = f"at most {_rate(best[node])} from any other node: {_rate(usual)} is usual"
        return Finding("failure" if best[node] < BROKEN * usual else "warning", text, _REMEDY)
    peers = {names[link.source]: link for link in links}
    slow = {peer: link for peer, link in peers.items() if link.bandwidth < SLOW * min(usual, best.get(peer, 0.0))}
    if slow:
        named = enumerated([f"{peer} ({_rate(link.bandwidth)})" for peer, link in slow.items()])
        return Finding("warning", f"slow from {named}: {_rate(usual)} is usual", _REMEDY)
    return Finding("ok", f"{_rate(best[node])}, {format_duration(min(link.latency for link in links))} a small message")


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
