"""Nodes that fail the check before a run (cluster.check) are left out and named."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import pytest
from elastic_cases import SMALL, Start
from multinode import Cluster

from pentad.orchestrator.doctor.finding import Finding, FindingRow
from pentad.orchestrator.run import node_check
from pentad.orchestrator.run.node_check import failures, place_on_good_nodes
from pentad.schedules.ir.errors import PentadError

BAD = Finding("failure", "GPU 1 is 9% slower than its peers", "look")
WARNING = Finding("warning", "slow for checkpoints", "mend")
CAUSES = {
    "SlowNode": "network: at most 1 GB/s from any other node: 10 GB/s is usual",
    "WrongNode": "burn: GPU 1 computes wrong results: other bits than 3 of 4",
}
NAMES = {"id-a": "a", "id-b": "b", "id-c": "c", "id-d": "d"}


class Nodes:
    """Places two ranks on the first two nodes that are not left out; nodes in `bad` fail the check."""

    def __init__(self, patch: pytest.MonkeyPatch, *bad: str) -> None:
        self.bad, self.reserved = bad, list[Any]()
        patch.setattr(node_check, "release", self.reserved.remove)

    def place(self, without: Collection[str]) -> Any:
        found = [node for node in NAMES if node not in without][:2]
        if len(found) < 2:
            raise PentadError("no room")
        self.reserved.append(found)
        return found

    def examine(self, placement: Any) -> list[FindingRow]:
        nodes = [NAMES[node] for node in placement]
        rows = [FindingRow("burn", BAD if node in self.bad else Finding("ok", "fast"), node) for node in nodes]
        return [FindingRow("Ray", WARNING), *rows, FindingRow("disk", WARNING, nodes[0])]

    def result(self) -> Any:
        return place_on_good_nodes(self.place, self.examine, lambda: NAMES)


def test_a_node_that_fails_is_left_out_and_a_warning_leaves_none_out(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch, "a", "b")
    placement, check = nodes.result()
    assert placement == ["id-c", "id-d"] and nodes.reserved == [placement]
    assert check.left_out == dict.fromkeys("ab", "burn: GPU 1 is 9% slower than its peers") and check.nodes == 4
    assert [(each["check"], each["node"]) for each in check.facts["warnings"]] == [("Ray", ""), ("disk", "c")]


def test_without_enough_good_nodes_the_run_is_refused_and_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch, "a", "c", "d")
    with pytest.raises(PentadError, match=r"^cluster.check leaves out a \(burn: GPU 1 is 9% slower") as caught:
        nodes.result()
    assert "; c (burn: " in str(caught.value) and str(caught.value).endswith("and without them no room")
    assert not nodes.reserved


def test_all_that_is_wrong_with_a_node_is_said() -> None:
    rows = [FindingRow("burn", BAD, "a"), FindingRow("ECC", BAD._replace(text="bad"), "a"), FindingRow("Ray", BAD)]
    assert failures(rows) == {"a": "burn: GPU 1 is 9% slower than its peers; ECC: bad"}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "cause"), CAUSES.items())
def test_a_run_is_placed_beside_a_slow_or_wrong_node(nodes: Cluster, start_run: Start, kind: str, cause: str) -> None:
    nodes.resize(1, 1, 1)
    command = (sys.executable, "-P", "-m", "bad_node", kind)
    run = start_run(*SMALL, "mesh.pp=2", "run.steps=4", "cluster.check=true", command=command)
    assert run.end() == 0, run.describe()
    (check,) = run.events("check")
    ((node, finding),) = check["left_out"].items()
    assert finding == cause and check["nodes"] == 3
    assert f"node {node} is left out: {cause}" in " ".join(run.printed.read_text().split())
    assert [row["step"] for row in run.rows()] == list(range(4)) and nodes.free_cpus() == 3
    nodes.resize(1, 1)
    run = start_run(*SMALL, "mesh.pp=2", "run.steps=4", "cluster.check=true", command=command)
    assert run.end() == 1 and "cluster.check leaves out " in run.printed.read_text(), run.describe()
    assert nodes.free_cpus() == 2
