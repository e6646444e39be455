"""The checks on every node that a run would be placed on: an actor a node, all nodes at once, compared at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pentad.orchestrator.cluster.cluster import Cluster, join
from pentad.orchestrator.cluster.local_head import launch
from pentad.orchestrator.cluster.placement import bundle_places, release, reserve
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.doctor.burn import compare_nodes
from pentad.orchestrator.doctor.checks import CHECKS, subject_of
from pentad.orchestrator.doctor.finding import START_SECONDS, Finding, Row, UnderWay
from pentad.orchestrator.doctor.ray_cluster import examine_ray, judge_clock
from pentad.schedules.ir.errors import PentadError
from pentad.workers.health.burn import Burned

POLL_SECONDS = 0.1  # Ray delivers no signal while it waits
CLOCK_READINGS = 5
CLOCK_SECONDS = 30.0
_SILENT = "look at the node, and at its logs in Ray's session folder"


class Examiner:
    """On a node. Answers are plain data."""

    def __init__(self, config: RunConfig, seconds: float | None) -> None:
        self.subject = subject_of(config, seconds)

    def clock(self) -> float:
        return time.time()

    def place(self) -> tuple[str, dict[str, float]]:
        """The node's address, and the seconds of each check there."""
        return ray.util.get_node_ip_address(), {check.name: check.seconds(self.subject) for check in CHECKS}

    def examine(self, name: str) -> Finding:
        check = next(check for check in CHECKS if check.name == name)
        return check.examine(self.subject)


def examine_cluster(config: RunConfig, seconds: float | None, under_way: UnderWay) -> Iterator[list[Row]]:
    """The rows of each check, of all nodes. A cluster that cannot be joined, or has no room, is one row."""
    try:
        with launch(config.cluster, config.mesh.size) as head, join(config.cluster, config.mesh.size, head) as cluster:
            yield from examine_joined(cluster, config, seconds, under_way)
    except PentadError as error:
        remedy = "compare cluster.address, RAY_AUTH_TOKEN and mesh with `ray status` on the cluster's head"
        yield [Row("Ray", Finding("failure", str(error), remedy))]


def examine_joined(
    cluster: Cluster, config: RunConfig, seconds: float | None, under_way: UnderWay
) -> Iterator[list[Row]]:
    """Raises PentadError if the cluster has no room for the run."""
    timeout = config.cluster.start_timeout_seconds
    yield [Row("Ray", examine_ray(cluster))]
    with under_way("room for the run", timeout):
        placement = reserve(config.mesh.mesh, cluster.device, timeout, fixed=cluster.local)
    try:
        actors = _start(placement, cluster.device, config, seconds)
        yield from _examine(actors, under_way)
    finally:
        release(placement)  # ends the actors


def _start(
    placement: PlacementGroup, device: str, config: RunConfig, seconds: float | None
) -> dict[str, tuple[Any, dict[str, float]]]:
    """Actors by the addresses of their nodes, with the seconds of each check."""
    first = {place.node: place.bundle for place in reversed(bundle_places(placement))}
    kind = ray.remote(num_cpus=1, num_gpus=1 if device == "cuda" else 0)(Examiner)
    found = {}
    for node, bundle in first.items():
        where = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle)
        found[node] = kind.options(scheduling_strategy=where).remote(config, seconds)
    answers = _answers({node: actor.place.remote() for node, actor in found.items()}, START_SECONDS)
    silent = [answer for answer in answers.values() if isinstance(answer, Finding)]
    if silent:
        raise PentadError(f"{len(silent)} of {len(found)} nodes do not start a process: {silent[0].text}")
    # Nodes of a cluster on one machine share its address.
    counts = Counter(address for address, _ in answers.values())
    return {
        address if counts[address] == 1 else f"{address}/{node[:6]}": (found[node], times)
        for node, (address, times) in answers.items()
    }


def _examine(actors: Mapping[str, tuple[Any, dict[str, float]]], under_way: UnderWay) -> Iterator[list[Row]]:
    for name in (check.name for check in CHECKS):
        seconds = max(times[name] for _, times in actors.values())
        with under_way(name, seconds):
            calls = {node: actor.examine.remote(name) for node, (actor, _) in actors.items()}
            found = compared(name, _answers(calls, START_SECONDS + 20 * seconds))
        yield [Row(name, finding, node) for node, finding in found.items()]
    yield [Row("clock offset", _clock(actor), node) for node, (actor, _) in actors.items()]


def compared(name: str, found: dict[str, Finding]) -> dict[str, Finding]:
    """The findings of a check by node, where a node that is good by itself may fall out of line with the others."""
    if name == "versions":
        return _same_versions(found)
    if name != "burn":
        return found
    units = {node: [Burned(**unit) for unit in each.figures.get("units", ())] for node, each in found.items()}
    odd = {
        node: Finding(*both, "take the node out of use, or repair it") for node, both in compare_nodes(units).items()
    }
    return {
        node: each if each.verdict == "failure" or node not in odd else odd[node]._replace(figures=each.figures)
        for node, each in found.items()
    }


def _same_versions(found: dict[str, Finding]) -> dict[str, Finding]:
    counts = Counter(each.text for each in found.values() if each.verdict == "ok")
    if len(counts) < 2:
        return found
    usual = counts.most_common(1)[0][0]
    remedy = "install the same versions on all nodes"
    return {
        node: Finding("failure", f"{each.text}, but most nodes have {usual}", remedy, each.figures)
        if each.verdict == "ok" and each.text != usual
        else each
        for node, each in found.items()
    }


def _answers(calls: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """What the nodes answer; a Finding for one that does not, or not in time."""
    pending, until = list(calls.values()), time.monotonic() + seconds
    while pending and time.monotonic() < until:
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
    found = {}
    for node, call in calls.items():
        if call in pending:
            found[node] = Finding("failure", f"no answer within {seconds:.0f} s", _SILENT)
            continue
        try:
            found[node] = ray.get(call)
        except RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            found[node] = Finding("failure", f"the check failed: {lines[-1].strip()}", _SILENT)
    return found


def _clock(actor: Any) -> Finding:
    """By the answer that took least time; it was given in the middle of that, give or take half of it."""
    readings = []
    for _ in range(CLOCK_READINGS):
        began = time.time()
        try:
            there = ray.get(actor.clock.remote(), timeout=CLOCK_SECONDS)
        except RayError:
            return Finding("failure", f"no answer within {CLOCK_SECONDS:.0f} s", _SILENT)
        ended = time.time()
        readings.append((ended - began, there - (began + ended) / 2))
    delay, offset = min(readings)
    return judge_clock(offset, delay / 2)
