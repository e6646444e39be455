"""What several processes save together with torch.distributed.checkpoint is read as one checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from dcp_ranks import PLACEMENTS, RANKS, full, save

from pentad.workers.dcp.reader import open_dcp
from pentad.workers.dcp.source import DcpSource


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("form", ["distcp", "safetensors"])
def test_distributed_tensors_are_read_as_one(form: str, tmp_path: Path) -> None:
    mp.spawn(save, (str(tmp_path), form), nprocs=RANKS)
    found = open_dcp(tmp_path / "out")
    assert found.keys() == {f"model.{name}" for name in PLACEMENTS}
    assert len([*(tmp_path / "out").glob(f"*.{form}")]) == RANKS
    source = DcpSource(tmp_path / "out", found)
    for name in PLACEMENTS:
        tensor = source.read(f"model.{name}")
        assert torch.equal(tensor, full(name).to(tensor.dtype)) and tensor.dtype == source.dtype(f"model.{name}")
