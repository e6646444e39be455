"""The checks on every node on which a run would be placed: on all nodes at once, and compared with each other."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from pentad.orchestrator.cluster.cluster import Cluster, join
from pentad.orchestrator.cluster.local_head import launch
from pentad.orchestrator.cluster.placement import Placement, bundle_places, node_names, release, reserve, strategy_of
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.doctor import network
from pentad.orchestrator.doctor.checks import CHECKS, subject_of
from pentad.orchestrator.doctor.compare import compared
from pentad.orchestrator.doctor.finding import Finding, FindingRow, UnderWay
from pentad.orchestrator.doctor.probe import START_SECONDS
from pentad.orchestrator.doctor.ray_cluster import clock_offset, examine_ray
from pentad.schedules.ir.errors import PentadError

POLL_SECONDS = 0.1  # no signal is handled while Ray waits
_SILENT = "look at the node, and at its logs in Ray's session folder"
Actors = dict[str, Any]  # Examiners by node name


class Examiner:
    """An actor that examines a node, in one bundle of a placement group. Answers are plain data."""

    def __init__(self, config: RunConfig, seconds: float | None) -> None:
        self.config, self.seconds = config, seconds

    def gpus(self) -> list[str]:
        """The GPUs of its bundle."""
        return list(map(str, ray.get_gpu_ids()))

    def start(self, gpus: Sequence[str]) -> dict[str, float]:
        """Sets the GPUs to examine, and returns how many seconds each check takes with them."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self.subject = subject_of(self.config, self.seconds)
        return {check.name: check.seconds(self.subject) for check in CHECKS}

    def examine(self, name: str) -> Finding:
        return next(check for check in CHECKS if check.name == name).run(self.subject)

    def serve(self, size: int) -> str:
        """Starts a store at which the nodes meet, and returns its address."""
        from pentad.workers.parallel.process_groups import start_store  # imports torch

        self.store = start_store(ray.util.get_node_ip_address(), size, START_SECONDS)
        return f"{self.store.host}:{self.store.port}"

    def network(self, device: str, address: str, rank: int, size: int) -> Finding:
        return network.examine_network(device, address, rank, size)

    def clock(self) -> float:
        return time.time()


def examine_cluster(config: RunConfig, seconds: float | None, under_way: UnderWay) -> Iterator[list[FindingRow]]:
    """The rows of each check on all nodes. A cluster that cannot be joined, or has no room, gives a single failure
    row."""
    try:
        with launch(config.cluster, config.mesh.size) as head, join(config.cluster, config.mesh.size, head) as cluster:
            yield from examine_joined(cluster, config, seconds, under_way)
    except PentadError as error:
        remedy = "compare cluster.address, RAY_AUTH_TOKEN and mesh with `ray status` on the cluster's head"
        yield [FindingRow("Ray", Finding("failure", str(error), remedy))]


def examine_joined(
    cluster: Cluster, config: RunConfig, seconds: float | None, under_way: UnderWay
) -> Iterator[list[FindingRow]]:
    """As `examine_cluster`, on a joined cluster. Raises PentadError if it has no room for the run."""
    timeout = config.cluster.start_timeout_seconds
    yield [FindingRow("Ray", examine_ray(cluster))]
    with under_way("room for the run", timeout):
        placement = reserve(config.mesh.mesh, cluster.device, timeout, fixed=cluster.local)
    try:
        yield from examine_placement(placement, cluster.device, config, seconds, under_way)
    finally:
        release(placement)  # ends the actors


def examine_placement(
    placement: Placement,
    device: str,
    config: RunConfig,
    seconds: float | None,
    under_way: UnderWay,
    left_out: Collection[str] = (),
) -> Iterator[list[FindingRow]]:
    """The rows of all checks except those `left_out`. A node that fails to answer is not asked again."""
    with under_way("a process on each node", START_SECONDS):
        actors, times, silent = _start(placement, device, config, seconds)
    yield [FindingRow("nodes", finding, node) for node, finding in silent.items()] or [
        FindingRow("nodes", Finding("ok", f"{len(actors)} for {config.mesh.size} ranks"))
    ]
    for name in (check.name for check in CHECKS if check.name not in left_out):
        longest = max((each[name] for each in times.values()), default=0.0)
        with under_way(name, longest):
            calls = {node: actor.examine.remote(name) for node, actor in actors.items()}
            found = compared(name, _answers(calls, START_SECONDS + 20 * longest))
        yield [FindingRow(name, finding, node) for node, finding in found.items()]
        actors = {node: actor for node, actor in actors.items() if found[node].remedy != _SILENT}
    with under_way("network", network.SECONDS):
        found = _network(actors, device)
    yield [FindingRow("network", finding, node) for node, finding in found.items()]
    yield [FindingRow("clock offset", clock_offset(actor), node) for node, actor in actors.items()]


def _start(
    placement: Placement, device: str, config: RunConfig, seconds: float | None
) -> tuple[Actors, dict[str, dict[str, float]], dict[str, Finding]]:
    """An actor on each node and how many seconds each check takes there, by node name; and findings for the nodes that
    fail to start one."""
    kind = ray.remote(num_cpus=1, num_gpus=1 if device == "cuda" else 0)(Examiner)
    names = node_names()
    members: dict[str, list[Any]] = defaultdict(list)  # an actor per rank, as only that knows the rank's GPU
    for place in bundle_places(placement):
        where = strategy_of(placement, place.bundle)
        members[names[place.node]].append(kind.options(scheduling_strategy=where).remote(config, seconds))
    calls = {(node, rank): actor.gpus.remote() for node, its in members.items() for rank, actor in enumerate(its)}
    gpus: dict[str, list[str]] = defaultdict(list)
    silent = {}
    for (node, _), answer in _answers(calls, START_SECONDS).items():
        if isinstance(answer, Finding):
            silent[node] = answer
        else:
            gpus[node] += answer
    actors = {node: its[0] for node, its in members.items() if node not in silent}
    times = _answers({node: actor.start.remote(gpus[node]) for node, actor in actors.items()}, START_SECONDS)
    silent |= {node: answer for node, answer in times.items() if isinstance(answer, Finding)}
    actors = {node: actor for node, actor in actors.items() if node not in silent}
    return actors, {node: times[node] for node in actors}, silent


def _network(actors: Actors, device: str) -> dict[str, Finding]:
    size = len(actors)
    if size < 2:
        return dict.fromkeys(actors, Finding("not applicable", "one node"))
    node, server = next(iter(actors.items()))
    address = _answers({node: server.serve.remote(size)}, START_SECONDS)[node]
    if isinstance(address, Finding):
        return {node: address}
    calls = {
        node: actor.network.remote(device, address, rank, size) for rank, (node, actor) in enumerate(actors.items())
    }
    return compared("network", _answers(calls, START_SECONDS + 8 * network.SECONDS))


def _answers(calls: Mapping[Any, Any], seconds: float) -> dict[Any, Any]:
    """The answers of the nodes, with a Finding in place of one that failed or was late."""
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
