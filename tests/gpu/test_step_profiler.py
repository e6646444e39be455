"""Profiled steps on GPUs: the kernels of every instruction, on the clock of its span, and the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bits import same_bits
from gpus import RANKS_A_GPU, on_gpu
from plans import SHALLOW, plan_of

from pentad.schedules.compiler import NO_MEMORY_OPTIONS
from pentad.schedules.simulate.step_profile import KERNEL, unpack

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU)]
SLACK = 200_000  # ns: GPU events are related to the host's clock by a synchronization
ISSUED, LAUNCHED = 0, 6  # steps if graphs are used; otherwise both are issued


@pytest.mark.parametrize("graphs", [False, True])
def test_kernels_belong_to_instructions_and_lie_within_their_spans(gpus, corpus, graphs):
    plan = on_gpu(plan_of("1f1b", 1, 1, 4, corpus, model=SHALLOW), "nccl", "bfloat16", NO_MEMORY_OPTIONS)
    plan, calls = replace(plan, cuda_graphs=graphs), [(0, 4), (4, 4)]
    (profiled,) = gpus.run(replace(plan, profile_steps=(ISSUED, LAUNCHED)), calls)
    (other,) = gpus.run(plan, calls)
    assert [each.losses for each in profiled.results] == [each.losses for each in other.results]
    assert same_bits(profiled.state, other.state)
    for step in (ISSUED, LAUNCHED):
        profile = profiled.results[step].profile
        assert profile is not None and not profile.problem
        kernels = [event for event in unpack(profile.data) if event.kind == KERNEL]
        spans = {span.name: span for span in profiled.results[step].spans}
        compute = {name for name, span in spans.items() if span.op in ("F", "BW")}
        assert compute <= {event.instruction for event in kernels}
        for event in kernels:
            if event.instruction in compute:
                span = spans[event.instruction]
                assert 1e9 * span.start - SLACK < event.start and event.end < 1e9 * span.end + SLACK, event
