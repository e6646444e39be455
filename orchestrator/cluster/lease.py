"""The lease on a run's ranks: one driver controls them at a time, and nobody for a while after its death.

On a cluster that outlives the driver, the ranks are detached actors. A small actor, the keeper, manages the lease: the
driver renews it, another driver gets it once the first one is gone, and if nobody renews it for `elastic.driver_lease`
seconds, the keeper ends the ranks and itself. Ray allows only one actor per name, so a run has one keeper on a cluster.
It is restarted if its node is lost, and then accepts the first driver that renews as the holder. The lease does not
fence: every command to a rank carries its generation (see `Worker.fence`).
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import ray

from pentad.orchestrator.cluster.placement import Placement, find_placement, release

KEEPER = "lease"  # the keeper's name, in a namespace of the run
MAX_RENEW_SECONDS = 2.0


class Holder(NamedTuple):
    """A driver: its process, the Ray job in which it runs, and a `token` of its own."""

    token: str
    job: str
    host: str
    pid: int


class LeaseView(NamedTuple):
    """The lease as others see it: who has it (None: nobody), how often it was renewed, and how long ago."""

    holder: Holder | None
    renewals: int
    age: float


def renew_seconds(lease_seconds: float) -> float:
    """Seconds between two renewals."""
    return min(MAX_RENEW_SECONDS, lease_seconds / 10)


def silent_seconds(lease_seconds: float) -> float:
    """Seconds without a renewal after which the holder counts as gone."""
    return 5 * renew_seconds(lease_seconds)


class Lease:
    """The rules of the lease, without Ray and without a clock: `now` is in monotonic seconds."""

    def __init__(self, seconds: float, holder: Holder | None, now: float) -> None:
        self.seconds, self.holder, self.renewals, self.renewed = seconds, holder, 0, now

    def view(self, now: float) -> LeaseView:
        return LeaseView(self.holder, self.renewals, now - self.renewed)

    def acquire(self, driver: Holder, replaces: Holder | None, now: float) -> bool:
        """Gives the lease to `driver` if nobody or `replaces`, which is gone, still holds it. Returns whether."""
        if self.holder not in (None, replaces, driver):
            return False
        self.holder = driver
        return self.renew(driver, now)

    def renew(self, driver: Holder, now: float) -> bool:
        """Renews the lease for `driver`. False if another driver has it."""
        if self.holder not in (None, driver):
            return False
        self.holder, self.renewed = driver, now
        self.renewals += 1
        return True

    def is_expired(self, now: float) -> bool:
        return now > self.renewed + self.seconds


class Keeper:
    """The actor that manages the lease of a run. `ranks` is the namespace of one set of the run's ranks and the name of
    their placement group; another set has another name."""

    def __init__(self, ranks: str, seconds: float, holder: Holder) -> None:
        self.ranks, self.changing = ranks, threading.Lock()
        is_new = not ray.get_runtime_context().was_current_actor_reconstructed
        self.lease = Lease(seconds, holder if is_new else None, time.monotonic())
        threading.Thread(target=self._watch, daemon=True).start()

    def acquire(self, driver: Holder, replaces: Holder | None) -> bool:
        with self.changing:
            return self.lease.acquire(driver, replaces, time.monotonic())

    @ray.method(enable_task_events=False)
    def renew(self, driver: Holder) -> bool:
        with self.changing:
            return self.lease.renew(driver, time.monotonic())

    @ray.method(enable_task_events=False)
    def view(self) -> LeaseView:
        return self.lease.view(time.monotonic())

    @ray.method(enable_task_events=False)
    def found(self) -> tuple[str, Placement | None]:
        """`ranks`, and their placement if there is one."""
        return self.ranks, find_placement(self.ranks)

    def _watch(self) -> None:
        while True:
            time.sleep(renew_seconds(self.lease.seconds))
            with self.changing:
                if self.lease.is_expired(time.monotonic()):
                    break
        print(f"no driver has renewed the lease of {self.ranks} for {self.lease.seconds:g} s: these ranks end")
        while True:  # the cluster's head may be unreachable
            with suppress(Exception):
                end_ranks(self.ranks, find_placement(self.ranks))
                ray.kill(ray.get_runtime_context().current_actor)
            time.sleep(renew_seconds(self.lease.seconds))


def actors_of(ranks: str) -> list[Any]:
    """The ranks and spares in this namespace that are not known to be dead."""
    known = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == ranks]
    found = []
    for name in sorted(known):
        with suppress(ValueError):  # it has just ended
            found.append(ray.get_actor(name, namespace=ranks))
    return found


def end_ranks(ranks: str, placement: Placement | None) -> None:
    """Frees the placement of these ranks and kills them: former spares would not end with the placement."""
    if placement is not None:
        release(placement)
    for actor in actors_of(ranks):
        ray.kill(actor)


KeeperActor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(Keeper)
