"""Examines the nodes on which a run has been placed (cluster.check), and places it on others if some fail."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from pentad.orchestrator.cluster.cluster import Cluster
from pentad.orchestrator.cluster.placement import Placement, node_names, release
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.doctor.finding import FindingRow
from pentad.orchestrator.doctor.nodes import examine_placement
from pentad.orchestrator.monitoring.display import Display
from pentad.schedules.ir.errors import PentadError

GPU_SECONDS = 5.0  # length of the GPU burn-in; CPU cores get none
LEFT_OUT = ("disk",)  # takes long, and no node would be left out because of it


class NodeCheck(NamedTuple):
    """The outcome of a check that took `seconds`: `nodes` is the number of nodes examined, `left_out` has the names of
    those that failed with the reason, and `warnings` what else was found on those that the run got."""

    seconds: float
    nodes: int
    left_out: Mapping[str, str]
    warnings: tuple[FindingRow, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """The facts for the journal."""
        rows = [{"check": row.check, "node": row.node, "text": row.finding.text} for row in self.warnings]
        return {**self._asdict(), "seconds": round(self.seconds, 3), "warnings": rows}


def reserve_checked(
    config: RunConfig, cluster: Cluster, display: Display, place: Callable[[Collection[str]], Placement]
) -> tuple[Placement, NodeCheck]:
    """Room on nodes that pass the check. `place` reserves room without the nodes of the given IDs. Raises PentadError
    if there is none."""
    seconds = GPU_SECONDS if cluster.device == "cuda" else 0.0

    def under_way(name: str, seconds: float) -> AbstractContextManager[None]:
        display.phase(f"examining the nodes: {name}")
        return nullcontext()

    def examine(placement: Placement) -> list[FindingRow]:
        found = examine_placement(placement, cluster.device, config, seconds, under_way, LEFT_OUT)
        return [row for rows in found for row in rows]

    placement, check = place_on_good_nodes(place, examine, node_names)
    for node, finding in check.left_out.items():
        display.note(f"node {node} is left out: {finding}")
    return placement, check


def place_on_good_nodes(
    place: Callable[[Collection[str]], Placement],
    examine: Callable[[Placement], list[FindingRow]],
    names: Callable[[], Mapping[str, str]],
) -> tuple[Placement, NodeCheck]:
    """Repeats `place` and `examine` until all nodes pass. `names` returns the nodes' names by ID. Raises PentadError,
    with nothing reserved, if too few nodes are left."""
    began, left, examined = time.monotonic(), dict[str, str](), set[str]()
    while True:
        known = names()
        try:
            placement = place([node for node, name in known.items() if name in left])
        except PentadError as error:
            if not left:
                raise
            nodes = "; ".join(f"{node} ({finding})" for node, finding in left.items())
            raise PentadError(f"cluster.check leaves out {nodes}, and without {_them(left)} {error}") from None
        try:
            rows = examine(placement)
        except BaseException:
            release(placement)
            raise
        examined |= {row.node for row in rows if row.node}
        if not (failed := failures(rows)):
            warnings = tuple(row for row in rows if row.finding.verdict in ("warning", "failure"))
            return placement, NodeCheck(time.monotonic() - began, len(examined), left, warnings)
        release(placement)
        left |= failed


def failures(rows: Sequence[FindingRow]) -> dict[str, str]:
    """The failures of each node, by name; warnings do not count."""
    found = defaultdict[str, list[str]](list)
    for row in rows:
        if row.node and row.finding.verdict == "failure":
            found[row.node].append(f"{row.check}: {row.finding.text}")
    return {node: "; ".join(texts) for node, texts in found.items()}


def _them(nodes: Mapping[str, str]) -> str:
    return "them" if len(nodes) > 1 else "it"
