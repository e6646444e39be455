"""For RECOMPUTE of parts of layers, the planner counts the kernels that a stage launches, and host time for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from fake_groups import FAMILIES, make_stage
from plans import plan_of
from torch.utils._python_dispatch import TorchDispatchMode

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.hardware import rates_of
from pentad.orchestrator.planning.part_flops import FORWARD_KERNELS, part_kernels
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.passes.recompute import recomputed_parts
from pentad.schedules.simulate.rates import AttentionRates
from pentad.workers.model.base_stage import StageInputs
from pentad.workers.parallel.async_ops import run_to_completion

LAYERS = 2  # of the stage under test
VIEWS = {"view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "unsqueeze", "split"}
VIEWS |= {"split_with_sizes", "detach", "unbind", "alias", "as_strided", "empty"}


class Launches(TorchDispatchMode):
    """Counts kernels: operations with a Triton twin as one each, and torch operations outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.depth = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.depth == 0 and func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if frame.f_code.co_qualname == "triton_on_gpu.<locals>.operation" and event in ("call", "return"):
            self.count += event == "call" and self.depth == 0
            self.depth += 1 if event == "call" else -1


def launches(run: Callable[[], object]) -> int:
    with Launches() as found:
        sys.setprofile(found.profile)
        try:
            run()
        finally:
            sys.setprofile(None)
    return found.count


def recompute_launches(corpus: str, family: str, mode: str, fraction: float = 1.0) -> int:
    """Kernels of a RECOMPUTE of 32 rows by a stage of LAYERS."""
    plan = plan_of("gpipe", 1, 3, 1, corpus, model=FAMILIES[family], recompute=mode, recompute_fraction=fraction)
    plan = replace(plan, batch=replace(plan.batch, sequence_length=32))
    stage, received = make_stage(plan, 1), torch.randn(32, plan.model.hidden, dtype=torch.float64)
    run_to_completion(stage.forward(0, StageInputs(received, None, None)))
    return launches(lambda: stage.recompute(0))


BESIDE = {"llama": 0, "mixtral": 1, "deepseek": 3}
CASES = [("llama", "qkv_linear,core_attn"), ("llama", "mlp,attn_proj"), ("mixtral", "moe"), ("deepseek", "mla_up_proj")]
CASES += [("llama", each) for each in ("mlp", "core_attn", "qkv_linear", "attn_proj")]
CASES += [(family, mode) for family in BESIDE for mode in ("attention", "selective")]


@pytest.mark.sampled(13)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("family", "mode"), CASES)
def test_recompute_launches_the_kernels_of_its_parts(
    one_rank: None, corpus: str, family: str, mode: str, fraction: float
) -> None:
    """CPUs have no fused attention and recompute its result with its inputs. A few kernels are not planned (BESIDE):
    with a fraction of the rows, a mixture reads its norm again, and latent attention copies its result; a shared
    expert has one more product."""
    model, parts = FAMILIES[family], recomputed_parts(mode)
    kernels = part_kernels(model, model.layers - 1, mode, saves_rows=fraction < 1)
    found = recompute_launches(corpus, family, mode, fraction)
    if parts & {"core_attn", "qkv_linear", "mla_up_proj"}:
        found -= recompute_launches(corpus, family, "core_attn")
        kernels -= "core_attn" in parts
    assert LAYERS * kernels <= found <= LAYERS * (kernels + BESIDE[family])


def test_forward_of_a_dense_layer_launches_nine_kernels(one_rank: None, corpus: str) -> None:
    """And one more, which adds the terms of the residual stream, at the end of a stage."""
    stage = make_stage(plan_of("gpipe", 1, 3, 1, corpus, model=FAMILIES["llama"]), 1)
    received = torch.randn(stage.plan.sequence_parallel_tokens, stage.plan.model.hidden, dtype=torch.float64)
    found = launches(lambda: run_to_completion(stage.forward(0, StageInputs(received, None, None))))
    assert found == LAYERS * FORWARD_KERNELS + 1


@pytest.mark.parametrize(
    ("mode", "fraction", "share"),
    [
        ("full", 1.0, 1.0),
        ("attention", 1.0, 6 / 9),
        ("mlp", 1.0, 2 / 9),
        ("core_attn", 1.0, 1 / 9),
        ("mlp", 0.5, 3 / 9),
        ("mlp,attn_proj", 0.5, 6 / 9),
    ],
)
def test_recompute_of_parts_takes_the_host_their_share_of_a_layer(mode: str, fraction: float, share: float) -> None:
    """A share of F of two layers, for which the host takes 20 s and the GPU no time."""
    given = [f"memory.recompute={mode if mode in ('full', 'attention') else f'[{mode}]'}", "memory.unit_layers=2"]
    given += [f"memory.recompute_fraction={fraction}", "mesh.pp=1", "model.layers=2", "schedule.name=1f1b"]
    fast = ((1.0, 1e30),)
    attention, usual = (AttentionRates(128, fast, fast),), rates_of("cuda", "NVIDIA H200")
    idle = replace(usual, products=fast, attention=attention, elementwise=1e30, memory=1e30)
    plan = make_plan(load(None, given), "cuda")
    unit = next(unit for unit, held in enumerate(plan.layers) if held.numbers)
    costs = costs_of(plan, replace(idle, layer_issue=(10.0, 0.0, 0.0)))
    assert costs.forward[unit] == pytest.approx(20.0) and costs.recompute[unit] == pytest.approx(share * 20.0)
