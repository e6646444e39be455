"""A stage that runs sequences in slices computes what it computes for entire ones."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from plans import MODEL, is_close, plan_of

from pentad.schedules.spec.plan import ParamShard
from pentad.workers.data.batch_loader import BatchLoader
from pentad.workers.data.sources import open_dataset
from pentad.workers.model.base_stage import StageInputs
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import Parameters, create_parameters

CPU = torch.device("cpu")
ROWS, LENGTH = 2, 8


class Holder(NamedTuple):
    stage: Stage
    parameters: Parameters

    def forward(
        self,
        slice_index: int,
        received: torch.Tensor | None,
        tokens: torch.Tensor | None,
        targets: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        result = run_to_completion(self.stage.forward(slice_index, StageInputs(received, tokens, targets)))
        assert not isinstance(result, tuple)
        return result

    def backward(self, slice_index: int, dy: torch.Tensor | None) -> torch.Tensor | None:
        """B and W."""
        dx = run_to_completion(self.stage.backward_input(slice_index, dy))
        self.stage.backward_weight(slice_index)
        return dx

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        return self.parameters.views(self.parameters.gradient)


def stages_of(
    corpus: str, slices: int, ranks: int = 2, dtype: str = "float64", device: torch.device = CPU
) -> list[Holder]:
    plan = plan_of("seq-1f1b", 1, ranks, 2, corpus, dtype, slices)
    assert (plan.batch.micro_batch_size, plan.batch.sequence_length) == (ROWS, LENGTH)
    assert plan.slice_tokens == ROWS * LENGTH // slices
    holders = []
    for index in range(ranks):
        shard = ParamShard(index)
        parameters = create_parameters(plan, shard, device)
        buffers = make_param_buffers(plan, 0, index, {shard: parameters})
        holders.append(Holder(Stage(plan, index, buffers), parameters))
    return holders


def cut(full: torch.Tensor, slices: int) -> list[torch.Tensor]:
    """[ROWS x LENGTH, ...] cut into slices, each with its rows one after another."""
    size = LENGTH // slices
    rows = full.view(ROWS, LENGTH, *full.shape[1:])
    return [rows[:, k * size : (k + 1) * size].flatten(0, 1).contiguous() for k in range(slices)]


def step(
    holders: list[Holder], tokens: torch.Tensor, targets: torch.Tensor, slices: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One microbatch through two stages: results of the first and the gradients that it receives, by slice."""
    first, last = holders
    results: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for k, part in enumerate(cut(tokens, slices)):
        result = first.forward(k, None, part, None)
        assert result is not None
        results.append(result)
    for k, part in enumerate(cut(targets, slices)):
        last.forward(k, results[k], None, part)
    for k in reversed(range(slices)):
        dy = last.backward(k, None)
        assert dy is not None
        first.backward(k, dy)
        gradients.insert(0, dy)
    return results, gradients


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_results_gradients_and_loss_are_those_of_uncut_sequences(corpus: str, slices: int) -> None:
    tokens, targets = torch.randint(MODEL.vocab, (2, ROWS * LENGTH))
    uncut, sliced = stages_of(corpus, 1), stages_of(corpus, slices)
    (expected_result,), (expected_dy,) = step(uncut, tokens, targets, 1)
    results, gradients = step(sliced, tokens, targets, slices)
    for found, expected in ((results, expected_result), (gradients, expected_dy)):
        assert all(is_close(*pair, 1e-12) for pair in zip(found, cut(expected, slices), strict=True))
    assert is_close(sliced[1].stage.loss_sums[0], uncut[1].stage.loss_sums[0], 1e-12)
    for mine, reference in zip(sliced, uncut, strict=True):
        assert all(is_close(value, reference.gradients[name], 1e-11) for name, value in mine.gradients.items())
        assert not (mine.stage.saved or mine.stage.kv_caches or mine.stage.deferred)


def test_interleaved_microbatches_have_separate_kv_caches(corpus: str) -> None:
    """The second microbatch starts before the first has ended, as in the steady state of a schedule."""
    tokens, targets = torch.randint(MODEL.vocab, (2, 2 * ROWS * LENGTH)).unflatten(1, (2, -1))
    uncut, sliced = (stages_of(corpus, slices, ranks=1)[0] for slices in (1, 2))
    for mb in range(2):
        uncut.forward(mb, None, tokens[mb], targets[mb])
        uncut.backward(mb, None)
    inputs = [pair for mb in range(2) for pair in zip(cut(tokens[mb], 2), cut(targets[mb], 2), strict=True)]
    for op, index in (("F", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 0), ("F", 3), ("B", 3), ("B", 2)):
        if op == "F":
            sliced.forward(index, None, *inputs[index])
        else:
            sliced.backward(index, None)
    assert is_close(sliced.parameters.gradient, uncut.parameters.gradient, 1e-12)
    assert is_close(sliced.stage.loss_sums, uncut.stage.loss_sums, 1e-12)


def test_gradients_of_cached_keys_accumulate_in_float32(corpus: str) -> None:
    """Later slices add to the gradients of earlier keys, which are rounded to bfloat16 once."""
    first, last = stages_of(corpus, 4, dtype="bfloat16")
    tokens, targets = torch.randint(MODEL.vocab, (2, ROWS * LENGTH))
    for k, (token_slice, target_slice) in enumerate(zip(cut(tokens, 4), cut(targets, 4), strict=True)):
        last.forward(k, first.forward(k, None, token_slice, None), None, target_slice)
    run_to_completion(last.stage.backward_input(3, None))
    gradients = [cache.gradients for cache in last.stage.kv_caches[0]]
    assert all(pair is not None and {each.dtype for each in pair} == {torch.float32} for pair in gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5), ("bfloat16", 3e-2)])
def test_on_a_gpu_gradients_are_those_of_uncut_sequences_and_reproducible(
    corpus: str, slices: int, dtype: str, tolerance: float
) -> None:
    tokens, targets = torch.randint(MODEL.vocab, (2, ROWS * LENGTH))
    uncut = stages_of(corpus, 1)
    step(uncut, tokens, targets, 1)
    first, second = (stages_of(corpus, slices, dtype=dtype, device=torch.device("cuda")) for _ in range(2))
    for holders in (first, second):
        step(holders, tokens.cuda(), targets.cuda(), slices)
    for mine, again, reference in zip(first, second, uncut, strict=True):
        assert torch.equal(mine.parameters.gradient, again.parameters.gradient)
        for name, gradient in mine.gradients.items():
            assert is_close(gradient.double().cpu(), reference.gradients[name], tolerance), name


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_the_batch_loader_cuts_sequences(corpus: str, slices: int) -> None:
    plan = plan_of("seq-1f1b", 1, 2, 3, corpus, slices=slices)
    data = open_dataset(plan.data, plan.batch, MODEL.vocab, plan.seed)
    loaders = BatchLoader(plan_of("1f1b", 1, 2, 3, corpus), 1, data, CPU), BatchLoader(plan, 1, data, CPU)
    uncut, sliced = (loader(5).tokens for loader in loaders)
    assert sorted(sliced) == list(range(3 * slices))
    for index, batch in sliced.items():
        mb, k = divmod(index, slices)
        assert torch.equal(batch.inputs, cut(uncut[mb].inputs, slices)[k])
        assert torch.equal(batch.targets, cut(uncut[mb].targets, slices)[k])
        assert batch.inputs.is_contiguous()
    for loader in loaders:
        loader.close()
