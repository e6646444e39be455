"""Plans that evaluate, and the same evaluations in a single process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference_families
import torch
from fleet import Call, Fleet, Outcome
from plans import STEPS, reference
from reference_model import State, zero_biases

from pentad.schedules.compiler import compile_forward_only
from pentad.schedules.ir.instruction import instructions_of
from pentad.schedules.spec.eval_spec import EvalData, EvalSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.tensors import tensors
from pentad.workers.data.corpus import open_corpus
from pentad.workers.data.holdout import first_held_out
from pentad.workers.params.param_init import initial_values
from pentad.workers.runtime.results import EvalResult

HOLDOUT = 0.1
EVALUATED: list[Call] = [(0,), (0, 2), (2,), (2, STEPS - 2), (STEPS,)]  # the calls of a run


def with_eval(plan: Plan, sequences: int, *, max_gathered: int | None = None) -> Plan:
    """The plan, evaluating this many sequences of the held-out documents and of the entire corpus."""
    options = MemoryOptions(zero=plan.zero, max_gathered=max_gathered)
    program = compile_forward_only(plan.program, gated=plan.transport_along("pp") == "nccl", memory_options=options)
    path = plan.data.sources[0].path
    data_sets = EvalData("holdout", path, HOLDOUT), EvalData("all", path)
    return replace(plan, eval=EvalSpec(program, data_sets, sequences))


def assert_evaluates_like_one_process(fleet: Fleet, plan: Plan) -> list[Outcome]:
    """Evaluates before the first step and after the last, in float64, and compares to 1e-10."""
    outcomes = fleet.run(plan, EVALUATED)
    weights = {each.name: initial_values(each, plan.seed).double() for each in tensors(plan.model) if not each.tied_to}
    first, _, last = losses_of(outcomes[0])
    assert all(losses_of(outcome) == losses_of(outcomes[0]) for outcome in outcomes)
    for rank, outcome in enumerate(outcomes):
        assert_last_round_is_timed(plan, rank, outcome)
    for evaluation, state in ((first, weights | zero_biases(plan)), (last, reference(plan)[3])):
        for found, (expected, targets) in zip(evaluation, expected_losses(plan, state), strict=True):
            assert found.loss_sum == pytest.approx(expected, rel=1e-10)
            assert found.tokens == targets <= found.sequences * plan.batch.sequence_length
    return outcomes


def losses_of(outcome: Outcome) -> list[tuple[EvalResult, ...]]:
    """The losses of each evaluation."""
    return [each.data_sets for each in outcome.evaluations]


def assert_last_round_is_timed(plan: Plan, rank: int, outcome: Outcome) -> None:
    """Asserts that every instruction of the rank's forward-only stream has one span, after those of the step before."""
    assert plan.eval is not None
    stream = plan.eval.program.streams[plan.mesh.coordinates(rank).pp]
    for call, evaluation in zip([call for call in EVALUATED if len(call) == 1], outcome.evaluations, strict=True):
        spans = evaluation.spans
        assert sorted(span.name for span in spans) == sorted(str(part.key) for part in instructions_of(stream))
        assert {(span.step, span.rank) for span in spans} == {(call[0], rank)}
        assert all(span.start <= span.end for span in spans)
        before = [span.end for result in outcome.results if result.step < call[0] for span in result.spans]
        assert min(span.start for span in spans if span.lane == "compute") >= max(before, default=0.0)


def expected_losses(plan: Plan, state: State) -> list[tuple[float, int]]:
    """Sums of token losses, and target tokens, by data set, sequence by sequence."""
    assert plan.eval is not None
    found = []
    for data_set in plan.eval.data_sets:
        corpus, length = open_corpus(data_set.data, False), plan.batch.sequence_length
        begin = first_held_out(corpus, data_set.holdout) if data_set.holdout else 0
        total, targets = 0.0, 0
        for number in range(plan.eval.sequences or 0):
            start = begin + number * length
            tokens = torch.from_numpy(corpus.read(start, length + 1))[None]
            documents, is_target = torch.zeros(1, length, dtype=torch.int64), torch.ones(1, length, dtype=torch.bool)
            if plan.data.document_mask:
                documents[0, corpus.boundaries(start, length)] = 1
                is_target[0, corpus.boundaries(start + 1, length)] = False
            is_target &= torch.from_numpy(corpus.loss_mask(start + 1, length))
            arguments = state, tokens[:, :-1], tokens[:, 1:], is_target, documents.cumsum(1)
            total += reference_families.losses(plan.model, *arguments, count=1).main.item()
            targets += int(is_target.sum())
        found.append((total, targets))
    return found
