"""A worker group on one embedded cluster with room for four ranks, which run without torch."""

import os
import time
from pathlib import Path

import pytest
import ray
from shared_cluster import shared_cluster

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster import worker
from pentad.orchestrator.cluster.faults import Refusal, WorkerError
from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.placement import (
    all_but,
    bundle_places,
    find_placement,
    living_bundles,
    release,
    reserve,
)
from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.cluster.ray_head import psutil
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint.checkpoint import Start

FAKE = "fake_runner:FakeRunner"
ONE = ("mesh.pp=1", "schedule.name=1f1b")  # one rank, where a second would show nothing more


@pytest.fixture(scope="module")
def cluster() -> clusters.Cluster:
    return shared_cluster()


def config_of(behaviour: str, *overrides: str) -> RunConfig:
    sizes = ["model.layers=4", "schedule.microbatches=4", "batch.global_batch_size=8", "cluster.device=cpu", *overrides]
    return load(None, [f'data.path="{behaviour}"', *sizes])


def plan_of(behaviour: str = "fake:", *overrides: str) -> Plan:
    return make_plan(config_of(behaviour, *overrides), "cpu")


def start(plan: Plan, seconds: float = 30) -> WorkerGroup:
    return WorkerGroup.start(plan, reserve(plan.mesh, "cpu", 10, fixed=True), seconds, runner=FAKE)


def pids_of(group: WorkerGroup) -> list[int]:
    return [at.pid for at in group.places]


def assert_gone(pids: list[int], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def assert_all_free(seconds: float = 10) -> None:
    """Waits until all resources are free, which Ray registers with a delay."""
    until = time.monotonic() + seconds
    while (free := ray.available_resources().get("CPU")) != 4 and time.monotonic() < until:
        time.sleep(0.05)
    assert free == 4


@pytest.mark.slow
def test_every_rank_runs_every_step_and_reports_its_place(cluster: clusters.Cluster) -> None:
    plan = plan_of("fake:", "mesh.pp=2", "mesh.dp=2")
    with start(plan) as group:
        group.restore(Start())
        results = group.collect(group.submit_run(0, 5))
        assert [[result.step for result in of_rank] for of_rank in results] == [[0, 1, 2, 3, 4]] * 4
        assert [{span.rank for result in of_rank for span in result.spans} for of_rank in results] == [
            {0},
            {1},
            {2},
            {3},
        ]
        assert [len(of_rank[0].losses) for of_rank in results] == [0, 0, 4, 4]
        assert group.offsets == (0.0,) * 4
        assert len(set(pids_of(group))) == 4
        named = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
        assert named == {f"pentad/quickstart/dp{dp}-pp{pp}" for dp in (0, 1) for pp in (0, 1)}
        pids = pids_of(group)
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in (*pids, 0)} == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert_gone(pids)
    assert_all_free()
    group.stop()  # calling it again does nothing


@pytest.mark.slow
def test_pipeline_neighbours_get_neighbouring_gpus(cluster: clusters.Cluster) -> None:
    plan = make_plan(config_of("fake:", "mesh.pp=2"), "cuda")
    group = WorkerGroup(plan, reserve(plan.mesh, "cuda", 10, fixed=True), generation=1, runner=FAKE)
    try:
        group._create(time.monotonic() + 30)
        assert [at.gpu for at in group.places] == [5, 7]  # Ray assigns bundles 7 and 5
    finally:
        group.stop(kill=True)


@pytest.mark.parametrize(("visible", "given", "index"), [(None, [3], 3), ("7,5,6,4", ["6"], 2), ("1", ["1"], 0)])
def test_the_cuda_index_of_a_gpu_is_its_position_among_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, given: list, index: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: given)
    assert worker._visible_index(-1) == index


@pytest.mark.slow
def test_calls_run_in_order_and_statuses_are_updated_every_second_however_short_they_are(
    cluster: clusters.Cluster,
) -> None:
    ticks: list[dict[int, Status]] = []
    with start(plan_of("fake:seconds=0.05", *ONE)) as group:
        calls = [group.submit_run(0, 2), group.submit_run(2, 1), group.submit_run(3, 3)]
        assert not group.is_ready(calls[2])
        done = [[result.step for result in group.collect(call)[0]] for call in calls]
        assert done == [[0, 1], [2], [3, 4, 5]]
        for step in range(6, 60):
            group.collect(group.submit_run(step, 1), tick=ticks.append)
    assert len(ticks) >= 2


@pytest.mark.slow
def test_statuses_of_a_busy_rank_are_read_without_waiting(cluster: clusters.Cluster) -> None:
    with start(plan_of("fake:seconds=1.0,rank=0,step=0,how=hang", *ONE)) as group:
        group.submit_run(0, 1)
        seen: dict[int, Status] = {}
        until = time.monotonic() + 20
        while not (seen and seen[0].instruction) and time.monotonic() < until:
            started = time.monotonic()
            seen = group.statuses()
            assert time.monotonic() - started < 0.5
            time.sleep(0.05)
        stream = group.plan.program.streams[0]
        assert seen[0].instruction == str(stream[2]).partition(" after ")[0]
        assert (seen[0].step, seen[0].generation) == (0, 1)
        group.stop(kill=True)


def run_until_it_fails(plan: Plan) -> tuple[PentadError, list[int], float]:
    """The error of a run of six steps in two calls, the ranks' PIDs, and the seconds taken by the last call."""
    with start(plan) as group:
        group.collect(group.submit_run(0, 1))
        began = time.monotonic()
        with pytest.raises(PentadError) as caught:
            group.collect(group.submit_run(1, 5))
        return caught.value, pids_of(group), time.monotonic() - began


def third_instruction(plan: Plan, rank: int) -> str:
    """The instruction at which the fake runner injects its fault."""
    return str(plan.program.streams[rank][2]).partition(" after ")[0]


@pytest.mark.slow
def test_a_killed_rank_is_named_within_seconds_and_the_others_are_stopped(cluster: clusters.Cluster) -> None:
    plan = plan_of("fake:rank=1,step=3,how=die", "mesh.pp=2")
    error, pids, seconds = run_until_it_fails(plan)
    assert isinstance(error, WorkerError)
    assert error.rank == 1
    assert str(error) == (
        f"rank 1 (dp0 pp1, node 127.0.0.1, pid {pids[1]}) died at step 3 in {third_instruction(plan, 1)}: "
        "its process was killed or crashed"
    )
    assert seconds < 10
    assert_gone(pids)
    assert_all_free()


@pytest.mark.slow
def test_an_exception_of_a_rank_is_reported_with_its_instruction(cluster: clusters.Cluster) -> None:
    plan = plan_of("fake:rank=0,step=1,how=raise", *ONE)
    error, pids, seconds = run_until_it_fails(plan)
    assert isinstance(error, WorkerError)
    assert str(error) == (
        f"rank 0 (dp0 pp0, node 127.0.0.1, pid {pids[0]}) failed at step 1 in {third_instruction(plan, 0)}: "
        "ZeroDivisionError: no such number"
    )
    assert "fake_runner.py" in error.detail  # the traceback
    assert seconds < 10
    assert_gone(pids)


@pytest.mark.slow
def test_a_user_error_found_by_a_rank_is_reported_verbatim(cluster: clusters.Cluster) -> None:
    error, pids, _ = run_until_it_fails(plan_of("fake:rank=0,step=1,how=mistake", *ONE))
    assert type(error) is Refusal
    assert str(error) == "data.path is wrong: expected a right one"
    assert_gone(pids)


@pytest.mark.slow
def test_a_runner_that_cannot_be_imported_is_reported(cluster: clusters.Cluster) -> None:
    plan = plan_of("fake:", *ONE)
    with pytest.raises(WorkerError, match=r"^rank 0 \(dp0 pp0, node .*\) failed: ModuleNotFoundError: .*'nowhere'$"):
        WorkerGroup.start(plan, reserve(plan.mesh, "cpu", 10, fixed=True), 30, runner="nowhere:Runner")
    assert_all_free()


@pytest.mark.slow
def test_a_folder_missing_on_a_node_is_reported(cluster: clusters.Cluster, tmp_path: Path) -> None:
    with start(plan_of("fake:", *ONE)) as group:
        group.check_folder(tmp_path, "run.folder")
        with pytest.raises(
            PentadError,
            match=r"which rank 0 \(dp0 pp0, .*\) does not see \(No such file or directory\): expected storage",
        ):
            group.check_folder(tmp_path / "elsewhere", "run.folder")


@pytest.mark.slow
def test_a_mesh_too_large_for_the_cluster_is_refused_at_once(cluster: clusters.Cluster) -> None:
    began = time.monotonic()
    with pytest.raises(PentadError) as caught:
        reserve(Mesh(dp=2, pp=4), "cpu", 60, fixed=True)
    assert time.monotonic() - began < 5
    assert str(caught.value) == "mesh dp2 x pp4 has 8 ranks and needs 8 CPUs, but the cluster has only 4 CPUs on 1 node"
    with pytest.raises(
        PentadError, match="needs 6 GPUs and 6 CPUs, but the cluster has only 4 GPUs and 4 CPUs on 1 node"
    ):
        reserve(Mesh(pp=6), "cuda", 60, fixed=True)


@pytest.mark.slow
def test_a_placement_timeout_is_reported_and_releases_the_placement(cluster: clusters.Cluster) -> None:
    held = reserve(Mesh(pp=3), "cpu", 10, fixed=True)
    try:
        with pytest.raises(PentadError) as caught:
            reserve(Mesh(pp=2), "cpu", 1, fixed=True)
    finally:
        release(held)
    assert str(caught.value).startswith(
        "mesh pp2 has 2 ranks and needs 2 CPUs, but within cluster.start_timeout_seconds = 1 only "
    )
    assert "of 4 CPUs on 1 node were free" in str(caught.value)
    assert_all_free()


@pytest.mark.slow
def test_room_elsewhere_is_found_again_by_its_name(cluster: clusters.Cluster) -> None:
    name = "pentad/test/room"
    room = reserve(Mesh(pp=2), "cpu", 10, fixed=True, detached=name)
    try:
        nodes = bundle_places(room)
        node = nodes[1].node
        other = room.reserve_elsewhere([1], "cpu", node)
        waiting = room.reserve_elsewhere([0], "cpu", all_but([node]))
        assert other.wait(10) and not waiting.wait(0.2)
        room.move([1], other)
        found = find_placement(name)
        assert found is not None and found.bundle_count == 2 and found.number == 2
        assert [found.find(bundle)[0].id for bundle in (0, 1)] == [room.group.id, other.id]
        assert bundle_places(found) == nodes and living_bundles(found) == {0: node, 1: node}
        assert found.move_back([0, 1]) and not found.move_back([0, 1])
    finally:
        release(room)
    assert find_placement(name) is None
    assert_all_free()


@pytest.mark.slow
def test_nodes_that_are_left_out_have_no_room(cluster: clusters.Cluster) -> None:
    nodes = [node["NodeID"] for node in ray.nodes()]
    with pytest.raises(PentadError, match=r"needs 2 CPUs, but the cluster has only 0 CPUs on 0 nodes$"):
        reserve(Mesh(pp=2), "cpu", 60, fixed=True, without=nodes)


@pytest.mark.slow
def test_ranks_that_do_not_start_in_time_are_named_and_killed(
    cluster: clusters.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node and the process are named once known, however long a busy machine takes to create them."""
    words = "^cluster.start_timeout_seconds was too short: {0}, {1} did not start within it$"
    with pytest.raises(PentadError, match=words.format(r"rank 0 \(dp0 pp0\)", r"rank 1 \(dp0 pp1\)")):
        start(plan_of("fake:slow=300", "mesh.pp=2"), seconds=0)
    create, where = WorkerGroup._create, r"node 127\.0\.0\.1, pid \d+"
    monkeypatch.setattr(WorkerGroup, "_create", lambda group, deadline: create(group, deadline + 120))
    named = rf"rank 0 \(dp0 pp0, {where}\)", rf"rank 1 \(dp0 pp1, {where}\)"
    with pytest.raises(PentadError, match=words.format(*named)):
        start(plan_of("fake:slow=300", "mesh.pp=2"), seconds=0.5)
    assert_all_free()
