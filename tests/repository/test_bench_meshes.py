"""What is measured trains: weights that stay zero are multiplied faster, and their loss stays what it was."""

from itertools import pairwise
from pathlib import Path

import pytest
from meshes import measure, train
from ranks import Ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(100)
def test_the_loss_of_a_measured_run_falls():
    ranks = Ranks(90, train)
    overrides = ["run.steps=6", "mesh.dp=1", "mesh.pp=1", "schedule.microbatches=2"]
    row = measure(ranks, str(ROOT / "deploy" / "jobs" / "cpu.yaml"), overrides, "cpu", warmup=1)
    ranks.stop()
    assert all(after < before for before, after in pairwise(row["losses"])), row
