"""The checks on the nodes of a Ray cluster: all are made there, and outliers are named."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray
from odd_examiner import OddExaminer
from shared_cluster import shared_cluster

from pentad.orchestrator.cli.show_doctor import merged
from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster.placement import Place
from pentad.orchestrator.config.config import load
from pentad.orchestrator.doctor import disk, nodes
from pentad.orchestrator.doctor.compare import SAME, compared
from pentad.orchestrator.doctor.examine import NAMES
from pentad.orchestrator.doctor.finding import Finding, FindingRow
from pentad.orchestrator.doctor.nodes import examine_cluster, examine_joined
from pentad.orchestrator.doctor.ray_cluster import Dashboard, judge_clock, judge_ray
from pentad.workers.health.results import Burned, Link

OK = Finding("ok", "fine")
UNIT = Burned("GPU 0", "NVIDIA H200", "a", 100, 0, 0.1, 660e12)


def quiet(name: str, seconds: float) -> nullcontext[None]:
    return nullcontext()


@pytest.fixture(scope="module")
def cluster() -> clusters.Cluster:
    return shared_cluster()


@pytest.fixture(autouse=True)
def little_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "BLOCKS", 1)


def examined(cluster: clusters.Cluster, folder: Path, ranks: int) -> dict[str, list[FindingRow]]:
    overrides = ["cluster.address=auto", "cluster.device=cpu", f"mesh.pp={ranks}", f"run.folder={folder}"]
    found = list(examine_joined(cluster, load(None, overrides), 0.0, quiet))
    assert not [each for each in ray.util.placement_group_table().values() if each["state"] == "CREATED"]
    return {rows[0].check: rows for rows in found}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_check_is_made_on_the_nodes_of_the_run(cluster: clusters.Cluster, tmp_path: Path) -> None:
    found = examined(cluster, tmp_path, 2)
    assert list(found) == list(NAMES)
    assert all(len(rows) == 1 for rows in found.values())  # two ranks on one node
    by_name = {name: rows[0].finding for name, rows in found.items()}
    assert "a token is required" in by_name["Ray"].text and by_name["nodes"].text == "1 for 2 ranks"
    assert by_name["clock offset"].verdict == "ok" and by_name["disk"].figures["write"] > 0
    assert by_name["network"].verdict == by_name["GPUs"].verdict == "not applicable"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_odd_and_a_dead_node_are_named(
    cluster: clusters.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks on one machine pose as nodes."""
    monkeypatch.setattr(nodes, "bundle_places", lambda group: [Place(bundle, str(bundle)) for bundle in range(4)])
    monkeypatch.setattr(nodes, "node_names", lambda: {str(bundle): f"10.0.0.{bundle}" for bundle in range(4)})
    monkeypatch.setattr(nodes, "Examiner", OddExaminer)
    found = examined(cluster, tmp_path, 4)
    (dead,) = found.pop("nodes")
    assert dead.finding.verdict == "failure" and "the check failed" in dead.finding.text
    assert all(len(rows) == 3 for name, rows in found.items() if name != "Ray")
    odd = {row.check: row for rows in found.values() for row in rows if row.finding.verdict == "failure"}
    assert set(odd) == {"versions", "network", "clock offset"}
    assert len({dead.node, *(row.node for row in odd.values())}) == 2
    assert odd["versions"].finding.text.startswith("Python 2.7, but other nodes: Python 3")
    assert odd["network"].finding.text == "at most 1 GB/s from any other node: 10 GB/s is usual"
    assert odd["clock offset"].finding.text == "60 s ahead of this machine"


def test_a_cluster_that_does_not_answer_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pentad.orchestrator.cluster.local_head._require_no_session", lambda address: None)
    ((row,),) = examine_cluster(load(None, ["cluster.address=127.0.0.1:1"]), 0.0, quiet)
    assert row.finding.verdict == "failure"
    assert row.finding.text.startswith("cluster.address is '127.0.0.1:1', where no Ray cluster answers")


@pytest.mark.parametrize("check", SAME)
def test_a_node_with_other_versions_is_named(check: str) -> None:
    found = compared(check, {"a": OK, "b": Finding("ok", "old"), "c": OK})
    assert found["a"] == found["c"] == OK
    assert found["b"].verdict == SAME[check] and found["b"].text == "old, but other nodes: fine"


def test_a_node_with_a_slow_or_wrong_gpu_is_named() -> None:
    def burned(**changed: Any) -> Finding:
        units = [UNIT._asdict(), {**UNIT._asdict(), "unit": "GPU 1", **changed}]
        return Finding("ok", "fast", figures={"seconds": 30.0, "units": units})

    found = compared("burn", {"a": burned(), "b": burned(), "c": burned(rate=6e14), "d": burned(digest="b")})
    assert [each.verdict for each in found.values()] == ["ok", "ok", "failure", "failure"]
    assert found["c"].text == "GPU 1 is 9% slower than its peers"
    assert found["d"].text == "GPU 1 computes wrong results: other bits than 7 of 8"
    assert found["c"].remedy and found["c"].figures["units"]


def test_two_nodes_that_are_wrong_or_slow_all_over_are_told_from_each_other() -> None:
    def burned(**changed: Any) -> Finding:
        return Finding("ok", "", figures={"seconds": 30.0, "units": [{**UNIT._asdict(), **changed}] * 2})

    found = compared("burn", {"a": burned(), "b": burned(rate=6e14)})
    assert [each.verdict for each in found.values()] == ["ok", "failure"]
    found = compared("burn", {"a": burned(), "b": burned(digest="b")})
    assert all("or one of its peers computes wrong results" in each.text for each in found.values())


def test_cores_are_not_compared_between_nodes() -> None:
    units = [UNIT._replace(unit=f"CPU {core}", model="")._asdict() for core in range(2)]
    found = {"a": Finding("ok", "", figures={"seconds": 1.0, "units": units})}
    found["b"] = Finding("ok", "", figures={"seconds": 1.0, "units": [{**unit, "digest": "b"} for unit in units]})
    assert compared("burn", found) == found


def test_a_node_whose_gpus_are_badly_connected_is_named() -> None:
    def linked(bandwidth: float) -> Finding:
        link = Link(0, 1, bandwidth, 6e-6, has_peer_access=True)
        return Finding("ok", "", figures={"links": [link._asdict(), link._replace(source=1, target=0)._asdict()]})

    found = compared("links", {"a": linked(380e9), "b": linked(25e9), "c": linked(381e9)})
    assert [each.verdict for each in found.values()] == ["ok", "failure", "ok"]
    assert found["b"].text == "slow from GPU 0 to 1 (25 GB/s) and 1 to 0 (25 GB/s): 380 GB/s is usual"


def test_one_slow_link_is_told_from_a_slow_node() -> None:
    def node(*sources: tuple[int, float]) -> Finding:
        return Finding("ok", "", figures={"links": [Link(source, 0, rate, 3e-5)._asdict() for source, rate in sources]})

    found = compared("network", {"a": node((1, 10e9), (2, 2e9)), "b": node((0, 10e9), (2, 9e9)), "c": node((1, 9e9))})
    assert [each.verdict for each in found.values()] == ["warning", "ok", "ok"]
    assert found["a"].text == "slow from c (2 GB/s): 10 GB/s is usual"
    lost = Finding("failure", "no exchange with other nodes", "mend")
    assert compared("network", {"a": lost, "b": node((2, 1e9)), "c": node((1, 1e9))})["a"] == lost


CLOCKS = [(0.05, 0.001, "ok"), (-0.5, 0.001, "warning"), (0.5, 1.0, "ok"), (11.0, 0.001, "failure")]


@pytest.mark.parametrize(("offset", "delay", "verdict"), CLOCKS)
def test_a_clock_that_is_surely_wrong_is_named(offset: float, delay: float, verdict: str) -> None:
    found = judge_clock(offset, delay)
    assert found.verdict == verdict
    assert ("ahead of" if offset > 0 else "behind") in found.text


@pytest.mark.parametrize(
    ("url", "dashboard", "verdict"),
    [
        ("http://10.0.0.1:8265", "protected", "ok"),
        ("http://10.0.0.1:8265", "open", "warning"),
        ("http://127.0.0.1:8265", "open", "ok"),
        ("http://10.0.0.1:8265", "silent", "warning"),
        ("", "none", "warning"),
    ],
)
def test_an_open_or_silent_cluster_is_warned_of(url: str, dashboard: Dashboard, verdict: str) -> None:
    assert judge_ray("Ray 2.60 at 10.0.0.1:6379", url, dashboard).verdict == verdict


def test_nodes_that_are_fine_share_a_line() -> None:
    rows = [FindingRow("ECC", OK, node) for node in "abc"] + [FindingRow("ECC", Finding("failure", "bad", "mend"), "d")]
    assert [(row.node, row.finding.text) for row in merged(rows)] == [("3 nodes", "fine"), ("d", "bad")]
    different = [FindingRow("memory", Finding("ok", f"{node} free"), node) for node in "ab"]
    assert [(row.node, row.finding.text) for row in merged(different)] == [("2 nodes, e.g. a", "a free")]
    assert merged([FindingRow("ECC", Finding("not applicable", "no GPU"))]) == []
