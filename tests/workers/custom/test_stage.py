"""A stage of a custom model: what it saves, what it leaves to W, and whether the planner predicts both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from custom_models import custom_model
from plans import plan_of

from pentad.orchestrator.activations.activation_peaks import activations_of
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.custom.autograd import operands
from pentad.workers.custom.loader import initial_values
from pentad.workers.custom.stage import CustomStage
from pentad.workers.integrity.replay import replay
from pentad.workers.linear.weight_grad import AddWgrad, EmbeddingWgrad, LinearWgrad
from pentad.workers.model.base_stage import StageInputs, storage_id
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import Parameters, create_parameters

CPU = torch.device("cpu")
NAMES = ("gpt", "gpt_dropout", "conv")


def plan_for(folder: Path, corpus: str, name: str, stages: int = 3) -> Plan:
    return plan_of("gpipe", 1, stages, 2, corpus, model=custom_model(folder, name))


def parameters_of(plan: Plan, index: int) -> Parameters:
    assert plan.model.custom is not None
    initial = initial_values(plan.model.custom, plan.seed, *plan.layers[index][:2])
    return create_parameters(plan, ParamShard(index), CPU, initial=initial)


def stage_of(plan: Plan, index: int, rank: int = 0) -> CustomStage:
    parameters = {ParamShard(index): parameters_of(plan, index)}
    return CustomStage(plan, index, make_param_buffers(plan, rank, index, parameters), rank)


def inputs_of(plan: Plan, index: int) -> StageInputs:
    tokens = torch.arange(plan.slice_tokens) % plan.model.vocab
    last = index == plan.program.stages - 1
    received = None if index == 0 else random_stream(plan)
    return StageInputs(received, tokens if index == 0 else None, tokens if last else None)


def random_stream(plan: Plan) -> torch.Tensor:
    return torch.randn(plan.slice_tokens, plan.model.hidden, dtype=torch.float64)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_saved_and_deferred_bytes_are_those_of_the_planner(tmp_path: Path, corpus: str, name: str, index: int) -> None:
    plan = plan_for(tmp_path, corpus, name)
    stage, planned = stage_of(plan, index), activations_of(plan, index)
    inputs = inputs_of(plan, index)
    run_to_completion(stage.forward(0, inputs))
    saved = stage.saved[0]
    assert saved.tape is not None
    tensors = [*saved.tape.saved, *(each for each in (inputs.received, saved.logits, saved.lse) if each is not None)]
    buffers = sum(buffer.untyped_storage().nbytes() for layer in stage.layers for buffer in layer.buffers())
    assert distinct_bytes(tensors) == pytest.approx(planned.saved, rel=0.02, abs=buffers + 256)
    offloadable = sum(storage.nbytes() for storage in stage.offloadable(0))
    assert offloadable == pytest.approx(planned.saved - planned.input - planned.not_offloadable, rel=0.02)
    del saved, tensors
    run_to_completion(stage.backward_input(0, None if index == 2 else random_stream(plan)))
    work = [each for item in stage.deferred[0] for each in operands(item).values()]
    assert distinct_bytes(work) == pytest.approx(planned.deferred, rel=0.02, abs=256)


def distinct_bytes(tensors: list[torch.Tensor]) -> int:
    return sum({storage_id(each): each.untyped_storage().nbytes() for each in tensors}.values())


def test_linear_layers_and_embeddings_are_left_to_w(tmp_path: Path, corpus: str) -> None:
    plan = plan_for(tmp_path, corpus, "gpt")
    stage = stage_of(plan, 0)
    run_to_completion(stage.forward(0, inputs_of(plan, 0)))
    run_to_completion(stage.backward_input(0, random_stream(plan)))
    kinds, blocks = [type(item) for item in stage.deferred[0]], len(stage.layers) - 1
    assert kinds.count(LinearWgrad) == 4 * blocks
    assert kinds.count(EmbeddingWgrad) == 2
    assert kinds.count(AddWgrad) == (4 + 4) * blocks  # biases, and both norms
    gradients = stage.param_buffers[0].gradients
    assert gradients is not None
    assert not gradients.flat.any()
    stage.backward_weight(0)
    assert all(gradient.any() for gradient in gradients.tensors.values())


@pytest.mark.parametrize("name", NAMES)
def test_w_does_not_read_transfer_buffers(tmp_path: Path, corpus: str, name: str) -> None:
    """Transfers reuse their slots after B."""
    plan = plan_for(tmp_path, corpus, name)
    results = []
    for overwritten in (False, True):
        torch.manual_seed(3)
        stage, inputs, dy = stage_of(plan, 1), inputs_of(plan, 1), random_stream(plan)
        run_to_completion(stage.forward(0, inputs))
        run_to_completion(stage.backward_input(0, dy))
        for slot in (inputs.received, dy) if overwritten else ():
            assert isinstance(slot, torch.Tensor)
            slot.fill_(torch.nan)
        stage.backward_weight(0)
        results.append(stage.param_buffers[0].parameters.gradient)
    assert torch.equal(*results)


def test_weights_may_move_between_f_and_b(tmp_path: Path, corpus: str) -> None:
    """As under ZeRO-3, where other stages use the buffer in between."""
    plan = plan_for(tmp_path, corpus, "conv")
    results = []
    for moved in (False, True):
        torch.manual_seed(3)
        stage, inputs, dy = stage_of(plan, 1), inputs_of(plan, 1), random_stream(plan)
        run_to_completion(stage.forward(0, inputs))
        if moved:
            move_weights(stage)
        dx = run_to_completion(stage.backward_input(0, dy))
        stage.backward_weight(0)
        assert dx is not None
        results.append(torch.cat([dx.flatten(), stage.param_buffers[0].parameters.gradient.flatten()]))
    assert torch.equal(*results)


def move_weights(stage: CustomStage) -> None:
    buffers = stage.param_buffers[0]
    weights = buffers.parameters.full_weights
    assert weights is not None
    buffers.set_weights(torch.cat([weights.new_zeros(8), weights])[8:])
    weights.fill_(torch.nan)
    stage.bind()


def test_changing_in_place_what_b_needs_is_an_error(tmp_path: Path, corpus: str) -> None:
    plan = plan_for(tmp_path, corpus, "gpt")
    stage, inputs = stage_of(plan, 1), inputs_of(plan, 1)
    run_to_completion(stage.forward(0, inputs))
    assert isinstance(inputs.received, torch.Tensor)
    inputs.received.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        run_to_completion(stage.backward_input(0, random_stream(plan)))


def test_initial_values_do_not_depend_on_the_stage(tmp_path: Path, corpus: str) -> None:
    for name in NAMES:
        full = parameters_of(plan_for(tmp_path, corpus, name, stages=1), 0)
        expected, plan = full.views(full.master), plan_for(tmp_path, corpus, name)
        for index in range(3):
            part = parameters_of(plan, index)
            assert all(torch.equal(value, expected[key]) for key, value in part.views(part.master).items())


@pytest.mark.parametrize("name", ["gpt_dropout", "conv"])
def test_an_evaluation_has_no_dropout_saves_nothing_and_skips_rows_without_targets(
    tmp_path: Path, corpus: str, name: str
) -> None:
    plan = plan_for(tmp_path, corpus, name, stages=1)
    stage, length = stage_of(plan, 0), plan.batch.sequence_length
    _, tokens, targets, *_ = inputs_of(plan, 0)
    assert tokens is not None and targets is not None
    padded = torch.where(torch.arange(len(targets)) < length, targets, -100)
    stage.begin(3, plan.batch.microbatches, plan.batch.tokens)
    losses = []
    for mb, given in enumerate((targets, padded)):
        run_to_completion(stage.evaluate(mb, StageInputs(None, tokens, given)))
        losses.append(stage.loss_sums[mb].sum().item())
    assert not stage.saved and all(module.training for layer in stage.layers for module in layer.modules())
    x = tokens.view(-1, length)
    with torch.no_grad():
        for layer in stage.layers:
            x = layer.eval()(x)
        each = stage.loss or (lambda x, y: torch.nn.functional.cross_entropy(x.mT, y, reduction="none"))
        expected = each(x, targets.view(-1, length))
    assert losses == pytest.approx([expected.sum().item(), expected[0].sum().item()], rel=1e-12)


def test_replicas_replay_a_microbatch_alike_though_their_dropout_differs(tmp_path: Path, corpus: str) -> None:
    plan = plan_of("gpipe", 2, 1, 2, corpus, model=custom_model(tmp_path, "gpt_dropout"))
    inputs = inputs_of(plan, 0)._replace(targets=torch.arange(plan.slice_tokens))
    replays, losses = [], []
    for rank in range(2):
        stage = stage_of(plan, 0, rank)
        replays.append({what: int(value) for what, value in replay(plan, rank, stage, 0, step=3).items()})
        run_to_completion(stage.forward(1, inputs))
        losses.append(stage.loss_sums[1])
    assert replays[0] == replays[1]
    assert not torch.equal(losses[0], losses[1])
