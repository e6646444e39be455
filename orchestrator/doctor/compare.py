"""Compares nodes: one that is good by itself may still differ from the others."""

from __future__ import annotations

from collections import Counter
from statistics import median_high

from pentad.orchestrator.doctor.burn import judge_burn, norms
from pentad.orchestrator.doctor.finding import Finding, Verdict
from pentad.orchestrator.doctor.links import judge_links, usual_bandwidth
from pentad.orchestrator.doctor.network import judge_network
from pentad.workers.health.results import Burned, Link

Findings = dict[str, Finding]  # one check's findings, by node
# Checks whose text has to be the same on all nodes, and the verdict if it is not.
SAME: dict[str, Verdict] = {"versions": "failure", "driver": "warning", "GPUs": "warning", "NCCL": "warning"}


def compared(check: str, found: Findings) -> Findings:
    """The findings of a check after comparing the nodes with each other."""
    if check in SAME:
        return _same(found, SAME[check])
    compare = {"burn": _burn, "links": _links, "network": judge_network}.get(check)
    return compare(found) if compare else found


def _same(found: Findings, verdict: Verdict) -> Findings:
    texts = Counter(each.text for each in found.values() if each.verdict in ("ok", "not applicable"))
    usual = texts.most_common(1)[0][0] if texts else ""
    remedy = "make the nodes alike, or keep to nodes that are"
    return {
        node: Finding(verdict, _difference(each.text, usual), remedy, each.figures)
        if each.text in texts and each.text != usual
        else each
        for node, each in found.items()
    }


def _difference(text: str, usual: str) -> str:
    """The difference between two comma-separated lists, in words."""
    here, there = text.split(", "), usual.split(", ")
    own = ", ".join(each for each in here if each not in there) or text
    return f"{own}, but other nodes: {', '.join(each for each in there if each not in here) or usual}"


def _burn(found: Findings) -> Findings:
    """Compares GPUs. Cores are not compared, because their model is unknown."""
    units = {node: [Burned(**unit) for unit in each.figures.get("units", ())] for node, each in found.items()}
    usual = norms([unit for its in units.values() for unit in its])
    return {
        node: judge_burn(its, found[node].figures["seconds"], usual) if its and its[0].model else found[node]
        for node, its in units.items()
    }


def _links(found: Findings) -> Findings:
    links = {node: [Link(**link) for link in each.figures.get("links", ())] for node, each in found.items()}
    medians = [usual_bandwidth(its) for its in links.values() if its]
    return {node: judge_links(its, median_high(medians)) if its else found[node] for node, its in links.items()}
