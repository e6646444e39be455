"""Optimizer state in host memory, updated on a GPU: the bits of state on the device, and no other kernel's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import same_bits
from gpus import RANKS_A_GPU, as_is_on_gpu, two_gpus
from plans import plan_of

from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.optimizer import PIECE_ELEMENTS, PIECES
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.params.host_state import StateStream

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU)]
# Activations of a step come and go in blocks as large as the slots of the state.
LARGE = ModelSpec(layers=8, hidden=1024, heads=8, kv_heads=4, ffn=3072, vocab=8192)
CYCLES = 10**9  # half a second of a GPU


def large_plan(corpus: str, dp: int, zero: int, *, host_optimizer: bool) -> Plan:
    given: dict[str, Any] = {"memory_options": MemoryOptions(zero=zero), "host_optimizer": host_optimizer}
    plan = plan_of("1f1b", dp, 1, 2, corpus, unit_layers=1, **given)
    batch = BatchSpec(global_batch_size=4 * dp, sequence_length=4096, microbatches=2, replicas=dp)
    return as_is_on_gpu(replace(plan, model=LARGE, batch=batch), "peer")


@pytest.mark.parametrize(
    ("dp", "zero"), [(1, 0), pytest.param(2, 1, marks=two_gpus), pytest.param(2, 3, marks=two_gpus)]
)
def test_state_on_the_host_has_the_bits_of_state_on_the_device(gpus, corpus, dp, zero) -> None:
    plans = [large_plan(corpus, dp, zero, host_optimizer=host_optimizer) for host_optimizer in (False, True)]
    for device, host in zip(*(gpus.run(plan, [(0, 1), (1, 2)]) for plan in plans), strict=True):
        assert [each.grad_norm for each in device.results] == [each.grad_norm for each in host.results]
        assert [each.losses for each in device.results] == [each.losses for each in host.results]
        assert same_bits(device.state, host.state)


def test_the_first_update_leaves_memory_alone_that_earlier_kernels_use() -> None:
    """The slots of the state may reuse memory that the host has freed while kernels still read it."""
    device = torch.device("cuda", torch.cuda.current_device())
    state = [torch.zeros(PIECE_ELEMENTS).pin_memory() for _ in range(3)]
    freed = [torch.ones(PIECE_ELEMENTS, device=device) for _ in range(3 * PIECES)]
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    sums = [each.sum() for each in freed]
    places = {each.data_ptr() for each in freed}
    freed.clear()
    stream = StateStream(device)
    stream.run(state, lambda moved: None)
    stream.finish()
    assert {each.data_ptr() for slot in stream.slots for each in slot.tensors} <= places, "nothing was reused"
    assert [each.item() for each in sums] == [PIECE_ELEMENTS] * (3 * PIECES)
