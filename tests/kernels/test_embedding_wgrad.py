"""The gradient of an embedding is added to the rows of its tokens, always in the same order."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from closeness import relative_error
from torch import Tensor

from pentad.kernels.embedding_wgrad import accumulate_embedding_gradient_

# Runs of a token that are shorter, as long and longer than a chunk, across chunks, and of other ranks' tokens.
MIXED = {-1: 30, 0: 40, 2: 200, 6: 9, 4: 1}
RUNS = [{}, {3: 1}, {-1: 5}, {5: 64, 0: 1}, MIXED, {1: 300}]


def cases_in_triton() -> list[Any]:
    """(runs, width, dtype, finer): by default all runs with one column block, float32 and quarter chunks, and two
    others."""
    cases = product(RUNS, (7, 520), (torch.float32, torch.bfloat16), (4, 1))
    always = [
        *((runs, 7, torch.float32, 4) for runs in RUNS),
        (MIXED, 520, torch.bfloat16, 4),
        (MIXED, 7, torch.float32, 1),
    ]
    return [pytest.param(*case, marks=[] if case in always else [pytest.mark.slow]) for case in cases]


def tokens_of(runs: dict[int, int]) -> Tensor:
    counted = [torch.full((count,), token) for token, count in runs.items()]
    found = torch.cat([torch.empty(0, dtype=torch.int64), *counted])
    return found[torch.randperm(len(found))]


def expected(main: Tensor, dy: Tensor, tokens: Tensor) -> Tensor:
    known = tokens >= 0
    return main.double() + F.one_hot(tokens[known], len(main)).double().t() @ dy[known].double()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("runs", RUNS)
def test_rows_of_a_token_are_added_to_its_gradient(runs: dict[int, int], dtype: torch.dtype, overwrite: bool) -> None:
    tokens, main = tokens_of(runs), torch.randn(8, 5, dtype=torch.promote_types(dtype, torch.float32))
    dy = torch.randn(len(tokens), 5, dtype=dtype)
    sums = expected(torch.zeros_like(main) if overwrite else main, dy, tokens)
    if overwrite:
        main.fill_(torch.nan)
    accumulate_embedding_gradient_(main, dy, tokens, overwrite=overwrite)
    assert relative_error(main, sums) < (1e-14 if dtype == torch.float64 else 1e-6)


@pytest.mark.usefixtures("fresh_memory_holds_nan", "interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs without a GPU")
@pytest.mark.parametrize(("runs", "width", "dtype", "finer"), cases_in_triton())
def test_the_kernel_in_triton(
    monkeypatch: pytest.MonkeyPatch, runs: dict[int, int], width: int, dtype: torch.dtype, finer: int
) -> None:
    """Runs and chunks are shortened alike, so the numbers of steps by token and by chunk stay the same."""
    triton = pytest.importorskip("pentad.kernels.embedding_wgrad_triton")
    monkeypatch.setattr(triton, "CHUNK", triton.CHUNK // finer)
    runs = {token: -(-count // finer) for token, count in runs.items()}
    tokens, main = tokens_of(runs), torch.randn(8, width)
    dy = torch.randn(len(tokens), width, dtype=dtype)
    sums, others = expected(main, dy, tokens), [row for row in range(8) if row not in runs]
    first, again, before = main.clone(), main.clone(), main.clone()
    triton.accumulate_embedding_gradient_(first, dy, tokens)
    triton.accumulate_embedding_gradient_(again, dy, tokens)
    assert relative_error(first, sums) < 1e-6
    assert torch.equal(first, again) and torch.equal(first[others], before[others])
    triton.accumulate_embedding_gradient_(main.fill_(torch.nan), dy, tokens, overwrite=True)
    assert relative_error(main, sums - before) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("repeats", [0, 3000])
def test_on_a_gpu_two_runs_have_the_same_bits(repeats: int) -> None:
    tokens = torch.randint(-1, 5000, (8192,), device="cuda")
    tokens[torch.randperm(8192)[:repeats]] = 17
    dy, main = torch.randn(8192, 1000, device="cuda").bfloat16(), torch.randn(5000, 1000, device="cuda")
    exact, again = main.double(), main.clone()
    accumulate_embedding_gradient_(exact, dy.double(), tokens)
    accumulate_embedding_gradient_(main, dy, tokens)
    accumulate_embedding_gradient_(again, dy, tokens)
    assert relative_error(main, exact) < 1e-6 and torch.equal(main, again)
