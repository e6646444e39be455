"""Replaces Ray, time and storage, as the driver sees them, with simulations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from chaos_cluster import DRIVER_NODE, Cluster
from chaos_lease import SimLease
from chaos_placement import SimPlacement, node_of

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster import copies, faults, placement, rank_status
from pentad.orchestrator.cluster import group as groups
from pentad.orchestrator.cluster import worker as workers
from pentad.orchestrator.cluster.placement import Place
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring import event_bus, run_state, runfolder
from pentad.orchestrator.records import run_files
from pentad.orchestrator.recovery import (
    adoption,
    evictions,
    fence,
    hang_detection,
    newest_checkpoint,
    recovery,
    regroup,
    spares,
)
from pentad.orchestrator.run import driver, measure, placing, replication, saving, step_loop
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint import checkpoint as checkpoints
from pentad.workers.checkpoint import local_storage

if TYPE_CHECKING:
    from chaos_history import Simulation

CLOCKED = (
    *(
        groups,
        faults,
        fence,
        recovery,
        regroup,
        newest_checkpoint,
        evictions,
        hang_detection,
        step_loop,
        saving,
        replication,
        driver,
        measure,
        workers,
    ),
    *(event_bus, runfolder, run_files, checkpoints, placement, copies, rank_status),
)


class Texts:
    """Configurations of one history, keyed by short texts that replace YAML in files: writing and reading YAML takes
    longer than most of a history."""

    def __init__(self) -> None:
        self.configs: dict[str, RunConfig] = {}

    def dump(self, config: RunConfig) -> str:
        text = f"config: {id(config)}\n"
        self.configs[text] = config  # kept, so that its id is not reused
        return text

    def read(self, folder: Path) -> RunConfig:
        return self.configs[(folder / "config.yaml").read_text()]


class AtOnce:
    """An executor without threads, as the shards of a simulated checkpoint have only a few bytes."""

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[..., Any], *values: Iterable[Any]) -> Iterator[Any]:
        return map(function, *values)


class Silent:
    """A display that shows nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


texts = Texts()


def install(patch: pytest.MonkeyPatch, current: Callable[[], Simulation]) -> None:
    """Replaces Ray, time and storage in the driver with those of the `current` simulation, once for all histories."""
    fake = SimpleNamespace(
        wait=lambda *a, **k: current().cluster.wait(*a, **k),
        get=Cluster.get,
        put=lambda value: value,
        kill=lambda actor: current().cluster.kill(actor.process),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: DRIVER_NODE),
        get_gpu_ids=lambda: [],
    )
    clock = SimpleNamespace(
        monotonic=lambda: current().world.now,
        time=lambda: current().world.now,
        sleep=lambda seconds: current().world.wait(seconds),
    )
    for module in (groups, faults, copies, fence, regroup, spares, workers, adoption):
        patch.setattr(module, "ray", fake)
    for module in CLOCKED:
        if hasattr(module, "time"):
            patch.setattr(module, "time", clock)
    patch.setattr(workers, "gc", SimpleNamespace(collect=lambda: 0))  # no rank has memory to free
    patch.setattr(fence, "os", SimpleNamespace(kill=lambda pid, number: current().cluster.kill_pid(pid)))
    options = lambda *, scheduling_strategy, **_: SimpleNamespace(  # noqa: E731
        remote=lambda label, runner: current().cluster.create(scheduling_strategy)
    )
    patch.setattr(groups, "Actor", SimpleNamespace(options=options))
    patch.setattr(groups, "strategy_of", lambda placement, bundle: bundle)
    patch.setattr(groups, "strategy_on", lambda node: node)
    patch.setattr(faults, "gone_nodes", lambda nodes: current().cluster.gone_nodes(nodes))
    patch.setattr(regroup, "forget_gone_nodes", lambda nodes: None)
    patch.setattr(spares, "free_rooms", lambda device: {})
    patch.setattr(groups, "bundle_places", lambda group: tuple(places_of(current())))
    patch.setattr(groups, "release", lambda group: None)
    patch.setattr(groups, "read_status", lambda path, streams: current().read_status(str(path)))
    patch.setattr(regroup, "living_bundles", lambda group: current().cluster.living_bundles())
    patch.setattr(recovery, "draining", lambda: current().cluster.draining)
    patch.setattr(recovery, "fence", lambda *a: current().fenced(*a))
    patch.setattr(event_bus.EventBus, "rewind", lambda bus, step: current().rewound(bus, step))
    patch.setattr(driver, "monitored", lambda *a: current().monitored(*a))
    patch.setattr(driver, "watched_head", lambda *a: nullcontext())
    patch.setattr(placing, "held_lease", lambda *a: _lease(current()))
    patch.setattr(placing, "reserve", lambda *a, **k: SimPlacement(current()))
    patch.setattr(evictions, "node_of", lambda room: node_of(current(), room))
    patch.setattr(evictions, "node_names", dict)
    patch.setattr(placing, "release", lambda placement: None)
    patch.setattr(placing, "_planned", lambda config, plan, cluster, placement: plan)
    patch.setattr(clusters, "join", lambda *a: nullcontext(clusters.Cluster("address", False, "cpu")))
    patch.setattr(driver, "print_plan", lambda *a: None)
    patch.setattr(runfolder, "dump", texts.dump)
    patch.setattr(runfolder, "saved_config", texts.read)
    patch.setattr(checkpoints, "ThreadPoolExecutor", AtOnce)
    patch.setattr(run_state.ControlRequests, "wait", lambda requests, seconds: current().pause(seconds))
    _install_storage(patch, current)


def places_of(simulation: Simulation) -> Iterator[Place]:
    return (Place(bundle, node) for bundle, node in enumerate(simulation.cluster.bundles))


@contextmanager
def _lease(simulation: Simulation) -> Iterator[SimLease]:
    lease = SimLease(simulation)
    try:
        yield lease
    finally:
        lease.close()


def _install_storage(patch: pytest.MonkeyPatch, current: Callable[[], Simulation]) -> None:
    """Injects faults of the disk, and lets a driver that has died write nothing more."""

    def guarded(function: Callable[..., Any], check: Callable[[Simulation], None]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            check(current())
            return function(*arguments, **named)

        return call

    def of_storage(writes: bool, simulation: Simulation) -> None:
        simulation.world.check()
        simulation.faults.check_storage(writes=writes)

    def of_run(simulation: Simulation) -> None:
        simulation.world.check()
        try:
            simulation.faults.check_disk()
        except OSError as error:
            raise PentadError(f"metrics.jsonl cannot be written ({error.strerror})") from None

    local = local_storage.Local
    for name, writes in (("folders", False), ("files", False), ("opened", False), ("write", True), ("write_new", True)):
        patch.setattr(local, name, guarded(getattr(local, name), partial(of_storage, writes)))
    patch.setattr(run_files, "in_daemon", lambda write: write())  # real threads do not follow virtual time
    patch.setattr(run_files, "IDLE_SECONDS", 0.0)
    for module, name in ((run_files, "append"), (run_files, "replace_file"), (runfolder, "replace_file")):
        patch.setattr(module, name, guarded(getattr(module, name), of_run))
