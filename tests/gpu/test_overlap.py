"""Pairs on GPUs, where operations between ranks run beside kernels: law 1, and the bits of one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from axes_cases import HEADS, MIXED, with_tied_copies
from fleet import assemble
from gpus import num_places
from overlap_cases import MESHES, without_overlap
from plans import is_close, plan_of, reference

from pentad.schedules.compiler import compile_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(90),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]
PROGRAMS = [("dualpipev", 1, "nccl"), ("dualpipev", 2, "peer"), ("dualpipe", 2, "nccl")]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize(("name", "pp", "transport"), PROGRAMS)
def test_pairs_give_what_one_process_does_with_the_bits_of_one_after_the_other(
    gpus, corpus, name, pp, transport, sizes
) -> None:
    plan = plan_of(name, 1, pp, 4, corpus, model=MIXED if "ep" in sizes else HEADS, **sizes)
    if plan.mesh.size > num_places():
        pytest.skip(f"{plan.mesh.size} GPUs are needed")
    program = compile_program(name, pp, 4, gated=transport == "nccl", replicas=2 if "tp" not in sizes else 1)
    plan = replace(plan, device="cuda", transport=transport, program=program)
    _, gradients, _, weights = reference(plan)
    found = assemble([outcome.gradients[0] for outcome in gpus.run(plan, [(0, 1)])], with_tied_copies(weights))
    assert all(is_close(gradient, gradients[0][key]) for key, gradient in found.items())
    narrow = replace(plan, dtype="bfloat16")
    for mine, other in zip(gpus.run(narrow, [(0, 1)]), gpus.run(without_overlap(narrow), [(0, 1)]), strict=True):
        for key, value in mine.gradients[0].items():
            assert torch.isfinite(value).all() and torch.equal(value, other.gradients[0][key]), key
