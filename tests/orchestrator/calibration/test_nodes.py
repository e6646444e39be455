"""`pentad calibrate` on a cluster of several Ray nodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from multinode import multinode_cluster

from pentad.orchestrator.planning.hardware import rates_of

CALIBRATE = (sys.executable, "-P", "-m", "pentad.orchestrator.cli.cli", "calibrate", "--json")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_links_on_two_nodes_and_between_them_are_measured(tmp_path: Path) -> None:
    with multinode_cluster() as nodes:
        nodes.resize(2, 2)
        config = [f"cluster.address={nodes.address}", "cluster.auth=disabled", "mesh.pp=4"]
        out = f"--out={tmp_path / 'table.json'}"
        done = subprocess.run([*CALIBRATE, out, *config], capture_output=True, text=True, timeout=300)
        assert not nodes.ranks()
    assert not done.returncode, done.stderr
    found, assumed = json.loads(done.stdout), rates_of("cpu")
    assert found["ranks"] == [4, 2] and not found["assumed"]
    for group in ("intra_host", "inter_host"):
        assert found["rates"][group]["send"] != vars(getattr(assumed, group).send)
    assert found["rates"]["peer"] == found["rates"]["intra_host"] != found["rates"]["inter_host"]
