"""Turns the ranks that a former driver left behind into a group that this driver can adopt.

A rank whose driver is gone finishes the calls that it has received and then waits for a new driver, until the lease
expires. It holds what a rank holds after a fault: the newest weights, the results of the last steps and its parts of
the copies in memory. So adopting a group is a recovery without a fault: a fence, after which the former driver's calls
are refused, then a new generation. As always, a step counts once a rank has committed it. If the former driver did not
record such a step, this driver records it from the ranks' results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.held_lease import HeldLease
from pentad.orchestrator.cluster.placement import Placement
from pentad.orchestrator.cluster.worker import RankPlacement, WorkerPlace
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.config.version import release
from pentad.orchestrator.recovery.placed_plans import on_hosts, shrunk_plan
from pentad.schedules.spec.plan import Plan

ANSWER_SECONDS = 10.0
NOWHERE = WorkerPlace("", "", -1, 0, "")  # the place of a rank that does not answer
GONE = "it did not answer the driver that adopted the run"


class Membership(NamedTuple):
    """Which worker is which rank: `members` maps ranks to worker numbers, `bundles` are the ranks' bundles.

    `generation` is the highest that any worker has seen; `extra` are the workers that are not ranks."""

    bundles: tuple[int, ...]
    members: dict[int, int]
    extra: tuple[int, ...]
    generation: int


def membership(found: Mapping[int, RankPlacement]) -> Membership | None:
    """The membership of the workers that answered, given by number. None if none of them is a rank of the plan.

    The former driver may have died while starting a generation. The ranks that it had not reached yet are in the same
    bundles; where a rank had been replaced, the process of the newer generation counts.
    """
    fitting = {number: each for number, each in found.items() if each.fits and each.rank >= 0}
    if not fitting:
        return None
    bundles = max(fitting.values(), key=lambda each: each.generation).bundles
    members: dict[int, int] = {}
    for number, each in sorted(fitting.items(), key=lambda item: item[1].generation):
        if each.bundles == bundles:
            members[each.rank] = number
    extra = tuple(number for number in found if number not in members.values())
    return Membership(bundles, members, extra, max(each.generation for each in found.values()))


def can_adopt(journal: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], ranks: str, spike_policy: str) -> bool:
    """Whether the ranks in the namespace `ranks` are those of this run's journal and no rollback is due or under way:
    with a rollback, the run resumes from its newest checkpoint instead and meets the spike again. `rows` are the lines
    of metrics.jsonl."""
    starts = [event for event in journal if event["event"] == "start"]
    rollbacks = [event["time"] for event in journal if event["event"] == "rollback"]
    is_rolling_back = bool(rollbacks) and (not rows or rows[-1]["time"] <= rollbacks[-1])
    is_before = spike_policy == "rollback" and bool(rows) and rows[-1].get("skipped", False)
    return bool(starts) and starts[-1].get("lease") == ranks and not (is_rolling_back or is_before)


class Parked(NamedTuple):
    """A group to adopt, the plan of its full mesh, its lost ranks with the causes, and the token of its copies."""

    group: WorkerGroup
    full: Plan
    lost: dict[int, str]
    token: bytes | None


def find_parked(config: RunConfig, full: Plan, placement: Placement, lease: HeldLease, runner: str) -> Parked | None:
    """The ranks in `placement` that run the plan `full`, or one to which a former driver has shrunk it. None if they
    run another plan or are all gone.

    Kills workers that do not answer or are not ranks.
    """
    actors = dict(enumerate(lease.actors()))
    if not actors:
        return None
    plan, answers = full, _rank_placements(actors, full)
    sizes = {len(each.bundles) for each in answers.values() if each.rank >= 0}
    if sizes and max(sizes) < full.mesh.size and (smaller := shrunk_plan(config, full, max(sizes))) is not None:
        plan = smaller
    hosts = next((each.hosts for each in answers.values() if each.rank >= 0), plan.hosts)
    if hosts and len(hosts) != plan.mesh.size:
        return None
    if (plan := on_hosts(config, plan, hosts)) is not full:
        answers = _rank_placements(actors, plan)
    found = membership(answers)
    if found is None:
        return None
    for number in (*found.extra, *(actors.keys() - answers.keys())):
        ray.kill(actors[number])
    group = WorkerGroup(plan, placement, found.generation, runner, lease)
    living = {rank: (actors[number], answers[number].place) for rank, number in found.members.items()}
    ranks = range(plan.mesh.size)
    group.adopt(plan, found.bundles, [living.get(rank, (None, NOWHERE)) for rank in ranks])
    tokens = [answers[number].token for number in found.members.values()]
    lost = {rank: f"{group.label(rank)} is gone: {GONE}" for rank in ranks if rank not in living}
    return Parked(group, full, lost, next((token for token in tokens if token), None))


def _rank_placements(actors: Mapping[int, Any], plan: Plan) -> dict[int, RankPlacement]:
    """The placements of the workers that answer, by number."""
    known, version = ray.put(plan), release()
    refs = {actor.rank_placement.remote(known, version): number for number, actor in actors.items()}
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=ANSWER_SECONDS)
    found = {}
    for ref in ready:
        try:
            found[refs[ref]] = ray.get(ref)
        except RayError:  # it has died
            continue
    return found
