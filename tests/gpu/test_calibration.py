"""`pentad calibrate` on GPUs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from commands import Pentad

from pentad.orchestrator.gpus.rate_table import read_rates, read_table
from pentad.orchestrator.gpus.table import GPUS
from pentad.orchestrator.planning.hardware import gpu_name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed, for links"),
]


def test_gpus_attain_much_of_their_data_sheet_and_small_work_less(pentad: Pentad, tmp_path: Path) -> None:
    began, path, sheet = time.monotonic(), tmp_path / "table.json", GPUS[gpu_name()]
    status, out, err = pentad("calibrate", "--json", "--out", str(path))
    assert status == 0 and time.monotonic() - began < 180, err
    assert json.loads(out)["assumed"] == ["inter_host"]
    rates, kernels = read_rates(path, gpu_name()), read_table(path, gpu_name()).kernels
    assert [each.op for each in kernels] == ["attention", "attention_backward_deterministic"]
    assert all(1e-6 < seconds < 1e-2 for each in kernels for _, seconds in each.seconds)
    assert 0.4 < rates.flops / sheet.bf16 < 1.05 and rates.products[0][1] < rates.flops
    assert 0.5 < rates.memory / sheet.bandwidth < 1.05
    assert rates.products_8bit[-1][1] > rates.flops
    if torch.cuda.get_device_capability() == (9, 0):
        assert len(rates.experts) == 2
    for each in rates.experts:  # with few rows, reading matrices and adding gradients outweighs the products
        assert all(curve[0][1] < curve[-1][1] < rates.products_8bit[-1][1] for curve in vars(each).values())
        assert each.weight[0][1] < 0.7 * each.weight[-1][1]
    assert 0.3 * sheet.link < rates.peer.send.bandwidth < 1.1 * sheet.link  # slope of a line through measured times
    assert all(0 < each < 5e-3 for each in (rates.issue, rates.peer_issue, *rates.layer_issue))
    assert rates.peer.send != rates.intra_host.send and rates.peer.all_reduce == rates.intra_host.all_reduce
