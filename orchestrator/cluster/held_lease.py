"""The driver's side of the lease on a run's ranks: acquires it, or says who has it, and renews it in a thread."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from contextlib import AbstractContextManager, closing, suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pentad.orchestrator.cluster.faults import Superseded
from pentad.orchestrator.cluster.lease import (
    KEEPER,
    Holder,
    KeeperActor,
    actors_of,
    end_ranks,
    renew_seconds,
    silent_seconds,
)
from pentad.orchestrator.cluster.placement import Placement
from pentad.schedules.ir.errors import PentadError

ANSWER_SECONDS = 10.0
SETTLE_SECONDS = 30.0  # for a keeper that is starting or ending
POLL_SECONDS = 0.1


class HeldLease:
    """This driver's lease on the ranks of the run `name`, whose files are in `folder`. `ranks` is the namespace of
    their actors and the name of their placement group; `found` is whether a former driver may have left some."""

    def __init__(self, name: str, folder: str, seconds: float) -> None:
        """Acquires the lease, at once or when its holder has been silent for a while. Raises PentadError if the holder
        lives."""
        self.name, self.seconds = name, seconds
        self.namespace = f"pentad/{name}/{hashlib.sha256(folder.encode()).hexdigest()[:12]}"
        context = ray.get_runtime_context()
        self.driver = Holder(secrets.token_hex(8), context.get_job_id(), ray.util.get_node_ip_address(), os.getpid())
        self.lost, self._over, self._asking = "", threading.Event(), threading.Lock()
        self.keeper, self.ranks, self.found = self._acquire()
        self._renewing = threading.Thread(target=self._renew, daemon=True)
        self._renewing.start()

    def require(self) -> None:
        """Raises Superseded if another driver has taken the lease, or it has expired."""
        if self.lost:
            raise Superseded(self.lost)

    def is_lost(self) -> bool:
        """Whether the lease is lost; asks the keeper."""
        self._renew_once()
        return bool(self.lost)

    def placement(self) -> Placement | None:
        """The placement of the ranks, if there is one."""
        with suppress(RayError):
            return ray.get(self.keeper.found.remote(), timeout=ANSWER_SECONDS)[1]
        return None

    def actors(self) -> list[Any]:
        """The actors of the ranks that are not known to be dead."""
        return actors_of(self.ranks)

    def start_over(self) -> None:
        """Ends all that a former driver left, and begins a new set of ranks."""
        with self._asking:
            self._end()
            self.keeper, self.ranks, self.found = self._acquire()

    def close(self) -> None:
        """Ends all that is left of the run on the cluster, unless another driver has it."""
        self._over.set()
        self._renewing.join()
        if not self.is_lost():
            self._end()

    def _end(self) -> None:
        end_ranks(self.ranks, self.placement())
        ray.kill(self.keeper)

    def _acquire(self) -> tuple[Any, str, bool]:
        """The keeper, the namespace of its ranks, and whether the keeper existed already."""
        deadline = time.monotonic() + SETTLE_SECONDS
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)  # the driver's node
        options = {"name": KEEPER, "namespace": self.namespace, "lifetime": "detached", "scheduling_strategy": here}
        while True:
            ranks = f"{self.namespace}/{secrets.token_hex(4)}"
            with suppress(ValueError):  # a keeper exists
                return KeeperActor.options(**options).remote(ranks, self.seconds, self.driver), ranks, False
            try:
                keeper = ray.get_actor(KEEPER, namespace=self.namespace)
                self._take_over(keeper)
                return keeper, ray.get(keeper.found.remote(), timeout=ANSWER_SECONDS)[0], True
            except (ValueError, RayError) as error:  # it is about to end, or is restarting on another node
                if time.monotonic() > deadline:
                    text = f"the lease of the run {self.name} could not be had within {SETTLE_SECONDS:g} s"
                    raise PentadError(f"{text} ({error}): expected its keeper to answer") from None
                time.sleep(POLL_SECONDS)

    def _take_over(self, keeper: Any) -> None:
        """Waits until the holder is gone or renews. Raises PentadError if it renews."""
        first = ray.get(keeper.view.remote(), timeout=ANSWER_SECONDS)
        while True:
            view = ray.get(keeper.view.remote(), timeout=ANSWER_SECONDS)
            is_gone = view.holder is None or view.age > silent_seconds(self.seconds) or has_ended(view.holder.job)
            if is_gone and ray.get(keeper.acquire.remote(self.driver, view.holder), timeout=ANSWER_SECONDS):
                return
            if view.holder is not None and view.renewals != first.renewals:
                at = f"process {view.holder.pid} on {view.holder.host}"
                text = f"run.name is {self.name}, whose ranks another driver commands ({at})"
                raise PentadError(f"{text}: expected another name, or that you stop it")
            time.sleep(POLL_SECONDS)

    def _renew(self) -> None:
        while not self._over.wait(renew_seconds(self.seconds)) and not self.lost:
            self._renew_once()

    def _renew_once(self) -> None:
        with self._asking:
            try:
                if not ray.get(self.keeper.renew.remote(self.driver), timeout=ANSWER_SECONDS):
                    self.lost = "another driver commands the ranks of this run by now: this one ends"
            except (ActorUnavailableError, GetTimeoutError):  # Ray is restarting it on another node
                pass
            except RayError:
                if not self._keeper_lives():
                    self.lost = f"elastic.driver_lease = {self.seconds:g} s have passed while this driver stood still"

    def _keeper_lives(self) -> bool:
        """Whether the keeper has not ended for good: while Ray restarts it, calls fail in the same way."""
        try:
            return bool(ray.get_actor(KEEPER, namespace=self.namespace) == self.keeper)
        except ValueError:
            return False
        except RayError:  # the cluster's head is unreachable
            return True


def held_lease(name: str, folder: str, seconds: float) -> AbstractContextManager[HeldLease]:
    """Holds the lease of a run for the block, and then ends what is left of its ranks. Raises PentadError if another
    driver holds it."""
    return closing(HeldLease(name, folder, seconds))


def has_ended(job: str) -> bool:
    """Whether Ray knows that the job's driver is gone."""
    try:
        jobs = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address).get_all_job_info()
    except Exception:  # private to Ray: if it fails, the holder must have been silent for a while
        return False
    return any(found.is_dead for key, found in jobs.items() if key.hex() == job)
