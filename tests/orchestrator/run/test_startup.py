"""What a run imports before starting Ray, and what its ranks import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("pentad.orchestrator.cli.cli", {"torch", "ray", "pydantic"}),
        ("pentad.orchestrator.run.train", {"torch", "ray"}),
        ("pentad.orchestrator.run.driver", {"torch", "aiohttp"}),
        # Importing these takes a second of CPU time on every rank.
        ("pentad.workers.runtime.runner", {"torch._dynamo", "torch._inductor", "ray", "pydantic"}),
    ],
)
def test_slow_modules_are_not_imported_at_start_up(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*{forbidden!r}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


PANDAS = """
import pickle, sys
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.diagnosis.rank_times import SCHEMA, RankTime
from pentad.schedules.ir.arrow_file import table_of
from pentad.schedules.simulate.timeline import Span, Timeline

plan = make_plan(load(None, ["mesh.dp=2", "mesh.pp=2"]), "cpu")
assert pickle.loads(pickle.dumps(plan)) == plan
timeline = Timeline("measured", (Span(0, 1, "compute", "0F0", "F", 0, 0, -1, 0.0, 0.5),))
timeline.to_arrow()
table_of([RankTime(0, 1, "F", 0, 0.5, 0.0, 0.0)], SCHEMA)
print("pandas" in sys.modules)
"""


def test_a_rank_that_receives_its_plan_and_a_driver_that_records_do_not_import_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is installed, pyarrow would import it, which takes 0.6 s of CPU time."""
    (tmp_path / "pandas.py").write_text('__version__ = "2.3.0"')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-P", "-c", PANDAS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


DEFERRED = """
import sys
from pentad.workers.torch_import import defer_meta_kernels, load_meta_kernels

defer_meta_kernels()
import torch
import pentad.workers.runtime.runner
from pentad.workers.integrity.replay import new_generator

drawn = torch.rand(1, generator=new_generator(torch.device("cpu")).manual_seed(1))
assert "torch._decomp" not in sys.modules
x, attend = torch.ones(1, 2, 3, 4, device="meta"), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
try:
    attend(x, x, x)
except NotImplementedError:
    print("deferred")
load_meta_kernels()
print(*attend(x, x, x)[0].shape, bool(torch.rand(1, generator=torch.Generator().manual_seed(1)) == drawn))
"""


def test_ranks_leave_meta_kernels_to_models_that_may_need_them() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", DEFERRED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["deferred", "1", "2", "3", "4", "True"]


FIRST_STEP = """
import sys, tempfile
from pathlib import Path
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.workers.runtime import rank_setup
from pentad.workers.runtime.runner import Runner

sizes = ["mesh.pp=1", "schedule.name=1f1b", "schedule.microbatches=1", "model.layers=1", "precision.compute=bfloat16"]
plan = make_plan(load(None, sizes), "cpu")
rank_setup.init_cuda = lambda: None
rank_setup.warm_up()
warm = set(sys.modules)
runner = Runner(plan, 0, Path(tempfile.mkdtemp(), "progress"))
runner.connect(runner.serve("127.0.0.1", 30), 30)
runner.restore(None)
runner.run(0, 1)
runner.close()
print(*(name for name in set(sys.modules) - warm if name.partition(".")[0] in ("torch", "triton", "sympy")))
"""


def test_a_spare_has_imported_what_its_first_step_needs_of_torch() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", FIRST_STEP], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == ([], 0), done.stderr
