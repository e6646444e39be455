"""Figures of GPUs: from the table, or measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from commands import Pentad

from pentad.orchestrator.config.config import load
from pentad.orchestrator.gpus import measured
from pentad.orchestrator.gpus.table import GPUS
from pentad.orchestrator.planning import hardware
from pentad.orchestrator.planning.estimate import simulated_seconds
from pentad.orchestrator.planning.fit import device_memory, for_tensors
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError

FOUND = {"memory": 50 * 2**30, "bf16": 100e12, "fp8": 0.0, "bandwidth": 500e9, "host_link": 20e9}
CONFIG = ["model.hidden=1024", "model.ffn=4096", "model.heads=8", "batch.sequence_length=4096", "mesh.pp=1"]


@pytest.mark.parametrize("name", GPUS)
def test_figures_are_possible(name: str) -> None:
    """Memory is faster than links, links no slower than host links, and 8-bit products, if any, twice as fast."""
    gpu = GPUS[name]
    assert gpu.bandwidth > gpu.link >= gpu.host_link > 0
    assert gpu.fp8 == 0 or gpu.fp8 / gpu.bf16 == pytest.approx(2, rel=0.03)
    assert device_memory("cuda", gpu=name).bytes == for_tensors(gpu.memory)


def test_a_plan_is_for_the_gpu_of_the_configuration() -> None:
    plans = [make_plan(load(None, [*CONFIG, f"cluster.gpu={gpu}"]), "cuda") for gpu in ("NVIDIA H200", "NVIDIA L40S")]
    assert simulated_seconds(plans[1]) > 2 * simulated_seconds(plans[0])


def test_an_unknown_name_is_refused_with_the_nearest(pentad: Pentad) -> None:
    status, _, err = pentad("plan", "--device", "cuda", "cluster.gpu=NVIDIA H20O")
    assert (status, err.count("\n")) == (1, 1)
    assert "cluster.gpu is 'NVIDIA H20O' (did you mean NVIDIA H200?): expected one of NVIDIA B200, " in err


def test_a_gpu_that_the_table_lacks_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=json.dumps(FOUND))
    monkeypatch.setattr(measured.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(hardware, "gpu_name", lambda: "NVIDIA New")
    measured.measured_gpu.cache_clear()
    hardware.rates_of.cache_clear()
    assert device_memory("cuda", gpu="NVIDIA New").bytes == for_tensors(int(FOUND["memory"]))
    plan = make_plan(load(None, CONFIG), "cuda")
    assert plan.gpu == "NVIDIA New" and hardware.rates_of("cuda", plan.gpu).flops == FOUND["bf16"]


def test_a_gpu_that_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without GPUs."""
    monkeypatch.setattr(measured, "PROBE", "pentad.kernels.nothing")
    measured.measured_gpu.cache_clear()
    with pytest.raises(
        PentadError, match=r"^GPU NVIDIA New is unknown and could not be measured .*: expected cluster.gpu"
    ):
        measured.measured_gpu("NVIDIA New")


def test_the_pages_have_every_gpu() -> None:
    page = (Path(__file__).parents[3] / "docs" / "memory.md").read_text()
    assert not [name for name in GPUS if name not in page]


@pytest.mark.gpu
def test_a_measured_gpu_attains_most_of_its_data_sheet() -> None:
    name = hardware.gpu_name()
    found, sheet = measured.measured_gpu(name), GPUS[name]
    assert 0.5 < found.bf16 / sheet.bf16 < 1.05 and 0.5 < found.bandwidth / sheet.bandwidth < 1.05
    assert found.memory == pytest.approx(sheet.memory, rel=0.02)
