"""Attention over ranks on GPUs and NCCL: the definition, and with deterministic kernels the same bits twice."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from closeness import relative_error
from context_ranks import Case, Ranks, run_rank
from gpus import num_places

from pentad.schedules.spec.cp_layout import CpMethod

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
VARIANTS: tuple[CpMethod, ...] = ("ring", "all_gather", "ulysses")
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DOCUMENTS = ((0, 256, 512, 768), (0, 3, 300, 1000), (0,))
SHAPES = {
    "grouped": Case(2, "ring", batch=2, heads=8, kv_heads=2, length=1024, width=128, value=128),
    "latent": Case(2, "ring", batch=1, heads=4, kv_heads=4, length=1024, width=192, value=128, scale=0.05),
    "packed": Case(2, "ring", batch=3, heads=8, kv_heads=4, length=1024, width=64, value=64, documents=DOCUMENTS),
    "packed, latent": Case(
        2, "ring", batch=3, heads=4, kv_heads=4, length=1024, width=192, value=128, documents=DOCUMENTS
    ),
}


@pytest.fixture(scope="module")
def ranks():
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    made = Ranks(min(4, num_places()), "cuda")
    yield made
    made.stop()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("cp", "variant"), list(product((2, 4), VARIANTS)))
def test_ranks_give_what_the_whole_sequence_gives(ranks, cp, variant, shape, dtype, deterministic):
    if cp > num_places():
        pytest.skip(f"{cp} GPUs are needed")
    case = replace(SHAPES[shape], cp=cp, variant=variant, dtype=dtype, deterministic=deterministic, times=3)
    answers = ranks.run(case)
    for found, expected in zip(case.joined([a.parts for a in answers]), case.expected(), strict=True):
        assert relative_error(found, expected) < BOUNDS[dtype]
    assert all(answer.rooms <= 2 for answer in answers)
    assert all(answer.same for answer in answers) or not deterministic


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_rank_gives_what_the_definition_says(shape, dtype, deterministic):
    case = replace(SHAPES[shape], cp=1, dtype=dtype, deterministic=deterministic, times=3)
    answer = run_rank(case, 0, None, torch.device("cuda"))
    for found, expected in zip(answer.parts, case.expected(), strict=True):
        assert relative_error(found, expected) < BOUNDS[dtype]
    assert answer.same or not deterministic
