"""Thirteen kinds of faults in turn, on seven meshes: each run ends with the bits of a run without faults, its samples
are proven as by `pentad verify`, and it leaves nothing behind. In seven more, the checkpoint store is down: 98 cells.

Some cells alone: `pytest -m slow PATH -k 'ZeRO-3' --faults 'SIGSTOP,two at once'`. A mesh takes 4 to 12 minutes; a
busy machine needs `-o faulthandler_timeout=3100`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from elastic_cases import CUT, EXPERT_PIPE, LINE, SMALL, SQUARE, TENSOR_PIPE, Outcome, assert_same, outcome
from fault_series import FAULTS, NODES, Series
from faults import process_faults
from multinode import Cluster, Run, multinode_cluster
from object_store import BUCKET, ObjectStore, served

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow]
STEPS_A_FAULT = 35
WORDS = (*SMALL, "checkpoint.every=10", "checkpoint.every_seconds=0", "elastic.replicate_every=3")
MESHES = {
    "1f1b": (*SQUARE, "schedule.name=1f1b"),
    "zb-h2": (*SQUARE, "schedule.name=zb-h2", "schedule.post_validation=true"),
    "dualpipe": (*LINE, "schedule.name=dualpipe"),
    "ZeRO-3": (*CUT, "schedule.name=1f1b"),
    "tp2 x pp2": (*TENSOR_PIPE, "schedule.name=1f1b"),
    "cp2 x pp2": ("mesh.pp=2", "mesh.cp=2", "schedule.microbatches=4", "schedule.name=1f1b"),
    "ep2 x pp2": (*EXPERT_PIPE, "schedule.name=1f1b"),
}
STORE_STEPS, STORE_PORT = 120, 9640
KILLS, MOST_BYTES_A_KILL = 100, 300_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with served(tmp_path_factory, STORE_PORT) as store:
        yield store


@pytest.fixture(scope="module")
def nodes(server: ObjectStore) -> Iterator[Cluster]:
    """A cluster whose head can be lost and come back, and whose processes have the credentials of the store."""
    with multinode_cluster(tables="disk") as cluster:
        yield cluster


def uninterrupted(nodes: Cluster, folder: Path, words: tuple[str, ...], steps: int) -> Outcome:
    nodes.resize(*NODES)
    run = Run(nodes, folder, *words)
    assert run.end(600) == 0, run.describe()
    return outcome(run, steps)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_that_suffers_every_fault_ends_with_the_same_bits(
    nodes: Cluster, tmp_path: Path, mesh: str, pytestconfig: pytest.Config
) -> None:
    chosen = pytestconfig.getoption("--faults", None)
    faults = [each.strip() for each in chosen.split(",")] if chosen else [*FAULTS]
    steps = STEPS_A_FAULT * (len(faults) + 1)
    words = (*WORDS, *MESHES[mesh], f"run.steps={steps}")
    expected = uninterrupted(nodes, tmp_path / "expected", words, steps)
    files = set(Path("/dev/shm").iterdir())
    series = Series(nodes, tmp_path / "run", words)
    try:
        for fault in faults:
            try:
                series.suffer(fault)
            except BaseException as error:
                error.add_note(f"{fault}, after {series.seconds}\n{series.run.describe()}")
                raise
            assert series.run.process.poll() is None, series.run.describe()
        series.ask("resume")
        assert series.run.end(600) == 0, series.run.describe()
        assert_same(series.run, expected, steps)
        series.run.assert_gone()
        left = {path for path in set(Path("/dev/shm").iterdir()) - files if "pentad" in path.name}
        assert not left
    finally:
        series.run.stop()
    print(mesh, series.seconds)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_store_that_is_down_costs_no_bit(nodes: Cluster, server: ObjectStore, tmp_path: Path, mesh: str) -> None:
    """A rank is lost while the store does not answer."""
    words = (*WORDS, *MESHES[mesh], f"run.steps={STORE_STEPS}")
    expected = uninterrupted(nodes, tmp_path / "expected", words, STORE_STEPS)
    series = Series(nodes, tmp_path / "run", (*words, f"checkpoint.path=s3://{BUCKET}/{tmp_path.name}"))
    try:
        series.run.wait_for_checkpoint(10)
        server.stop()
        try:
            # By then the newest copy in memory is newer than the newest checkpoint, which nobody can read.
            series.run.wait_for(lambda: series.run.events("checkpoint failed"))
            with series.recovers():
                series.signal(1)
            series.ask("pause")
        finally:
            server.start()  # also for the cells after this one
        series.ask("resume")
        assert series.run.end(600) == 0, series.run.describe()
        assert_same(series.run, expected, STORE_STEPS)
        series.run.assert_gone()
    finally:
        series.run.stop()


@pytest.mark.timeout(3000)
def test_a_hundred_kills_of_one_run_leave_no_growth(tmp_path: Path) -> None:
    """Its driver and the rank that is never killed have as many descriptors, threads and ports after them as before.
    Memory grows by what the driver keeps of each recovery and of the steps between: 0.13 MB each in 100 kills."""
    found = process_faults(tmp_path, KILLS, signal.SIGKILL, Random(0))
    print(found["growth"])
    assert (found["count"], found["failure"], found["exit_status"]) == (KILLS, "", 0)
    assert found["every_step_once"]
    assert not any(found["left_after_the_run"][kind] for kind in ("processes", "files"))
    for name in ("driver", "spared rank"):
        growth = found["growth"][name]
        assert all(abs(growth[kind]["growth_each"]) < 0.05 for kind in ("fds", "threads", "listening")), (name, growth)
        assert growth["rss"]["growth_each"] < MOST_BYTES_A_KILL, (name, growth)
    assert all(abs(growth["growth_each"]) < 0.2 for growth in found["growth"]["all"].values()), found["growth"]["all"]
