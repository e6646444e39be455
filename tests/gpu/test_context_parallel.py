"""Context-parallel attention on GPUs: equal to plain attention, and bit-identical runs with deterministic kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from closeness import relative_error
from cp_ranks import Case, Ranks, run_rank
from gpus import RANKS_A_GPU, num_places

from pentad.schedules.spec.cp_layout import CpMethod

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU)]
METHODS: tuple[CpMethod, ...] = ("ring", "all_gather", "ulysses")
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DOCUMENTS = ((0, 256, 512, 768), (0, 3, 300, 1000), (0,))
# Documents of one to nine tokens, most of them fewer than the ranks have chunks, around a longer document.
SHORT = (*range(0, 300), *range(300, 390, 9), 390, *range(900, 1024, 2))
SHAPES = {
    "grouped": Case(2, "ring", batch=2, heads=8, kv_heads=2, length=1024, head_dim=128, value_dim=128),
    "MLA": Case(2, "ring", batch=1, heads=4, kv_heads=4, length=1024, head_dim=192, value_dim=128, scale=0.05),
    "packed": Case(
        2, "ring", batch=3, heads=8, kv_heads=4, length=1024, head_dim=64, value_dim=64, documents=DOCUMENTS
    ),
    "short documents": Case(
        2, "ring", batch=2, heads=8, kv_heads=2, length=1024, head_dim=128, value_dim=128, documents=(SHORT, (0, 777))
    ),
    "packed, window": Case(
        2, "ring", batch=3, heads=8, kv_heads=2, length=1024, head_dim=64, value_dim=64, documents=DOCUMENTS, window=100
    ),
    "packed, MLA": Case(
        2, "ring", batch=3, heads=4, kv_heads=4, length=1024, head_dim=192, value_dim=128, documents=DOCUMENTS
    ),
}


@pytest.fixture(scope="module")
def ranks():
    if num_places() < 2:
        pytest.skip("two GPUs are needed")
    made = Ranks(min(4, num_places()), "cuda")
    yield made
    made.stop()


@pytest.mark.sampled(11)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("cp", "method"), list(product((2, 4), METHODS)))
def test_ranks_equal_plain_attention(ranks, cp, method, shape, dtype, deterministic):
    if cp > num_places():
        pytest.skip(f"{cp} GPUs are needed")
    case = replace(SHAPES[shape], cp=cp, method=method, dtype=dtype, deterministic=deterministic, repeats=3)
    answers = ranks.run(case)
    for found, expected in zip(case.join([answer.parts for answer in answers]), case.expected(), strict=True):
        assert relative_error(found, expected) < BOUNDS[dtype]
    assert all(answer.buffers <= 2 for answer in answers)
    assert all(answer.same for answer in answers) or not deterministic


@pytest.mark.sampled(5)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_rank_equals_plain_attention(shape, dtype, deterministic):
    case = replace(SHAPES[shape], cp=1, dtype=dtype, deterministic=deterministic, repeats=3)
    answer = run_rank(case, 0, None, torch.device("cuda"))
    for found, expected in zip(answer.parts, case.expected(), strict=True):
        assert relative_error(found, expected) < BOUNDS[dtype]
    assert answer.same or not deterministic
