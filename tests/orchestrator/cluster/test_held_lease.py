"""The driver's side of the lease, with keepers in this process: who gets it, who keeps it, and what is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from pentad.orchestrator.cluster import held_lease as leases
from pentad.orchestrator.cluster import lease as rules
from pentad.orchestrator.cluster.faults import Superseded
from pentad.orchestrator.cluster.held_lease import HeldLease, has_ended, held_lease
from pentad.orchestrator.cluster.lease import KEEPER, Holder, Lease
from pentad.schedules.ir.errors import PentadError

SECONDS = 5.0
DRIVERS_NODE = 28 * "0a"  # Ray's IDs are hexadecimal


class Keeper:
    """Like the actor, but answers with `fault` while there is one."""

    def __init__(self, ranks: str, seconds: float, holder: Holder) -> None:
        self.ranks, self.lease, self.room = ranks, Lease(seconds, holder, time.monotonic()), "room"
        self.fault: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Callable[..., Any]] = {
            "found": lambda: (self.ranks, self.room),
            "view": lambda: self.lease.view(time.monotonic()),
            "renew": lambda driver: self.lease.renew(driver, time.monotonic()),
            "acquire": lambda driver, replaces: self.lease.acquire(driver, replaces, time.monotonic()),
        }
        return SimpleNamespace(remote=lambda *given: self.fault or answers[name](*given))


class Cluster:
    """Named actors by (namespace, name); `dead` lists the jobs that Ray knows to be over."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.actors: dict[tuple[str, str], Any] = {}
        self.released, self.dead = list[Any](), list[str]()
        self.job = "01"
        jobs = lambda: {bytes.fromhex(job): SimpleNamespace(is_dead=True) for job in self.dead}  # noqa: E731
        context = SimpleNamespace(get_job_id=lambda: self.job, gcs_address="h:1", get_node_id=lambda: DRIVERS_NODE)
        named = [("other", "rank0")]
        fake = SimpleNamespace(
            get=self._get,
            get_actor=self._actor,
            kill=self._kill,
            get_runtime_context=lambda: context,
            util=SimpleNamespace(
                get_node_ip_address=lambda: "10.0.0.1",
                list_named_actors=lambda all_namespaces: [
                    {"namespace": space, "name": name} for space, name in (*self.actors, *named)
                ],
            ),
            _raylet=SimpleNamespace(GcsClient=lambda address: SimpleNamespace(get_all_job_info=jobs)),
        )
        for module in (leases, rules):
            patch.setattr(module, "ray", fake)
        patch.setattr(leases, "KeeperActor", SimpleNamespace(options=self._options))
        patch.setattr(rules, "release", self.released.append)
        patch.setattr(leases, "POLL_SECONDS", 0.01)
        patch.setattr(leases, "renew_seconds", lambda seconds: 0.02)

    def keeper(self, of: HeldLease) -> Keeper:
        found = self.actors[of.namespace, KEEPER]
        assert isinstance(found, Keeper)
        return found

    def _options(self, *, name: str, namespace: str, lifetime: str, scheduling_strategy: Any) -> Any:
        assert lifetime == "detached" and scheduling_strategy.soft and scheduling_strategy.node_id == DRIVERS_NODE

        def remote(*given: Any) -> Keeper:
            if (namespace, name) in self.actors:
                raise ValueError("there is one")
            return self.actors.setdefault((namespace, name), Keeper(*given))

        return SimpleNamespace(remote=remote)

    def _actor(self, name: str, namespace: str) -> Any:
        if (namespace, name) not in self.actors:
            raise ValueError("there is none")
        return self.actors[namespace, name]

    def _get(self, answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _kill(self, actor: Any) -> None:
        for key, each in list(self.actors.items()):
            if each is actor:
                del self.actors[key]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Stops renewing all leases at the end of the test: the next test has another Ray."""
    begin, begun = HeldLease.__init__, list[HeldLease]()

    def tracked(lease: HeldLease, *given: Any) -> None:
        begin(lease, *given)
        begun.append(lease)

    monkeypatch.setattr(HeldLease, "__init__", tracked)
    yield Cluster(monkeypatch)
    for lease in begun:
        lease._over.set()
        lease._renewing.join()


@pytest.fixture
def lease(cluster: Cluster) -> Iterator[HeldLease]:
    with held_lease("mine", "/runs/mine", SECONDS) as found:
        yield found


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_lease_is_renewed_and_ends_with_all_that_the_run_had(cluster: Cluster) -> None:
    with held_lease("mine", "/runs/mine", SECONDS) as lease:
        keeper = cluster.keeper(lease)
        assert not lease.found and lease.ranks == keeper.ranks and lease.ranks.startswith(f"{lease.namespace}/")
        cluster.actors[lease.ranks, "rank1"] = "one"
        cluster.actors[lease.ranks, "rank0"] = "zero"
        room: Any = lease.placement()
        assert lease.actors() == ["zero", "one"] and room == "room"
        eventually(lambda: keeper.lease.renewals > 2)
        lease.require()
    assert cluster.released == ["room"] and not cluster.actors


def test_while_a_driver_renews_another_one_is_refused(cluster: Cluster, lease: HeldLease) -> None:
    pid = lease.driver.pid
    sentence = (
        rf"^run.name is mine, whose ranks another driver commands \(process {pid} on 10.0.0.1\): expected another"
    )
    with pytest.raises(PentadError, match=sentence):
        HeldLease("mine", "/runs/mine", SECONDS)
    assert HeldLease("mine", "/elsewhere/mine", SECONDS).namespace != lease.namespace
    assert not lease.is_lost()


def test_the_ranks_of_a_driver_that_is_gone_are_taken_over_or_ended(cluster: Cluster) -> None:
    first = HeldLease("mine", "/runs/mine", SECONDS)
    first._over.set()
    first._renewing.join()
    assert not has_ended("01")
    cluster.dead, cluster.job = ["01"], "02"
    assert has_ended("01") and not has_ended("02")
    second = HeldLease("mine", "/runs/mine", SECONDS)
    assert second.found and second.ranks == first.ranks
    assert first.is_lost()
    with pytest.raises(Superseded, match="another driver commands the ranks of this run by now"):
        first.require()
    first.close()
    assert not cluster.released, "they are the second driver's"
    second.start_over()
    assert not second.found and second.ranks != first.ranks and cluster.released == ["room"]
    second.close()


def test_a_keeper_that_is_away_costs_nothing_and_one_that_is_gone_the_lease(cluster: Cluster) -> None:
    lease = HeldLease("mine", "/runs/mine", SECONDS)
    keeper = cluster.keeper(lease)
    keeper.fault = ActorUnavailableError("restarts", None)
    assert not lease.is_lost() and lease.placement() is None
    keeper.fault = ActorDiedError()  # as calls in flight may fail when a node is lost
    assert not lease.is_lost()
    cluster.actors[lease.namespace, KEEPER] = "another"
    eventually(lambda: bool(lease.lost))
    with pytest.raises(Superseded, match=r"^elastic.driver_lease = 5 s have passed while this driver stood still"):
        lease.require()
    lease.close()
    assert cluster.actors, "nothing was ended"


def test_a_keeper_that_has_ended_costs_the_lease(cluster: Cluster) -> None:
    lease = HeldLease("mine", "/runs/mine", SECONDS)
    keeper = cluster.keeper(lease)
    del cluster.actors[lease.namespace, KEEPER]
    keeper.fault = ActorDiedError()
    assert lease.is_lost()


def test_a_keeper_that_never_answers_is_waited_for_and_said_not_to(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "SETTLE_SECONDS", 0.05)
    cluster.keeper(HeldLease("mine", "/runs/mine", SECONDS)).fault = RayError("away")
    with pytest.raises(PentadError, match=r"the lease of the run mine could not be had within 0.05 s \(away\)"):
        HeldLease("mine", "/runs/mine", SECONDS)


def test_without_rays_private_list_of_jobs_no_driver_is_known_to_be_gone(cluster: Cluster) -> None:
    cluster.dead = ["01"]
    del leases.ray._raylet
    assert not has_ended("01")
