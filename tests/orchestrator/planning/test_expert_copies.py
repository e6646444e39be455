"""W of experts multiplies rows grouped by expert: it first copies the operands that are in token order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from paths import TESTS

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.hardware import rates_of
from pentad.orchestrator.planning.planning import make_plan

QWEN3 = TESTS.parent / "deploy" / "jobs" / "qwen3-30b-a3b.yaml"
TOKENS, TOP_K, HIDDEN = 2 * 4096, 8, 2048  # TOKENS: of a rank in a microbatch


@pytest.mark.parametrize("ep", [2, 4])
def test_their_copies_take_as_long_as_memory_does(ep: int) -> None:
    words = [f"mesh.ep={ep}", "model.layers=2", "zero.stage=0", f"batch.global_batch_size={4 * ep}"]
    plan, rates = make_plan(load(QWEN3, words), "cuda"), rates_of("cuda", "NVIDIA H200")
    slow, fast = (costs_of(plan, each) for each in (rates, replace(rates, memory=math.inf)))
    copied = 2 * 2 * TOKENS * TOP_K * HIDDEN * 2  # in a layer, two operands are read and written in bfloat16
    for of_slow, of_fast in zip(slow.weight[1:3], fast.weight[1:3], strict=True):  # embedding, layers, head
        assert of_slow - of_fast == pytest.approx(copied / rates.memory)
