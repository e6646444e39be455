"""Stages of several units on GPUs: one process's result, and the bits of whole stages."""

from __future__ import annotations

import pytest
import torch
from exactness import assert_equals_one_process
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import STEPS, plan_of

from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.schedule_spec import MemoryOptions

# Every tensor is aligned in any flat buffer: cuBLAS chooses another algorithm for another alignment.
ALIGNED = ModelSpec(layers=8, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=320)
CLIP = 0.1  # less than the norm of any step
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU), two_gpus]
CASES = [
    ("1f1b", 2, 1, MemoryOptions(zero=3, max_gathered=2), "none"),
    ("zb-h2", 1, 2, MemoryOptions(), "full"),
    ("dualpipe", 1, 2, MemoryOptions(zero=2), "selective"),
    ("dualpipe", 1, 2, MemoryOptions(zero=3, max_gathered=2, reduce="microbatch"), "none"),
]


@pytest.mark.parametrize(("name", "dp", "pp", "memory_options", "recompute"), CASES)
def test_units_equal_one_process(gpus, corpus, name, dp, pp, memory_options, recompute) -> None:
    plan = plan_of(name, dp, pp, 4, corpus, memory_options=memory_options, recompute=recompute, unit_layers=1)
    assert_equals_one_process(gpus, on_gpu(plan, memory_options=memory_options))


@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
def test_units_have_the_bits_of_whole_stages(gpus, corpus, name, recompute) -> None:
    """Even with clipped gradients: the factor has the same float32 digits."""
    runs = []
    for unit_layers in (None, 1, 2):
        given = {"clip": CLIP, "recompute": recompute, "unit_layers": unit_layers, "model": ALIGNED}
        plan = plan_of(name, 1, 2, 4, corpus, "bfloat16", **given)
        runs.append(gpus.run(on_gpu(plan), [(0, STEPS)]))
    for whole, *others in zip(*runs, strict=True):
        for other in others:
            assert [each.losses for each in whole.results] == [each.losses for each in other.results]
            assert min(each.grad_norm for each in whole.results) > CLIP
            assert [name for name in whole.state if not torch.equal(whole.state[name], other.state[name])] == []
