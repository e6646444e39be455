"""`pentad doctor` on clusters of several Ray nodes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpus import two_gpus
from multinode import Cluster, multinode_cluster

from pentad.orchestrator.cluster import cluster as clusters

pytestmark = pytest.mark.timeout(400)
DOCTOR = (sys.executable, "-P", "-m", "pentad.orchestrator.cli.cli", "doctor", "--json", "--burn=2")


def examined(nodes: Cluster, folder: Path, ranks: int) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit status and the rows of each check; asserts that nothing is left on the nodes or in the folder."""
    config = [f"cluster.address={nodes.address}", "cluster.auth=disabled", f"mesh.pp={ranks}", f"run.folder={folder}"]
    done = subprocess.run([*DOCTOR, *config], capture_output=True, text=True)
    assert not done.stderr and not nodes.ranks() and not list(folder.iterdir())
    checks = json.loads(done.stdout)["checks"]
    return done.returncode, {row["check"]: [each for each in checks if each["check"] == row["check"]] for row in checks}


@pytest.mark.slow
def test_nodes_exchange_data_and_one_with_another_environment_is_named(tmp_path: Path) -> None:
    with multinode_cluster() as nodes:
        nodes.resize(1, 1)
        with clusters.environment({"NCCL_DEBUG": "INFO"}):
            nodes.resize(1, 1, 1)
        status, found = examined(nodes, tmp_path, 3)
    assert sorted(row["verdict"] for row in found["NCCL"]) == ["ok", "ok", "warning"]
    assert [len(row["figures"]["links"]) for row in found["network"]] == [2, 2, 2]
    assert all(row["figures"]["units"] for row in found["burn"])
    assert status == any(row["verdict"] == "failure" for rows in found.values() for row in rows)


@pytest.mark.gpu
@two_gpus
def test_gpus_of_two_nodes_are_compared_and_exchange_data(tmp_path: Path) -> None:
    with multinode_cluster(places=2) as nodes:
        nodes.resize(1, 1)
        _, found = examined(nodes, tmp_path, 2)
    units = [unit for row in found["burn"] for unit in row["figures"]["units"]]
    assert len({unit["unit"] for unit in units}) == 2 and len({unit["digest"] for unit in units}) == 1
    links = [link for row in found["network"] for link in row["figures"]["links"]]
    assert len(links) == 2 and all(link["bandwidth"] > 1e8 for link in links)
