"""The checks on the nodes of a Ray cluster: all are made there, and who falls out of line is named."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import ray
from shared_cluster import shared_cluster

from pentad.orchestrator.cli.show_doctor import merged
from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.config.config import load
from pentad.orchestrator.doctor.examine import NAMES
from pentad.orchestrator.doctor.finding import Finding, Row
from pentad.orchestrator.doctor.nodes import compared, examine_cluster, examine_joined
from pentad.orchestrator.doctor.ray_cluster import judge_clock, judge_ray
from pentad.workers.health.burn import Burned

OK = Finding("ok", "fine")
UNIT = Burned("GPU 0", "NVIDIA H200", "a", 100, 0, 0.1, 660e12)


def quiet(name: str, seconds: float) -> nullcontext[None]:
    return nullcontext()


@pytest.fixture(scope="module")
def cluster() -> clusters.Cluster:
    return shared_cluster()


@pytest.mark.timeout(180)
def test_every_check_is_made_on_the_nodes_of_the_run(cluster: clusters.Cluster, tmp_path: Path) -> None:
    overrides = ["cluster.address=auto", "cluster.device=cpu", "mesh.pp=2", f"run.folder={tmp_path}"]
    found = list(examine_joined(cluster, load(None, overrides), 0.0, quiet))
    assert [rows[0].check for rows in found] == list(NAMES)
    assert all(len(rows) == 1 and rows[0].node for rows in found[1:])  # two ranks on one node
    by_name = {row.check: row.finding for rows in found for row in rows}
    assert "a token is required" in by_name["Ray"].text
    assert by_name["clock offset"].verdict == "ok" and by_name["disk"].figures["write"] > 0
    assert not [each for each in ray.util.placement_group_table().values() if each["state"] == "CREATED"]


def test_a_cluster_that_does_not_answer_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pentad.orchestrator.cluster.local_head._require_no_session", lambda address: None)
    ((row,),) = examine_cluster(load(None, ["cluster.address=127.0.0.1:1"]), 0.0, quiet)
    assert row.finding.verdict == "failure"
    assert row.finding.text.startswith("cluster.address is '127.0.0.1:1', where no Ray cluster answers")


def test_a_node_with_other_versions_is_named() -> None:
    found = compared("versions", {"a": OK, "b": Finding("ok", "old"), "c": OK})
    assert found["a"] == found["c"] == OK
    assert found["b"].verdict == "failure" and "most nodes have fine" in found["b"].text


def test_a_node_with_a_slow_or_wrong_gpu_is_named() -> None:
    def burned(**changed: object) -> Finding:
        return Finding("ok", "fast", figures={"units": [UNIT._replace(**changed)._asdict()]})  # type: ignore[arg-type]

    found = compared("burn", {"a": burned(), "b": burned(), "c": burned(rate=5e14), "d": burned(digest="b")})
    assert [each.verdict for each in found.values()] == ["ok", "ok", "failure", "failure"]
    assert "8 % slower" in found["c"].text and "other bits" in found["d"].text
    assert found["c"].remedy and found["c"].figures["units"]


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
def test_an_open_or_silent_cluster_is_warned_of(url: str, dashboard: str, verdict: str) -> None:
    assert judge_ray("Ray 2.60 at 10.0.0.1:6379", url, dashboard).verdict == verdict  # type: ignore[arg-type]


def test_nodes_that_are_fine_share_a_line() -> None:
    rows = [Row("ECC", OK, node) for node in "abc"] + [Row("ECC", Finding("failure", "bad", "mend"), "d")]
    assert [(row.node, row.finding.text) for row in merged(rows)] == [("3 nodes", "fine"), ("d", "bad")]
    different = [Row("memory", Finding("ok", f"{node} free"), node) for node in "ab"]
    assert [(row.node, row.finding.text) for row in merged(different)] == [("2 nodes", "a free on a")]
