"""Which ranks left by a former driver are taken over, and what is said about a run's nodes before it starts."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pentad.orchestrator.cluster.placement import Place
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.run import driver, placing
from pentad.schedules.ir.errors import PentadError


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
