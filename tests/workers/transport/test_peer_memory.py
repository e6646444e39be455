"""Memory that ranks on one host share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pentad.schedules.ir.errors import PentadError
from pentad.workers.transport.peer_memory import PeerMemory


def test_memory_that_cannot_be_shared_costs_a_sentence() -> None:
    """For example memory of torch's expandable segments."""
    memory = PeerMemory.__new__(PeerMemory)
    memory.driver = SimpleNamespace(cuMemGetAddressRange=lambda at: (0, at, 1), cuIpcGetMemHandle=lambda _: (1, None))
    sentence = r"^cluster.transport is peer: expected nccl, or PYTORCH_ALLOC_CONF without expandable_segments \("
    with pytest.raises(PentadError, match=sentence):
        memory._export(torch.zeros(1))
