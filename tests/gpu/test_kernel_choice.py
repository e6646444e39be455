"""precision.kernels on GPUs: the same training with any of them, and what calibration measures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import same_bits
from fleet import losses_of
from fp8_plans import BLOCK, EXPERTS, WIDE_EXPERTS, fp8_plan
from gpus import RANKS_A_GPU, on_gpu
from plans import plan_of, reference
from small_models import LATENT_MOE, WIDE, WIDE_MOE

from pentad.orchestrator.activations.allocations import piece_of
from pentad.orchestrator.activations.kernel_choice import kernel_shapes
from pentad.schedules.simulate.rates import KernelChoice, KernelTimes
from pentad.schedules.spec.plan import Plan
from pentad.workers.health.device_rates import Clock, Tensors
from pentad.workers.health.kernel_times import measure_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU)]
MODELS = {"dense": replace(WIDE, head_dim=64), "experts": replace(WIDE_MOE, head_dim=32), "latent": LATENT_MOE}


def plan_on_gpu(corpus: str, name: str, dtype: str = "bfloat16", **options: Any) -> Plan:
    return on_gpu(plan_of("1f1b", 1, 1, 2, corpus, model=MODELS[name], **options), "nccl", dtype)


def mean_loss(plan: Plan, outcomes: Any) -> float:
    return float(sum(losses_of(outcomes).values()) / plan.batch.tokens)


def check(plan: Plan, outcomes: Any, loss: float, norm: float) -> None:
    """Compares the loss and gradient norm of the first step, within these relative bounds."""
    losses, _, norms, _ = reference(plan)
    assert mean_loss(plan, outcomes) == pytest.approx(losses[0], rel=loss)
    assert outcomes[0].results[0].grad_norm == pytest.approx(norms[0], rel=norm)


@pytest.mark.parametrize("kernels", ["auto", "triton", "torch", "cudnn"])
@pytest.mark.parametrize("model", MODELS)
def test_any_kernels_train_as_one_process(gpus, corpus, model, kernels):
    plan = replace(plan_on_gpu(corpus, model), kernels=KernelChoice(kernels), deterministic=kernels != "cudnn")
    outcomes = gpus.run(plan, [(0, 2)])
    check(plan, outcomes, 3e-2, 0.1)
    if plan.deterministic:
        assert same_bits(outcomes[0].state, gpus.run(plan, [(0, 2)])[0].state)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("model", MODELS)
def test_ours_and_the_references_agree_in_float32(gpus, corpus, model, kernels):
    plan = replace(plan_on_gpu(corpus, model, "float32"), kernels=KernelChoice(kernels))
    check(plan, gpus.run(plan, [(0, 1)]), 1e-4, 1e-3)


@pytest.mark.parametrize(("spec", "sizes"), [(BLOCK, {"layers": 2}), (EXPERTS, {"layers": 2, "model": WIDE_EXPERTS})])
def test_references_of_casts_to_8_bits_run_on_gpus(gpus, corpus, spec, sizes):
    plan = on_gpu(fp8_plan(spec, "1f1b", sizes, corpus), "nccl", "float32")
    outcomes = [gpus.run(replace(plan, kernels=KernelChoice(name)), [(0, 1)]) for name in ("torch", "auto")]
    usual, references = (mean_loss(plan, each) for each in reversed(outcomes))
    assert references == pytest.approx(usual, rel=1e-3)


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_measured_is_what_a_run_does(gpus, corpus, deterministic, document_mask):
    """Each implementation is timed at the plan's shapes, and a run with any of them trains as before."""
    plan = replace(plan_on_gpu(corpus, "experts", document_mask=document_mask), deterministic=deterministic)
    device = torch.device("cuda", 0)
    shapes = kernel_shapes(plan.model, piece_of(plan))
    found = measure_kernels(shapes, Tensors.of(device), Clock(device, 1e-3, lambda: None))
    times = [KernelTimes(each["op"], tuple(each["sizes"]), tuple(each["seconds"])) for each in found]
    assert len(times) == 6 and all(seconds > 0 for each in times for _, seconds in each.seconds)
    assert [len(each.seconds) > 1 for each in times[:2]] == [True, True]
    usual, slowest = (tuple((each.key, each.seconds[place][0]) for each in times) for place in (0, -1))
    losses = []
    for measured in ((), usual, slowest):
        chosen = replace(plan, kernels=KernelChoice("auto", measured))
        losses.append(mean_loss(plan, gpus.run(chosen, [(0, 1)])))
    if deterministic:
        assert losses[0] == losses[1], "the usual ones are those without a table"
    assert losses[2] == pytest.approx(losses[0], rel=1e-2)
