"""The lease on the ranks of a run in virtual time: the real rules, a simulated keeper, and the driver that holds it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from chaos_cluster import Actor
from chaos_placement import SimPlacement
from chaos_world import DriverEnded

from pentad.orchestrator.cluster.faults import Superseded
from pentad.orchestrator.cluster.lease import Holder, Lease, renew_seconds

if TYPE_CHECKING:
    from chaos_history import Simulation


class SimKeeper:
    """Simulates `Keeper`: it outlives the driver, and ends the ranks when the lease expires."""

    def __init__(self, simulation: Simulation, holder: Holder) -> None:
        self.simulation, self.world = simulation, simulation.world
        self.ranks, self.is_alive = f"pentad/chaos/{next(simulation.numbers)}", True
        self.lease = Lease(simulation.config.elastic.driver_lease, holder, self.world.now)
        self._watch()

    def end(self) -> None:
        """Ends, together with all ranks."""
        self.is_alive = False
        for process in self.simulation.cluster.processes:
            process.die()

    def _watch(self) -> None:
        if self.is_alive and self.lease.is_expired(self.world.now):
            self.simulation.log.append(f"{self.world.now:.2f}: the lease of {self.ranks} expires")
            self.end()
        if self.is_alive:
            self.world.at(renew_seconds(self.lease.seconds), self._watch)


class SimLease:
    """The part of HeldLease that drivers use. Ray knows at once that a killed driver is gone."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.world = simulation, simulation.world
        self.driver = Holder(f"driver {next(simulation.numbers)}", "job", "host", 1)
        keeper = simulation.keeper
        self.found = keeper is not None and keeper.is_alive
        if keeper is None or not keeper.is_alive:
            keeper = simulation.keeper = SimKeeper(simulation, self.driver)
        else:
            holder = keeper.lease.holder
            assert keeper.lease.acquire(self.driver, holder, self.world.now), "a driver that is gone keeps the lease"
            assert holder is None or not keeper.lease.renew(holder, self.world.now), "two drivers have the lease"
        self.keeper: SimKeeper = keeper
        simulation.lease = self
        self._renew()

    @property
    def ranks(self) -> str:
        return self.keeper.ranks

    def require(self) -> None:
        self.world.check()
        if self.is_lost():
            raise Superseded("another driver has the lease, or it has expired")

    def is_lost(self) -> bool:
        return not self.keeper.is_alive or self.keeper.lease.holder != self.driver

    def placement(self) -> Any:
        return SimPlacement(self.simulation)

    def actors(self) -> list[Actor]:
        self.world.check()
        return [Actor(process) for process in self.simulation.cluster.processes if process.is_alive]

    def start_over(self) -> None:
        self.world.check()
        self.keeper.end()
        self.keeper = self.simulation.keeper = SimKeeper(self.simulation, self.driver)
        self.found = False

    def close(self) -> None:
        """Called by a driver that ends by itself; a dead one does nothing."""
        self.world.check()
        if not self.is_lost():
            self.keeper.end()

    def _renew(self) -> None:
        """Renews the lease, again and again, while the driver lives."""
        if self.simulation.lease is not self or self.world.driver_ends is not None or not self.keeper.is_alive:
            return
        assert self.keeper.lease.renew(self.driver, self.world.now), "the driver has lost the lease while it lived"
        self.world.at(renew_seconds(self.keeper.lease.seconds), self._renew)


def leave(simulation: Simulation) -> None:
    """What happens after the death of a driver, or of the head: ranks with a lease wait for the next driver, and end if
    it does not come in time; all others end."""
    simulation.lease, keeper, cluster = None, simulation.keeper, simulation.cluster
    if keeper is not None and keeper.is_alive and not cluster.head_gone:
        seconds = simulation.world.random.choice((0.1, 3.0, 20.0, 1.5 * keeper.lease.seconds))
        _pass(simulation, seconds)
        for node in cluster.nodes.values():
            if node.cut_off:
                cluster.reach(node)
        if not cluster.head_gone:
            late = seconds > keeper.lease.seconds
            assert keeper.is_alive is not late, f"a lease of {keeper.lease.seconds:g} s, {seconds:g} s later"
            if keeper.is_alive:
                return
    if keeper is not None:
        keeper.end()
    cluster.end_job()


def _pass(simulation: Simulation, seconds: float) -> None:
    """Lets time pass without a driver."""
    world = simulation.world
    until = world.now + seconds
    while world.now < until and not simulation.cluster.head_gone:
        world.driver_ends, world.idle_calls = None, 0
        with suppress(DriverEnded):  # it is dead already
            world.wait(until - world.now)
    world.driver_ends, world.idle_calls = None, 0
