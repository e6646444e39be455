"""Room on a cluster for the ranks of a run: newly reserved, or with ranks in it that a former driver left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster.cluster import Cluster
from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.held_lease import HeldLease, held_lease
from pentad.orchestrator.cluster.local_head import LocalHead
from pentad.orchestrator.cluster.placement import (
    Placement,
    bundle_places,
    label_values,
    placed_hosts,
    release,
    reserve,
)
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.runfolder import JOURNAL, METRIC_KEYS, METRICS
from pentad.orchestrator.planning.estimate import memories
from pentad.orchestrator.planning.formatting import counted, format_bytes
from pentad.orchestrator.records.checkpoint_places import path_of
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.recovery.adoption import Parked, can_adopt, find_parked
from pentad.orchestrator.recovery.placed_plans import plan_on
from pentad.orchestrator.run.node_check import NodeCheck, reserve_checked
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan

FREED_SECONDS = 10.0  # for a run that has just ended to give its GPUs back
ANSWER_SECONDS, POLL_SECONDS = 5.0, 0.5


class Room(NamedTuple):
    """The resources of the ranks on a cluster, and the plan for them. With a `lease` the ranks outlive this driver;
    `parked` are those that a former driver left. `check` is the outcome of cluster.check."""

    cluster: Cluster
    placement: Placement
    plan: Plan
    lease: HeldLease | None = None
    parked: Parked | None = None
    check: NodeCheck | None = None


@contextmanager
def reserved(config: RunConfig, plan: Plan, head: LocalHead | None, display: Display) -> Iterator[Room]:
    """Room on the cluster of `head` (None: the existing one) for ranks that end with the block."""
    with clusters.join(config.cluster, config.mesh.size, head) as cluster:
        placement, check = _reserve(config, cluster, display, None)
        try:
            yield Room(cluster, placement, _planned(config, plan, cluster, placement), check=check)
        finally:
            release(placement)


@contextmanager
def reserved_or_left(
    config: RunConfig, plan: Plan, head: LocalHead | None, display: Display, runner: str
) -> Iterator[Room]:
    """As `reserved`, or the room with the ranks that a former driver of the run left. Raises PentadError while another
    driver controls the run's ranks."""
    if head is not None or not config.elastic.driver_lease:
        with reserved(config, plan, head, display) as room:
            yield room
        return
    with ExitStack() as stack:
        cluster = stack.enter_context(clusters.join(config.cluster, config.mesh.size, head))
        folder = str(path_of(config).absolute())
        lease = stack.enter_context(held_lease(config.run.name, folder, config.elastic.driver_lease))
        if lease.found:
            if (found := _left(config, plan, cluster, lease, runner)) is not None:
                yield found
                return
            lease.start_over()
        placement, check = _reserve(config, cluster, display, lease.ranks)
        yield Room(cluster, placement, _planned(config, plan, cluster, placement), lease, check=check)


def check_failure_domain(label: str | None, room: Room, display: Display) -> None:
    """Warns if copies in memory cannot be in another failure domain than the ranks. Raises PentadError if no node of
    the ranks has the label `label`, unless a former driver's ranks are there, whose state that would cost."""
    if label is None:
        return
    values, nodes = label_values(label), {place.node for place in bundle_places(room.placement)}
    text, domains = f"elastic.failure_domain is {label}", {values.get(node, node) for node in nodes}
    if values.keys().isdisjoint(nodes):
        text += ", a label that no node with ranks has"
        if room.parked is None:
            raise PentadError(f"{text}: expected one that nodes start with (ray start --labels {label}=VALUE)")
        display.note(f"{text}: each node counts as one")
    elif len(domains) == 1:
        text += f", which is {domains.pop()} on all nodes with ranks"
        display.note(f"{text}: copies in memory would be lost with them")


def start_ranks(
    config: RunConfig, room: Room, runner: str, progress: Callable[[str], None], generation: int = 1
) -> WorkerGroup:
    """Starts and connects new ranks, which have no state yet. Raises PentadError, leaving nothing behind."""
    options: dict[str, Any] = {"lease": room.lease, "progress": progress, "placed": require_gpu_memory}
    timeout = config.cluster.start_timeout_seconds
    return WorkerGroup.start(room.plan, room.placement, timeout, runner=runner, generation=generation, **options)


def require_gpu_memory(group: WorkerGroup, progress: Callable[[str], None]) -> None:
    """Waits until the GPUs of ranks that have not loaded yet have as much free memory as the plan needs there. Raises
    PentadError if other processes still use it after FREED_SECONDS. GPUs that do not report their memory pass."""
    if group.plan.device != "cuda":
        return
    needs = Counter[tuple[str, int]]()
    for place, kinds in zip(group.places, memories(group.plan), strict=True):
        needs[place.node, place.gpu] += kinds["total"]
    deadline = 0.0
    while texts := _without_room(group, needs):
        if not deadline:
            progress("waiting for GPU memory that other programs use")
            deadline = time.monotonic() + FREED_SECONDS
        elif time.monotonic() > deadline:
            remedy = "end what else runs there (`pentad doctor` lists it), or choose other GPUs or a smaller plan"
            raise PentadError(f"{'; '.join(texts)}: {remedy}")
        time.sleep(POLL_SECONDS)


def _without_room(group: WorkerGroup, needs: Counter[tuple[str, int]]) -> list[str]:
    """What GPUs with too little free memory have and need, by node and number."""
    calls = {rank: actor.gpu_now.remote() for rank, actor in enumerate(group.actors)}
    states, _ = group.gather(calls, ANSWER_SECONDS)
    found = dict[tuple[str, int], str]()
    for rank, state in states.items():
        place = group.places[rank]
        if state is None or state.memory_used is None or state.memory_total is None:
            continue
        needed, free = needs[place.node, place.gpu], state.memory_total - state.memory_used
        if needed > free:
            has = f"has {format_bytes(free)} of {format_bytes(state.memory_total)} free"
            text = f"GPU {place.gpu} of node {place.ip} {has}, and the plan needs {format_bytes(needed)}"
            found[place.node, place.gpu] = text
    return list(found.values())


def _left(config: RunConfig, plan: Plan, cluster: Cluster, lease: HeldLease, runner: str) -> Room | None:
    """The room and ranks that a former driver left, if they can be adopted."""
    folder, placement = path_of(config), lease.placement()
    journal, rows = read_lines(folder / JOURNAL, ["event", "time"]), read_lines(folder / METRICS, METRIC_KEYS)
    if placement is None or placement.bundle_count != plan.mesh.size:
        return None
    if not can_adopt(journal, rows, lease.ranks, config.spikes.policy):
        return None
    plan = _planned(config, plan, cluster, placement)
    parked = find_parked(config, plan, placement, lease, runner)
    return None if parked is None else Room(cluster, placement, plan, lease, parked)


def _reserve(
    config: RunConfig, cluster: Cluster, display: Display, detached: str | None
) -> tuple[Placement, NodeCheck | None]:
    mesh, size, timeout = config.mesh.mesh, config.mesh.size, config.cluster.start_timeout_seconds

    def place(without: Collection[str] = ()) -> Placement:
        display.phase(f"placing {counted(size, 'rank')}")
        return reserve(mesh, cluster.device, timeout, fixed=cluster.local, detached=detached, without=without)

    return reserve_checked(config, cluster, display, place) if config.cluster.check else (place(), None)


def _planned(config: RunConfig, plan: Plan, cluster: Cluster, placement: Placement) -> Plan:
    hosts = placed_hosts(placement, plan.mesh, tensor_across_nodes=plan.tp_across_nodes)
    return plan_on(config, cluster.device, hosts=hosts, expected=plan)
