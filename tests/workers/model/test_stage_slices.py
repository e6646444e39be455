"""A stage that gets its sequences in slices does what it does with whole ones."""

from __future__ import annotations

import pytest
import torch
from plans import MODEL, close, plan_of

from pentad.schedules.spec.plan import ParamShard
from pentad.workers.data.batch_loader import BatchLoader
from pentad.workers.data.corpus import open_corpus
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.param_buffers import buffers_of
from pentad.workers.params.parameters import Parameters, create

CPU = torch.device("cpu")
ROWS, LENGTH = 2, 8


def made(
    corpus: str, slices: int, ranks: int = 2, dtype: str = "float64", device: torch.device = CPU
) -> list[tuple[Stage, Parameters]]:
    plan = plan_of("seq-1f1b", 1, ranks, 2, corpus, dtype, slices)
    assert (plan.batch.rows, plan.batch.length, plan.piece_tokens) == (ROWS, LENGTH, ROWS * LENGTH // slices)
    parameters = [create(plan, ParamShard(index), device) for index in range(ranks)]
    return [
        (Stage(plan, index, buffers_of(plan, 0, index, {ParamShard(index): held})), held)
        for index, held in enumerate(parameters)
    ]


def sliced(whole: torch.Tensor, slices: int) -> list[torch.Tensor]:
    """Tokens of [ROWS x LENGTH] by slice, rows one after the other."""
    cut = LENGTH // slices
    rows = whole.view(ROWS, LENGTH, *whole.shape[1:])
    return [rows[:, k * cut : (k + 1) * cut].flatten(0, 1) for k in range(slices)]


def tensor(found: torch.Tensor | None) -> torch.Tensor:
    assert found is not None
    return found


def step(
    pairs: list[tuple[Stage, Parameters]], tokens: torch.Tensor, targets: torch.Tensor, slices: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One microbatch through two stages: what the first gives on, and the gradient that it gets back, by slice."""
    (first, _), (last, _) = pairs
    between = [
        tensor(run_to_completion(first.forward(k, None, part, None))) for k, part in enumerate(sliced(tokens, slices))
    ]
    for k, part in enumerate(sliced(targets, slices)):
        run_to_completion(last.forward(k, between[k], None, part))
    back: list[torch.Tensor] = []
    for k in reversed(range(slices)):
        dy = tensor(run_to_completion(last.backward_input(k, None)))
        last.backward_weight(k)
        run_to_completion(first.backward_input(k, dy))
        first.backward_weight(k)
        back.insert(0, dy)
    return between, back


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_slices_give_the_streams_gradients_and_loss_of_whole_sequences(corpus: str, slices: int) -> None:
    tokens, targets = torch.randint(MODEL.vocab, (2, ROWS * LENGTH))
    whole, cut = made(corpus, 1), made(corpus, slices)
    (stream,), (dy,) = step(whole, tokens, targets, 1)
    streams, gradients = step(cut, tokens, targets, slices)
    for found, expected in ((streams, stream), (gradients, dy)):
        assert all(close(*pair, 1e-12) for pair in zip(found, sliced(expected, slices), strict=True))
    assert float(cut[1][0].loss_sums[0]) == pytest.approx(float(whole[1][0].loss_sums[0]), rel=1e-12)
    for (stage, mine), (_, reference) in zip(cut, whole, strict=True):
        sums = reference.views(reference.gradient)
        assert all(close(gradient, sums[name], 1e-11) for name, gradient in mine.views(mine.gradient).items())
        assert not (stage.kept or stage.pasts or stage.deferred)


def test_microbatches_that_are_under_way_together_keep_their_keys_apart(corpus: str) -> None:
    """The second one comes in between, as in the steady state."""
    tokens, targets = torch.randint(MODEL.vocab, (2, 2 * ROWS * LENGTH)).unflatten(1, (2, -1))
    expected, found = (made(corpus, slices, ranks=1)[0] for slices in (1, 2))
    for mb in range(2):
        run_to_completion(expected[0].forward(mb, None, tokens[mb], targets[mb]))
        run_to_completion(expected[0].backward_input(mb, None))
        expected[0].backward_weight(mb)
    pieces = [pair for mb in range(2) for pair in zip(sliced(tokens[mb], 2), sliced(targets[mb], 2), strict=True)]
    for op, piece in (("F", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 0), ("F", 3), ("B", 3), ("B", 2)):
        if op == "F":
            run_to_completion(found[0].forward(piece, None, *pieces[piece]))
        else:
            run_to_completion(found[0].backward_input(piece, None))
            found[0].backward_weight(piece)
    assert close(found[1].gradient, expected[1].gradient, 1e-12)
    assert close(found[0].loss_sums, expected[0].loss_sums, 1e-12)


def test_gradients_of_keys_add_up_wider_than_bfloat16(corpus: str) -> None:
    """Every slice adds to those of the first one, which round once, not at each addition."""
    pairs = made(corpus, 4, dtype="bfloat16")
    tokens, targets = torch.randint(MODEL.vocab, (2, ROWS * LENGTH))
    (first, _), (last, _) = pairs
    for k, part in enumerate(sliced(targets, 4)):
        run_to_completion(
            last.forward(k, run_to_completion(first.forward(k, None, sliced(tokens, 4)[k], None)), None, part)
        )
    run_to_completion(last.backward_input(3, None))
    gradients = [past.gradients for past in last.pasts[0]]
    assert all(pair is not None and {each.dtype for each in pair} == {torch.float32} for pair in gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5), ("bfloat16", 3e-2)])
def test_slices_on_a_gpu_give_the_gradients_of_whole_sequences_twice_with_the_same_bits(
    corpus: str, slices: int, dtype: str, tolerance: float
) -> None:
    tokens, targets = torch.randint(MODEL.vocab, (2, ROWS * LENGTH))
    whole = made(corpus, 1)
    step(whole, tokens, targets, 1)
    first, second = (made(corpus, slices, dtype=dtype, device=torch.device("cuda")) for _ in range(2))
    for pairs in (first, second):
        step(pairs, tokens.cuda(), targets.cuda(), slices)
    for (_, found), (_, again), (_, expected) in zip(first, second, whole, strict=True):
        assert torch.equal(found.gradient, again.gradient)
        sums = expected.views(expected.gradient)
        for name, gradient in found.views(found.gradient).items():
            assert close(gradient.double().cpu(), sums[name], tolerance), name


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_the_feed_cuts_what_it_feeds(corpus: str, slices: int) -> None:
    plan = plan_of("seq-1f1b", 1, 2, 3, corpus, slices=slices)
    data = open_corpus(corpus, verify=False)
    whole = BatchLoader(plan_of("1f1b", 1, 2, 3, corpus), 1, data, CPU)(5)
    found = BatchLoader(plan, 1, data, CPU)(5)
    assert sorted(found) == list(range(3 * slices))
    for piece, tokens in found.items():
        mb, k = divmod(piece, slices)
        assert torch.equal(tokens.inputs, sliced(whole[mb].inputs, slices)[k])
        assert torch.equal(tokens.targets, sliced(whole[mb].targets, slices)[k])
        assert tokens.inputs.is_contiguous()
