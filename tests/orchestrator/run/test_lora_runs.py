"""Runs with adapters on Ray: stopped, resumed or with lost ranks, they end with the bits of a run without faults."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_cases import LINE, SQUARE, Reference, Start, assert_recovered, assert_same, outcome, references, started
from multinode import Cluster, Run, kill

from pentad.orchestrator.control.control_client import connect

STEPS = 40
SMALL = (
    *("model.layers=4", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn=64", "model.vocab=300"),
    *("batch.global_batch_size=8", "batch.sequence_length=32", "cluster.device=cpu"),
    *("cluster.auth=disabled", "cluster.start_timeout_seconds=150", "elastic.hang_seconds=3"),
    f"run.steps={STEPS}",
)
CUT = (*SQUARE, "zero.stage=3")  # replicas hold shards of frozen weights, too
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def adapters(nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The overrides that train adapters of a base model, which is trained here."""
    nodes.resize(2, 2, 2)
    base = Run(nodes, tmp_path_factory.mktemp("base"), *SMALL, *SQUARE, "schedule.name=1f1b", "run.steps=2")
    assert base.end() == 0, base.describe()
    return "lora.rank=2", "lora.targets=all-linear", f"run.init_from={base.folder}", f"optimizer.decay_steps={STEPS}"


@pytest.fixture
def start_run(nodes: Cluster, adapters: tuple[str, ...], tmp_path: Path) -> Iterator[Start]:
    with started(nodes, tmp_path, (*SMALL, *adapters)) as do:
        yield do


@pytest.fixture(scope="module")
def reference(nodes: Cluster, adapters: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return references(nodes, tmp_path_factory, (*SMALL, *adapters), STEPS)


def test_a_resume_keeps_the_bits_of_adapters(start_run, reference):
    mesh = (*SQUARE, "schedule.name=zb-h2")
    expected = reference(*mesh)
    stopped = start_run(*mesh, "run.steps=7", name="stopped")
    assert stopped.end() == 0, stopped.describe()
    resumed = start_run(*mesh, name="stopped")
    assert resumed.end() == 0, resumed.describe()
    assert_same(resumed, expected, STEPS)
    assert all("lora_" in name for name in expected[1] if name.startswith(("model.", "optimizer.")))


@pytest.mark.parametrize(
    ("schedule", "mesh", "rank", "how"),
    [
        ("zb-h2", SQUARE, 1, signal.SIGKILL),
        ("dualpipe", LINE, 1, signal.SIGKILL),
        ("dualpipe", LINE, 2, signal.SIGSTOP),
    ],
)
def test_a_lost_rank_whose_adapters_survive_costs_no_bit(nodes, start_run, reference, schedule, mesh, rank, how):
    mesh = (*mesh, f"schedule.name={schedule}")
    expected = reference(*mesh)
    nodes.resize(2, 2, 2)
    run = start_run(*mesh)
    run.wait_for_step(4)
    run.signal_ranks(rank, how=how)
    assert_recovered(run, "repair")
    assert_same(run, expected, STEPS)


@pytest.mark.parametrize(("mesh", "rank"), [(LINE, 1), (CUT, 3)])
def test_lost_adapters_are_restored_from_the_newest_checkpoint(nodes, start_run, reference, mesh, rank):
    mesh = (*mesh, "schedule.name=1f1b")
    expected = reference(*mesh)
    nodes.resize(2, 2, 2)
    run = start_run(*mesh, "checkpoint.every=10")
    run.wait_for_checkpoint(10)
    run.signal_ranks(rank)
    assert_recovered(run, "checkpoint")
    assert_same(run, expected, STEPS)


@pytest.mark.parametrize("mesh", [SQUARE, CUT])
def test_a_mesh_with_adapters_shrinks_and_grows_back(nodes, start_run, reference, mesh):
    """Sums have another order on the smaller mesh; afterwards every rank has the frozen weights of the base again."""
    mesh = (*mesh, "schedule.name=1f1b")
    expected = reference(*mesh)
    nodes.resize(2, 2)
    elastic = ("checkpoint.every=10", "elastic.min_ranks=2", "elastic.wait_seconds=1", "elastic.hang_seconds=20")
    run = start_run(*mesh, *elastic)
    run.wait_for(lambda: run.events("place"))
    lost = nodes.node_of(run.pids()[3])
    with connect(run.folder) as client:
        run.wait_for_step(12)
        kill(lost)
        run.wait_for(lambda: run.events("lost"))
        client.request("pause", 120)
        assert len(run.events("recovered")) == 1
        nodes.resize(2, 2)
        run.wait_for(lambda: len(run.events("recovered")) == 2)
        client.request("resume")
    assert_recovered(run, "shrink", "grow")
    actual, state = outcome(run, STEPS)
    assert actual == [pytest.approx(pair, rel=1e-4) for pair in expected[0]], run.describe()
    assert state.keys() == expected[1].keys()
