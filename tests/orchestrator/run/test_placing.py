"""Which ranks left by a former driver are taken over, and what is asked of a run's nodes and GPUs before it starts."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pentad.orchestrator.cluster.placement import Place
from pentad.orchestrator.cluster.worker import WorkerPlace
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import memories
from pentad.orchestrator.planning.formatting import format_bytes
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.run import driver, placing
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan
from pentad.workers.runtime.telemetry import GpuState


@pytest.mark.parametrize("bundles", [2, 8])
def test_the_places_of_another_mesh_are_not_adopted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bundles: int
) -> None:
    monkeypatch.setattr(placing, "can_adopt", lambda *_: True)
    config = load(None, [f"run.folder={tmp_path}", "mesh.dp=4", "schedule.microbatches=2", "batch.global_batch_size=8"])
    lease: Any = SimpleNamespace(ranks="", placement=lambda: SimpleNamespace(bundle_count=bundles))
    cluster: Any = None
    assert placing._left(config, make_plan(config, "cpu"), cluster, lease, "") is None


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Notes of a run on nodes with these labels, up to its first files; `parked`: its ranks are still there."""

    def do(*labels: dict[str, str], label: str = "rack", parked: bool = False) -> list[str]:
        notes = list[str]()
        given: Any = SimpleNamespace(note=notes.append)
        elsewhere = {"NodeID": "head", "Labels": {"row": "1"}}
        nodes: list[dict[str, Any]] = [{"NodeID": f"n{number}", "Labels": its} for number, its in enumerate(labels)]
        config = load(None, [f"run.folder={tmp_path}", "elastic.replicate_every=3", f"elastic.failure_domain={label}"])
        absent: Any = None
        room = placing.Room(absent, absent, make_plan(config, "cpu"), parked=given if parked else None)
        monkeypatch.setattr("ray.nodes", lambda: [elsewhere, *nodes])
        monkeypatch.setattr(placing, "bundle_places", lambda _: [Place(0, node["NodeID"]) for node in nodes])
        monkeypatch.setattr(driver, "reserved_or_left", lambda *_: nullcontext(room))
        monkeypatch.setattr(driver, "RunFolder", lambda *_: (_ for _ in ()).throw(InterruptedError))
        with pytest.raises(InterruptedError):
            driver.drive(config, room.plan, None, "", given, given, None)
        return notes

    return do


def test_a_failure_domain_that_no_node_with_ranks_has_is_refused_before_ranks_start(drive: Any) -> None:
    sentence = r"^elastic.failure_domain is row, a label that no node with ranks has: expected one that nodes"
    with pytest.raises(PentadError, match=sentence):
        drive({"rack": "r1"}, {}, label="row")
    (note,) = drive({"rack": "r1"}, {}, label="row", parked=True)
    assert note.endswith("no node with ranks has: each node counts as one"), "their state is worth more than the label"


def test_nodes_in_one_failure_domain_are_named_before_ranks_start(drive: Any) -> None:
    (note,) = drive({"rack": "r1"}, {"rack": "r1"})
    assert note == (
        "elastic.failure_domain is rack, which is r1 on all nodes with ranks: copies in memory would be lost with them"
    )
    assert not drive({"rack": "r1"}, {"rack": "r2"}) and not drive({"rack": "r1"}, {}), "there is another one"


GIB = 2**30


class BusyGroup:
    """Two ranks on a GPU each, of which other processes use `used` bytes until the second `until`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: Plan, used: Sequence[int | None], until: float) -> None:
        self.plan, self.now, self.used, self.until = plan, 0.0, used, until
        self.places = [WorkerPlace("n", "10.0.0.1", gpu, 1, "") for gpu in range(len(used))]
        self.actors = [SimpleNamespace(gpu_now=SimpleNamespace(remote=partial(self.read, gpu))) for gpu in range(2)]
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(placing, "time", clock)

    def read(self, gpu: int) -> GpuState | None:
        used = self.used[gpu] if self.now < self.until else 0
        return None if used is None else GpuState(memory_used=used, memory_total=10 * GIB)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def gather(self, refs: dict[int, GpuState | None], seconds: float) -> tuple[dict[int, GpuState | None], Any]:
        return refs, {}


def two_gpus(overrides: Sequence[str] = ()) -> Plan:
    config = load(None, ["mesh.dp=2", "mesh.pp=1", "schedule.name=1f1b", "schedule.microbatches=2", *overrides])
    return replace(make_plan(config, "cpu"), device="cuda")


@pytest.mark.parametrize("gpu", [0, 1])
def test_a_run_does_not_begin_on_gpus_that_other_processes_have_filled(
    monkeypatch: pytest.MonkeyPatch, gpu: int
) -> None:
    plan = two_gpus()
    needed = format_bytes(memories(plan)[gpu]["total"])
    group: Any = BusyGroup(monkeypatch, plan, [10 * GIB - 1 if each == gpu else 0 for each in range(2)], 1e9)
    phases = list[str]()
    with pytest.raises(PentadError) as caught:
        placing.require_gpu_memory(group, phases.append)
    expected = f"GPU {gpu} of node 10.0.0.1 has 1 B of 10.0 GiB free, and the plan needs {needed}: end what else runs"
    assert str(caught.value).startswith(expected)
    assert phases == ["waiting for GPU memory that other programs use"]
    assert group.now == pytest.approx(placing.FREED_SECONDS, abs=1)


@pytest.mark.parametrize(("used", "until"), [((10 * GIB, 10 * GIB), 5.0), ((0, 9 * GIB), 0.0), ((None, None), 1e9)])
def test_a_run_begins_once_its_gpus_have_the_memory_or_if_none_says_how_much_it_has(
    monkeypatch: pytest.MonkeyPatch, used: tuple[int | None, ...], until: float
) -> None:
    group: Any = BusyGroup(monkeypatch, two_gpus(), used, until)
    placing.require_gpu_memory(group, lambda phase: None)
    assert group.now == (until if until < 10 else 0.0)


def test_ranks_that_share_a_gpu_need_its_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = two_gpus()
    each = memories(plan)[0]["total"]
    group: Any = BusyGroup(monkeypatch, plan, [10 * GIB - int(1.5 * each)] * 2, 1e9)
    placing.require_gpu_memory(group, lambda phase: None)
    group.places = [place._replace(gpu=0) for place in group.places]
    with pytest.raises(PentadError, match=f"needs {format_bytes(2 * each)}"):
        placing.require_gpu_memory(group, lambda phase: None)
