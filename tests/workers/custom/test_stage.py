"""One stage of a user's own layers: what it keeps, what it leaves to W, and what the estimate says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from custom_models import made
from plans import plan_of

from pentad.orchestrator.planning.activations import shares_of
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.custom.autograd import storage_of
from pentad.workers.custom.loader import initial_values
from pentad.workers.custom.stage import CustomStage
from pentad.workers.model.weight_grad import Lookup, Product, Sum
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.param_buffers import ParamBuffers, buffers_of
from pentad.workers.params.parameters import Parameters, create

CPU = torch.device("cpu")
NAMES = ("gpt", "dropping", "made")


def parameters_of(plan: Plan, index: int) -> Parameters:
    assert plan.model.custom is not None
    return create(
        plan, ParamShard(index), CPU, initial=initial_values(plan.model.custom, plan.seed, *plan.layers[index])
    )


def stage_of(plan: Plan, index: int) -> CustomStage:
    return CustomStage(plan, index, buffers_of(plan, 0, index, {ParamShard(index): parameters_of(plan, index)}))


Given = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def given(plan: Plan, index: int, piece: int = 0) -> Given:
    """What F gets: received, tokens, targets."""
    tokens = (torch.arange(plan.piece_tokens) + piece) % plan.model.vocab
    received = torch.randn(plan.piece_tokens, plan.model.hidden, dtype=torch.float64)
    last = index == plan.program.stages - 1
    return None if index == 0 else received, tokens if index == 0 else None, tokens if last else None


def gradient_of(plan: Plan, index: int) -> torch.Tensor:
    return torch.randn(plan.piece_tokens, plan.model.hidden, dtype=torch.float64)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_stage_keeps_is_what_the_estimate_says(tmp_path: Path, corpus: str, name: str, index: int) -> None:
    plan = plan_of("gpipe", 1, 3, 2, corpus, model=made(tmp_path, name))
    stage, of = stage_of(plan, index), shares_of(plan, index)
    inputs = given(plan, index)
    run_to_completion(stage.forward(0, *inputs))
    kept = stage.kept[0]
    assert kept.tape is not None
    tensors = [*kept.tape.saved, *(each for each in (inputs[0], kept.logits, kept.lse) if each is not None)]
    sizes = {storage_of(each): each.untyped_storage().nbytes() for each in tensors}
    tables = sum(b.untyped_storage().nbytes() for layer in stage.layers for b in layer.buffers())
    assert sum(sizes.values()) == pytest.approx(of.saved, rel=0.02, abs=tables + 256)
    movable = sum(storage.nbytes() for storage in stage.movable(0))
    assert movable == pytest.approx(of.saved - of.entry - of.still, rel=0.02)
    dy = None if index == 2 else gradient_of(plan, index)
    del kept, tensors
    run_to_completion(stage.backward_input(0, dy))
    work = [each for item in stage.deferred[0] for name, each in item._asdict().items() if name != "gradient"]
    found = {storage_of(each): each.untyped_storage().nbytes() for each in work}
    assert sum(found.values()) == pytest.approx(of.deferred, rel=0.02, abs=256)


def test_linear_layers_and_lookups_wait_for_w(tmp_path: Path, corpus: str) -> None:
    plan = plan_of("gpipe", 1, 3, 2, corpus, model=made(tmp_path, "gpt"))
    stage = stage_of(plan, 0)
    run_to_completion(stage.forward(0, *given(plan, 0)))
    run_to_completion(stage.backward_input(0, gradient_of(plan, 0)))
    work, blocks = stage.deferred[0], len(stage.span) - 1
    kinds = [type(item) for item in work]
    assert kinds.count(Product) == 4 * blocks
    assert kinds.count(Lookup) == 2
    assert kinds.count(Sum) == (4 + 4) * blocks  # biases, and both norms
    assert not stage.banks[0].parameters.gradient.any()
    stage.backward_weight(0)
    assert all(gradient.any() for gradient in stage.banks[0].gradients.values())


@pytest.mark.parametrize("name", NAMES)
def test_w_reads_no_memory_of_transfers(tmp_path: Path, corpus: str, name: str) -> None:
    """They use their slots again after B."""
    plan = plan_of("gpipe", 1, 3, 2, corpus, model=made(tmp_path, name))
    found = []
    for spoiled in (False, True):
        torch.manual_seed(3)
        stage, inputs, dy = stage_of(plan, 1), given(plan, 1), gradient_of(plan, 1)
        run_to_completion(stage.forward(0, *inputs))
        run_to_completion(stage.backward_input(0, dy))
        for slot in (inputs[0], dy) if spoiled else ():
            assert slot is not None
            slot.fill_(torch.nan)
        stage.backward_weight(0)
        found.append(stage.banks[0].parameters.gradient)
    assert torch.equal(*found)


def test_weights_may_lie_elsewhere_in_b(tmp_path: Path, corpus: str) -> None:
    """As with ZeRO 3, whose buffers other stages use between F and B."""
    plan = plan_of("gpipe", 1, 3, 2, corpus, model=made(tmp_path, "made"))
    found = []
    for moved in (False, True):
        torch.manual_seed(3)
        stage, inputs, dy = stage_of(plan, 1), given(plan, 1), gradient_of(plan, 1)
        run_to_completion(stage.forward(0, *inputs))
        if moved:
            move(stage, stage.banks[0])
        result = run_to_completion(stage.backward_input(0, dy))
        stage.backward_weight(0)
        assert result is not None
        found.append(torch.cat([result.flatten(), stage.banks[0].parameters.gradient.flatten()]))
    assert torch.equal(*found)


def move(stage: CustomStage, bank: ParamBuffers) -> None:
    weights = bank.parameters.weights
    assert weights is not None
    bank.read(torch.cat([weights.new_zeros(8), weights])[8:])
    weights.fill_(torch.nan)
    stage.bind()


def test_a_layer_that_changes_what_b_needs_is_told(tmp_path: Path, corpus: str) -> None:
    plan = plan_of("gpipe", 1, 3, 2, corpus, model=made(tmp_path, "gpt"))
    stage, inputs = stage_of(plan, 1), given(plan, 1)
    run_to_completion(stage.forward(0, *inputs))
    assert inputs[0] is not None
    inputs[0].zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        run_to_completion(stage.backward_input(0, gradient_of(plan, 1)))


def test_first_values_are_those_of_the_users_file_wherever_they_are_made(tmp_path: Path, corpus: str) -> None:
    for name in NAMES:
        model = made(tmp_path, name)
        whole = parameters_of(plan_of("gpipe", 1, 1, 2, corpus, model=model), 0)
        plan = plan_of("gpipe", 1, 3, 2, corpus, model=model)
        expected = whole.views(whole.master)
        for index in range(3):
            part = parameters_of(plan, index)
            assert all(torch.equal(value, expected[key]) for key, value in part.views(part.master).items())
