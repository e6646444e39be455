"""MoE on a GPU: grouped GEMM, a full sublayer, reproducible to the bit, without host synchronization."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from closeness import relative_error
from expert_ranks import NO_SEQUENCE, Ranks, State, bind, case_of, check, gradients_of, layer_context
from gpus import two_gpus

from pentad.kernels.moe.grouped_gemm import accumulate_grouped_gradient_, grouped_gemm
from pentad.kernels.moe.moe_permute import gather_rows, sort_by_expert, sum_rows, weighted_glu, weighted_glu_backward
from pentad.schedules.spec.model import Experts
from pentad.workers.linear.weight_grad import accumulate_wgrads
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.parallel.expert_parallel import ExpertParallelGroup, ExpertSlots
from pentad.workers.params.param_buffers import Unwritten
from pentad.workers.params.router_bias import updated_bias

pytestmark = pytest.mark.gpu
DTYPES = [(torch.bfloat16, 1e-2), (torch.float32, 1e-5), (torch.float64, 1e-12)]
COUNTS = [(300, 0, 77, 1), (0, 0), (5,), (0, 1000, 0), (1,) * 64]
WIDTHS = [(256, 512), (70, 33)]  # torch's kernel does not support the second pair


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Makes every wait of the host for the device an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("n", "k"), WIDTHS)
@pytest.mark.parametrize("counts", COUNTS, ids=len)
@pytest.mark.parametrize(("dtype", "close"), DTYPES)
def test_grouped_gemm(dtype: torch.dtype, close: float, counts: tuple[int, ...], n: int, k: int) -> None:
    total = sum(counts)
    x, dy = (torch.randn(total + 130, width, device="cuda", dtype=dtype) for width in (k, n))
    x[total:], dy[total:] = torch.nan, torch.nan
    offsets = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    weights = torch.randn(len(counts), n, k, device="cuda", dtype=dtype)
    for rows, matrices in ((x, weights), (dy, weights.transpose(1, 2))):
        expected = grouped_gemm(rows.double(), matrices.double(), offsets)[:total]
        assert relative_error(grouped_gemm(rows, matrices, offsets)[:total], expected) < close


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("n", "k"), WIDTHS)
@pytest.mark.parametrize("counts", COUNTS, ids=len)
@pytest.mark.parametrize(("dtype", "close"), DTYPES)
def test_grouped_weight_gradients(dtype: torch.dtype, close: float, counts: tuple[int, ...], n: int, k: int) -> None:
    total = sum(counts)
    dy, x = (torch.randn(total + 130, width, device="cuda", dtype=dtype) for width in (n, k))
    x[total:], dy[total:] = torch.nan, torch.nan
    offsets = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    main = torch.randn(len(counts), n, k, device="cuda", dtype=torch.float64 if close < 1e-9 else torch.float32)
    expected, again = main.to(torch.float64, copy=True), main.clone()
    accumulate_grouped_gradient_(expected, dy.double(), x.double(), offsets)
    accumulate_grouped_gradient_(main, dy, x, offsets)
    accumulate_grouped_gradient_(again, dy, x, offsets)
    assert relative_error(main, expected) < 1e-5 and torch.equal(main, again)
    accumulate_grouped_gradient_(main.fill_(torch.nan), dy, x, offsets, overwrite=True)
    accumulate_grouped_gradient_(again.zero_(), dy, x, offsets)
    assert torch.equal(main, again)


@pytest.mark.parametrize("width", [5, 768, 2100])
@pytest.mark.parametrize(("dtype", "close"), DTYPES)
def test_rows(dtype: torch.dtype, close: float, width: int) -> None:
    chosen = torch.rand(50, 16, device="cuda").argsort(1)[:, :4].contiguous()
    rows = sort_by_expert(
        chosen, torch.rand(50, 4, device="cuda", dtype=torch.float64 if close < 1e-9 else torch.float32), 4, 8
    )
    total = int(rows.offsets[-1])
    x = torch.randn(50, width, device="cuda", dtype=dtype)
    y = gather_rows(x, rows.tokens, rows.offsets)
    assert torch.equal(y[:total], x[rows.tokens[:total]])
    y[total:] = torch.nan
    assert relative_error(sum_rows(y, rows.positions), sum_rows(y.double(), rows.positions)) < close
    gate_up = torch.randn(len(rows.tokens), 2 * width, device="cuda", dtype=dtype)
    dy = torch.randn(len(rows.tokens), width, device="cuda", dtype=dtype)
    found = weighted_glu_backward(dy, gate_up, rows.weights, rows.offsets)
    expected = weighted_glu_backward(dy.double(), gate_up.double(), rows.weights.double(), rows.offsets)
    for mine, exact in zip(
        (*found, weighted_glu(gate_up, rows.weights, rows.offsets)), (*expected, expected[1]), strict=True
    ):
        assert relative_error(mine[:total], exact[:total]) < close


def run(
    shape: Experts, state: State, x: torch.Tensor, dy: torch.Tensor, ep: ExpertParallelGroup | None = None
) -> dict[str, torch.Tensor]:
    """F, RECOMPUTE, B and W of a rank that has all experts, and the bias of the next step."""
    context = layer_context(shape, 1 / len(x), ep)
    moe = bind(state)
    y, saved, _ = run_to_completion(moe.forward(context, NO_SEQUENCE, x))
    recomputable = moe.recompute(context, x, saved)
    dx, work = run_to_completion(moe.backward(context, NO_SEQUENCE, x, saved, recomputable, dy))
    accumulate_wgrads(work, Unwritten())
    return {"y": y, "dx": dx, "bias": updated_bias(state["bias"], saved.routing.load, 1e-3)} | gradients_of(moe)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("dtype", "close"), DTYPES)
def test_a_sublayer_is_that_of_a_cpu_without_host_sync(dtype: torch.dtype, close: float, scoring) -> None:
    shape = Experts(8, 2, 40, 24, scoring, num_groups=4, topk_groups=2, aux_loss_coef=0.1, bias_update_rate=1e-3)
    # The experts of a token depend on its number only, far from any tie, so that rounding does not change them.
    case = case_of(shape, 1, 64, torch.zeros(8))
    state, tokens = dict(case.state), case.tokens[0]
    tokens[:, :] = 4 * torch.eye(4, 6, dtype=torch.float64).repeat(16, 1) + tokens / 8
    state["router"] = torch.eye(4, 6, dtype=torch.float64).repeat_interleave(2, 0) + state["router"] / 8
    state["router"][::2] *= 1.5
    rounded = {name: each.to(dtype).double() for name, each in state.items()}
    inputs = tokens.to(dtype).double(), case.gradients[0].to(dtype).double()
    expected = run(shape, rounded, *inputs)
    gpu_state = {name: each.to("cuda", torch.float32 if name == "bias" else dtype) for name, each in state.items()}
    gpu_inputs = inputs[0].to("cuda", dtype), inputs[1].to("cuda", dtype)
    found = run(shape, gpu_state, *gpu_inputs)  # compiles the kernels
    if dtype != torch.float64:
        with no_host_sync():
            again = run(shape, gpu_state, *gpu_inputs)
        assert all(torch.equal(found[name], again[name]) for name in found)
    for name, each in found.items():
        assert relative_error(each, expected[name]) < (3e-2 if dtype == torch.bfloat16 else close), name


@pytest.fixture(scope="module")
def one_rank() -> Iterator[dist.ProcessGroup]:
    """An ep group of this process only, which launches what a larger one would."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


@pytest.mark.parametrize("slots", [None, 2048])
def test_a_large_sublayer_is_reproducible(one_rank: dist.ProcessGroup, slots: int | None) -> None:
    shape = Experts(32, 4, 768, 768, bias_update_rate=1e-3)
    sizes = {"router": (32, 1024), "gate_up": (32, 1536, 1024), "down": (32, 1024, 768)}
    sizes |= {"shared_gate_up": (1536, 1024), "shared_down": (1024, 768)}
    state = {name: torch.randn(*size, device="cuda", dtype=torch.bfloat16) / 30 for name, size in sizes.items()}
    state["bias"] = torch.zeros(32, device="cuda")
    tokens, gradient = (torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ep = ExpertParallelGroup(one_rank, 1, 0, mode="all_gather", slots=ExpertSlots(slots, "cuda") if slots else None)
    first = run(shape, state, tokens, gradient, ep)
    with no_host_sync():
        second = run(shape, state, tokens, gradient, ep)
    for name, each in first.items():
        assert torch.isfinite(each).all() and torch.equal(each, second[name]), name


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2, "cuda")
    yield pool
    pool.stop()


@two_gpus
@pytest.mark.parametrize(("mode", "held"), [("slots", None), *product(("all_to_all", "all_gather"), (None, [7, 2]))])
@pytest.mark.parametrize("top_k", [1, 3])
def test_experts_on_two_gpus_equal_one_process(ranks: Ranks, mode, top_k: int, held: list[int] | None) -> None:
    shape = Experts(8, top_k, 5, 3, aux_loss_coef=0.3)
    case = case_of(shape, 2, 7, torch.tensor([0.0, 0, -9, -9, 0, 0, 0, 0]), mode=mode, held=held)
    check(case, ranks.run(case))
