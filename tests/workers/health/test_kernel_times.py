"""The times of implementations, and that the timed calls are those of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import plan_of
from pydantic import TypeAdapter
from small_models import MOE

from pentad.kernels.attention.attention_partial import attention_key
from pentad.kernels.attention.attention_reference import AttentionOptions
from pentad.kernels.backend import KernelKey, KernelsInUse, choose_kernel, kernels_name, use_kernels
from pentad.orchestrator.activations.allocations import piece_of
from pentad.orchestrator.activations.kernel_choice import kernel_shapes
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.rates import KernelChoice, KernelTimes
from pentad.schedules.spec.plan import Plan
from pentad.workers.health import kernel_times
from pentad.workers.health.device_rates import Clock, Tensors
from pentad.workers.health.kernel_times import measure_kernels
from pentad.workers.linear import grouped_linear
from pentad.workers.parallel import context_parallel
from pentad.workers.runtime import rank_setup
from pentad.workers.runtime.runner import Runner

pytest.importorskip("triton")
CPU = torch.device("cpu")
SHAPES = [
    *(("attention", (2, 16, 4, 2, 8, 8)), ("attention_backward", (1, 16, 4, 4, 12, 8))),
    *(("attention_backward_deterministic", (1, 16, 4, 2, 8, 8)), ("packed_attention", (2, 20, 4, 2, 8, 8))),
    ("packed_attention_backward_deterministic", (2, 20, 4, 2, 8, 8)),
    *(("grouped_gemm", (40, 3, 16, 8)), ("grouped_gemm_transposed", (40, 3, 8, 16))),
]
_times: TypeAdapter[KernelTimes] = TypeAdapter(KernelTimes)


def test_each_implementation_is_timed_while_it_alone_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is chosen by the key that the planner gives to ranks; afterwards the earlier choice is back."""
    used, done = list[KernelsInUse](), list[None]()

    def use(kernels: KernelsInUse) -> KernelsInUse:
        used.append(kernels)
        return use_kernels(kernels)

    monkeypatch.setattr(kernel_times, "use_kernels", use)
    clock = Clock(CPU, 1e-6, lambda: None)
    measured = measure_kernels(SHAPES, Tensors.of(CPU), clock, lambda: done.append(None))
    found = [_times.validate_python(each) for each in measured]
    assert [(each.op, each.sizes) for each in found] == SHAPES and len(done) == len(SHAPES)
    assert all(seconds > 0 for each in found for _, seconds in each.seconds)
    expected = [{each.key: kernel} for each in found for kernel, _ in each.seconds]
    assert [each.measured for each in used[::2]] == expected
    assert all(each == KernelsInUse() for each in used[1::2]) and use_kernels(KernelsInUse()) == KernelsInUse()


def test_the_fastest_is_the_usual_one_unless_another_takes_notably_less() -> None:
    def fastest(**seconds: float) -> str:
        return KernelTimes("attention", (1, 2, 3, 4, 5, 6), tuple(seconds.items())).fastest

    assert fastest(cudnn=1.0, triton=0.99, flash=2.0) == "cudnn"
    assert fastest(cudnn=1.0, triton=0.9, flash=0.8) == "flash"
    assert fastest(torch=1.0) == "torch"


def run_one_step(plan: Plan, folder: Path) -> None:
    runner = Runner(plan, 0, folder / "progress")
    try:
        runner.connect(runner.serve("127.0.0.1", 30), 30)
        runner.restore(None)
        runner.run(0, 1)
    finally:
        runner.close()


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_calls_of_a_run_have_the_keys_of_those_that_are_planned(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    found = set[KernelKey]()
    attend, multiply = context_parallel.attention, grouped_linear.grouped_gemm

    def attention(q: Any, k: Any, v: Any, deterministic: bool, scale: float | None) -> Any:
        options = AttentionOptions(True, 1.0, deterministic)
        found.update(attention_key(q, k, v, options, backward=each) for each in (False, True))
        return attend(q, k, v, deterministic, scale)

    def grouped_gemm(x: Any, weights: Any, offsets: Any) -> Any:
        from pentad.kernels.moe.grouped_gemm_triton import grouped_key

        found.add(grouped_key(weights))
        return multiply(x, weights, offsets)

    monkeypatch.setattr(context_parallel, "attention", attention)
    monkeypatch.setattr(grouped_linear, "grouped_gemm", grouped_gemm)
    plan = replace(plan_of("1f1b", 1, 1, 2, corpus, "float32", model=MOE), deterministic=deterministic)
    run_one_step(plan, tmp_path)
    piece = piece_of(plan)._replace(device="cuda", dtype="bfloat16")
    assert found == {KernelTimes(*shape, ()).key for shape in kernel_shapes(plan.model, piece)}


def test_a_rank_without_a_library_of_its_plan_says_so(corpus: str) -> None:
    plan = replace(plan_of("1f1b", 1, 1, 2, corpus), kernels=KernelChoice(cudnn_frontend=True))
    with pytest.raises(
        PentadError, match=r"^nvidia-cudnn-frontend is not installed on this rank, .*: expected it on all"
    ):
        rank_setup.use_kernels(plan)


def test_a_rank_uses_what_its_newest_plan_says(corpus: str, tmp_path: Path) -> None:
    key = ("attention", 1, 1, 8, 8)
    plan = plan_of("1f1b", 1, 1, 2, corpus, "float32")
    before = use_kernels(KernelsInUse())
    try:
        for number, choice in enumerate((KernelChoice("torch"), KernelChoice("auto", ((key, "flash"),)))):
            (tmp_path / str(number)).mkdir()
            run_one_step(replace(plan, kernels=choice), tmp_path / str(number))
            assert kernels_name() == choice.name
            assert choose_kernel(("cudnn", "flash"), key) == ("flash" if choice.measured else "cudnn")
    finally:
        use_kernels(before)
