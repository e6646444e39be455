"""Mixtures, packed documents and loss masks on a GPU, whose batches come from pinned memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from exactness import assert_equals_one_process
from fleet import Fleet
from gpus import RANKS_A_GPU, on_gpu
from mixtures import mixed
from plans import plan_on_mesh
from small_models import FAMILIES

from pentad.schedules.spec.data import Packing

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU)]


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_a_mixture_equals_one_process(gpus: Fleet, tmp_path: Path, packing: Packing) -> None:
    model = replace(FAMILIES["deepseek-v3"], mtp_layers=1)
    assert_equals_one_process(
        gpus, on_gpu(plan_on_mesh(mixed(tmp_path, packing), "zb-h2", {}, model=model), dtype="float64")
    )
