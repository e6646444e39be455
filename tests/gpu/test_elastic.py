"""The laws of elastic restart on GPUs: whole runs of `pentad train`, with nodes that have GPUs of one machine each."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from elastic_cases import (
    LINE,
    SCHEDULES,
    SQUARE,
    Reference,
    Start,
    assert_recovered,
    assert_same,
    outcome,
    references,
    started,
)
from gpus import RANKS_A_GPU, num_places
from multinode import Cluster, kill, multinode_cluster

from pentad.orchestrator.control.control_client import connect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300 * RANKS_A_GPU),
    pytest.mark.skipif(num_places() < 4, reason="four GPUs are needed"),
]
STEPS = 300
GPUS = min(4, max(1, torch.cuda.device_count()))
FOUR = (GPUS,) * (4 // GPUS)  # ranks of each node, up to four in all
SMALL = (
    "model.layers=4",
    "model.hidden=128",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=256",
    "model.vocab=300",
    "batch.global_batch_size=8",
    "batch.sequence_length=64",
    f"run.steps={STEPS}",
    "checkpoint.every=50",
    "elastic.hang_seconds=3",
    "cluster.device=cuda",
    "cluster.auth=disabled",
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with multinode_cluster(places=4) as cluster:
        yield cluster


@pytest.fixture
def start(nodes: Cluster, tmp_path: Path) -> Iterator[Start]:
    with started(nodes, tmp_path, SMALL) as do:
        yield do


@pytest.fixture(scope="module")
def reference(nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return references(nodes, tmp_path_factory, SMALL, STEPS, FOUR)


@pytest.mark.parametrize(("schedule", "rank", "how"), [("1f1b", 1, signal.SIGKILL), ("dualpipe", 2, signal.SIGSTOP)])
def test_a_run_with_a_lost_rank_ends_with_the_bits_of_one_without(nodes, start, reference, schedule, rank, how):
    nodes.resize(*FOUR)
    words = (*SCHEDULES[schedule], f"schedule.name={schedule}")
    expected = reference(*words)
    run = start(*words)
    run.wait_for_step(20)
    run.signal_ranks(rank, how=how)
    assert_recovered(run, "repair")
    assert_same(run, expected, STEPS)


@pytest.mark.parametrize("ranks", [(2,), (0, 1, 2, 3)])
def test_stages_that_are_lost_come_back_from_the_newest_checkpoint(nodes, start, reference, ranks):
    nodes.resize(*FOUR)
    words = (*LINE, "schedule.name=zb-h2")
    expected = reference(*words)
    run = start(*words)
    run.wait_for_checkpoint(50)
    run.signal_ranks(*ranks)
    assert_recovered(run, "checkpoint")
    assert run.events("recovered")[0]["step"] >= 50
    assert_same(run, expected, STEPS)


def test_a_node_that_is_to_go_is_left_with_nothing_lost(nodes, start, reference):
    nodes.resize(1, 1, 1)
    words = ("mesh.dp=2", "mesh.pp=1", "schedule.microbatches=4", "schedule.name=1f1b")
    expected = reference(*words)
    run = start(*words)
    run.wait_for_step(4)
    with connect(run.folder) as client:  # notices are polled every two seconds: the run must not be over by then
        client.request("pause")
        going = nodes.node_of(run.pids()[0])
        nodes.drain(going, 10)
        run.wait_for(lambda: run.events("lost"))
        kill(going)
        client.request("resume")
    assert_recovered(run, "repair")
    assert {(row["fault"], row["detector"]) for row in run.events("lost")} == {("drain", "notice")}
    assert run.events("recovered")[0]["steps_replayed"] == 0
    assert_same(run, expected, STEPS)


def test_a_mesh_that_lacks_places_shrinks_and_grows_back(nodes, start, reference):
    nodes.resize(2, 2)
    words = (*SQUARE, "schedule.name=1f1b", "elastic.min_ranks=2", "elastic.wait_seconds=1")
    expected = reference(*words)
    run = start(*words)
    run.wait_for_step(60)
    lost = nodes.node_of(run.pids()[3])
    with connect(run.folder) as client:
        kill(lost)
        run.wait_for(lambda: run.events("lost"))
        client.request("pause", 120)  # answered once the mesh has shrunk, before it runs a step
        assert len(run.events("recovered")) == 1
        nodes.resize(2, 2)
        run.wait_for(lambda: len(run.events("recovered")) == 2)
        client.request("resume")
    assert_recovered(run, "shrink", "grow")
    assert [row["mesh"] for row in run.events("recovered")] == ["pp2", "dp2 x pp2"]
    got, _ = outcome(run, STEPS)
    assert got[:50] == expected[0][:50]
    assert [loss for loss, _ in got] == pytest.approx([loss for loss, _ in expected[0]], rel=3e-2)
