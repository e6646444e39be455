"""`pentad doctor` on a cluster of three Ray nodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from multinode import multinode_cluster

from pentad.orchestrator.cluster import cluster as clusters

DOCTOR = (sys.executable, "-P", "-m", "pentad.orchestrator.cli.cli", "doctor")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nodes_exchange_data_and_the_one_with_another_environment_is_named(tmp_path: Path) -> None:
    with multinode_cluster() as nodes:
        nodes.resize(1, 1)
        with clusters.environment({"NCCL_DEBUG": "INFO"}):
            nodes.resize(1, 1, 1)
        config = [f"cluster.address={nodes.address}", "cluster.auth=disabled", "mesh.pp=3", f"run.folder={tmp_path}"]
        done = subprocess.run([*DOCTOR, "--json", "--burn=1", *config], capture_output=True, text=True)
        assert not nodes.ranks()
    report = json.loads(done.stdout)
    rows = [row for row in report["checks"] if row["check"] == "NCCL"]
    assert sorted(row["verdict"] for row in rows) == ["ok", "ok", "warning"]
    network = [row for row in report["checks"] if row["check"] == "network"]
    assert len(network) == 3 and all(len(row["figures"]["links"]) == 2 for row in network)
    assert all(row["figures"]["units"] for row in report["checks"] if row["check"] == "burn")
    assert (done.returncode, report["verdict"]) in ((0, "warning"), (1, "failure")) and not done.stderr
    assert not list(tmp_path.iterdir())
