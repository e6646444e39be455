"""The cases measured in comparison with torchtitan can be planned, and fit the GPUs they were written for."""

from pathlib import Path

import pytest
import yaml

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import memory
from pentad.orchestrator.planning.planning import make_plan

ROOT = Path(__file__).parents[2]
CASES = yaml.safe_load((ROOT / "tests" / "bench" / "peers.yaml").read_text())
H200_GIB = 139.8  # 143,771 MiB by nvidia-smi, minus what CUDA takes
SLOW = [name for name in CASES if name != "8b-tp4"]


@pytest.mark.parametrize("name", ["8b-tp4", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_case_fits_its_gpus_and_all_its_runs_have_the_same_batch(name):
    case, batches = CASES[name], set()
    for overrides in case["runs"]:
        words = [*case["all"].split(), *overrides.split()]
        plan = make_plan(load(ROOT / "deploy" / "jobs" / f"{case['job']}.yaml", words), "cuda")
        assert plan.mesh.size == case["gpus"]
        assert max(memory(plan, rank)["total"] for rank in range(plan.mesh.size)) < H200_GIB * 2**30
        batches.add(plan.batch.tokens)
    assert len(batches) == 1
