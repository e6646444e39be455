"""The checks on nodes that are actors of this process: how a dead, a silent and an odd node are reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local_actors import LocalRay
from rich.console import Console

from pentad.orchestrator.cluster.placement import Place
from pentad.orchestrator.config.config import load
from pentad.orchestrator.doctor import nodes, ray_cluster
from pentad.orchestrator.doctor.finding import Check, Finding, FindingRow, Subject
from pentad.orchestrator.doctor.nodes import Examiner, examine_cluster, examine_joined
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.run import node_check
from pentad.orchestrator.run.node_check import reserve_checked
from pentad.schedules.ir.errors import PentadError
from pentad.workers.health.results import Link

NODES = 4  # with two ranks each


class Node(Examiner):
    """Nodes have 10 GB/s, except `slow`, and the right time and Python, except `late`."""

    slow, late = "", ""
    ray: LocalRay

    @property
    def name(self) -> str:
        return f"10.0.0.{self.ray.bundle // 2}"

    def network(self, device: str, address: str, rank: int, size: int) -> Finding:
        assert address.partition(":")[0] == "127.0.0.1" and 0 <= rank < size
        link = Link((rank + 1) % size, rank, 1e9 if self.name == self.slow else 10e9, 30e-6)
        return Finding("ok", "", figures={"links": [link._asdict()]})

    def clock(self) -> float:
        return super().clock() + 60 * (self.name == self.late)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRay]:
    """Replaces Ray with actors of this process, and the checks with three that cost nothing."""
    local, reserved = LocalRay(), list[object]()
    Node.ray, Node.slow, Node.late = local, "", ""

    def versions(_: Subject) -> Finding:
        return Finding("ok", "Python 2.7" if Node.ray.bundle // 2 == int(Node.late[-1:] or -1) else "Python 3.12")

    def reserve(*_: Any, **__: Any) -> object:
        reserved.append(object())
        return reserved[-1]

    checks = (
        Check("versions", versions),
        Check("disk", lambda subject: Finding("ok", subject.config.run.name), lambda _: 0.01),
        Check("ECC", lambda subject: Finding("ok", f"{len(subject.gpus)} GPUs")),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # examiners set it
    for module in (nodes, ray_cluster):
        monkeypatch.setattr(module, "ray", local)
    places = [Place(bundle, f"id{bundle // 2}") for bundle in range(2 * NODES)]
    for name, value in {
        "CHECKS": checks,
        "Examiner": Node,
        "START_SECONDS": 0.2,
        "reserve": reserve,
        "release": reserved.remove,
        "bundle_places": lambda placement: places,
        "strategy_of": lambda placement, bundle: bundle,
        "node_names": lambda: {f"id{number}": f"10.0.0.{number}" for number in range(NODES)},
    }.items():
        monkeypatch.setattr(nodes, name, value)
    monkeypatch.setattr("pentad.orchestrator.jobs.client_auth.is_open", lambda address: False)
    yield local
    assert not reserved, "room that was not given back"


def examined(device: str = "cpu", words: tuple[str, ...] = ("run.name=mine",)) -> dict[str, list[FindingRow]]:
    cluster: Any = SimpleNamespace(device=device, local=False, address="h:1", dashboard="http://h:8265")
    config = load(None, ["mesh.dp=2", "mesh.pp=4", *words])
    found = list(examine_joined(cluster, config, 0.0, lambda name, seconds: nullcontext()))
    return {rows[0].check: rows for rows in found}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_checks_are_made_on_each_node_once(ray: LocalRay, device: str) -> None:
    found = examined(device)
    assert list(found) == ["Ray", "nodes", "versions", "disk", "ECC", "network", "clock offset"]
    assert found["nodes"][0].finding.text == "4 for 8 ranks" and "a token is required" in found["Ray"][0].finding.text
    for name in ("versions", "disk", "ECC", "network", "clock offset"):
        assert [row.node for row in found[name]] == [f"10.0.0.{number}" for number in range(NODES)]
        assert all(row.finding.verdict == "ok" for row in found[name]), name
    assert found["disk"][0].finding.text == "mine"
    assert ray.needs == [{"num_cpus": 1, "num_gpus": int(device == "cuda")}]


def test_a_node_sees_the_gpus_of_all_its_ranks(ray: LocalRay, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def read(visible: str | None) -> tuple[()]:
        seen.append(visible)
        return ()

    monkeypatch.setattr("pentad.orchestrator.doctor.checks.read_gpus", read)
    examined("cuda")
    assert seen == ["0,1"] * NODES


def test_a_dead_and_a_silent_node_are_named_and_asked_no_more(ray: LocalRay) -> None:
    ray.faults = {2: "dead", 7: "silent"}  # one of the two ranks of a node
    found = examined()
    dead, silent = found["nodes"]
    assert (dead.node, silent.node) == ("10.0.0.1", "10.0.0.3")
    assert dead.finding.text.startswith("the check failed: ") and silent.finding.text == "no answer within 0 s"
    for name in ("versions", "disk", "ECC", "network", "clock offset"):
        assert [row.node for row in found[name]] == ["10.0.0.0", "10.0.0.2"]
        assert all(row.finding.verdict == "ok" for row in found[name])


def test_a_node_that_dies_during_a_check_is_left_out_of_the_next_ones(
    ray: LocalRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(subject: Subject) -> Finding:
        ray.faults |= {4: "dead"} if ray.bundle == 2 else {}
        return Finding("ok", "fine")

    monkeypatch.setattr(nodes, "CHECKS", (Check("versions", dies), Check("ECC", lambda _: Finding("ok", "fine"))))
    found = examined()
    assert [row.finding.verdict for row in found["versions"]] == ["ok", "ok", "failure", "ok"]
    assert [row.node[-1] for row in found["ECC"]] == ["0", "1", "3"] == [row.node[-1] for row in found["network"]]


def test_an_odd_node_is_told_from_the_others(ray: LocalRay) -> None:
    Node.slow, Node.late = "10.0.0.1", "10.0.0.2"
    odd = {(row.check, row.node): row.finding for rows in examined().values() for row in rows}
    odd = {where: finding for where, finding in odd.items() if finding.verdict != "ok"}
    assert set(odd) == {("versions", Node.late), ("network", Node.slow), ("clock offset", Node.late)}
    assert odd["versions", Node.late].text == "Python 2.7, but other nodes: Python 3.12"
    assert odd["network", Node.slow].text == "at most 1 GB/s from any other node: 10 GB/s is usual"
    assert odd["clock offset", Node.late].text == "60 s ahead of this machine"


def test_one_node_has_no_network_and_a_silent_dashboard_is_a_warning(
    ray: LocalRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(address: str) -> bool:
        raise PentadError(f"{address} does not answer")

    monkeypatch.setattr("pentad.orchestrator.jobs.client_auth.is_open", silent)
    monkeypatch.setattr(nodes, "bundle_places", lambda placement: [Place(0, "id0")])
    found = examined()
    assert [(row.node, row.finding.text) for row in found["network"]] == [("10.0.0.0", "one node")]
    assert found["Ray"][0].finding.verdict == "warning" and "does not answer" in found["Ray"][0].finding.text


def test_a_cluster_without_room_is_one_failure(ray: LocalRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise PentadError("mesh dp2 has 2 ranks and needs 2 CPUs, but the cluster has only 1 CPUs on 1 node")

    cluster = SimpleNamespace(device="cpu", local=False, address="h:1", dashboard="")
    monkeypatch.setattr(nodes, "reserve", full)
    monkeypatch.setattr(nodes, "launch", lambda *_: nullcontext(None))
    monkeypatch.setattr(nodes, "join", lambda *_: nullcontext(cluster))
    (ray_row,), (row,) = examine_cluster(
        load(None, ["mesh.dp=2", "mesh.pp=4"]), 0.0, lambda name, seconds: nullcontext()
    )
    assert "without a dashboard" in ray_row.finding.text
    assert (row.check, row.finding.verdict) == ("Ray", "failure") and "needs 2 CPUs" in row.finding.text


def test_a_run_is_placed_on_the_nodes_that_pass(
    ray: LocalRay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Node.slow, without = "10.0.0.1", list[list[str]]()
    display = Display(Console(width=200), "run", 1)
    cluster: Any = SimpleNamespace(device="cpu")
    released = list[object]()

    def place(left: Any) -> Any:
        without.append(list(left))
        if left:
            monkeypatch.setattr(nodes, "bundle_places", lambda _: [Place(0, "id0"), Place(4, "id2"), Place(6, "id3")])
        return f"room {len(without)}"

    monkeypatch.setattr(node_check, "release", released.append)
    monkeypatch.setattr(node_check, "node_names", nodes.node_names)
    room: Any
    room, check = reserve_checked(load(None, ["mesh.dp=2", "mesh.pp=4"]), cluster, display, place)
    assert (room, released, without) == ("room 2", ["room 1"], [[], ["id1"]])
    cause = "network: at most 1 GB/s from any other node: 10 GB/s is usual"
    assert (check.left_out, check.nodes) == ({"10.0.0.1": cause}, NODES)
    assert f"node 10.0.0.1 is left out: {cause}" in capsys.readouterr().out
