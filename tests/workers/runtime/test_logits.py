"""Laws 1 and 4 with logits recomputed in chunks: one process's result, and the losses of kept logits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from evaluations import assert_evaluates_like_one_process, with_eval
from exactness import assert_equals_one_process
from fleet import losses_of
from mixtures import random_corpus
from plans import MODEL, data_of, plan_of
from small_models import FAMILIES, HEADS

from pentad.schedules.spec.data import DataSpec
from pentad.schedules.spec.lora import LoraSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = pytest.mark.timeout(150)
slow = pytest.mark.slow
ROWS = 5  # in a chunk; a microbatch has 16 or 8 tokens on a rank
ORDERS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zb-h2": {},
    "zb-v": {},
    "dualpipev": {},
    "looped-bfs": {"chunks": 2},
}
MTP = replace(MODEL, layers=4, mtp_layers=2)
VARIANTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "cp": {"cp": 2, "model": HEADS},
    "zero 3": {"dp": 2, "unit_layers": 1, "memory_options": MemoryOptions(zero=3, max_gathered=3)},
    "mtp": {"tp": 2, "model": MTP},
    "z-loss": {"tp": 2, "z_loss": 0.05},
    "softcap": {"tp": 2, "model": FAMILIES["gemma2"]},
    "tied": {"dp": 2, "model": replace(MODEL, tie_word_embeddings=True)},
    "masked targets": {"cp": 2, "model": HEADS, "masked": True},
    "evaluation": {"evaluates": True},
    "evaluation with tp": {"tp": 2, "evaluates": True},
    "full": {"dp": 2, "recompute": "full", "unit_layers": 2},
}
ALWAYS = {("zb-h2", "z-loss"), ("zb-v", "zero 3"), ("1f1b", "evaluation"), ("1f1b", "full")}


def cases() -> list[Any]:
    found = product(ORDERS, VARIANTS)
    return [pytest.param(*case, marks=[] if case in ALWAYS else [slow]) for case in found]


def chunked_plan(
    name: str,
    data: str | DataSpec,
    dp: int = 1,
    *,
    z_loss: float = 0.0,
    logit_rows: int = ROWS,
    evaluates: bool = False,
    **more: Any,
) -> Plan:
    model = more.get("model", MODEL)
    validated = name == "zb-h2" and not model.tie_word_embeddings and not model.mtp_layers  # these sum before the norm
    given = {"post_validation": validated, **ORDERS[name], **more}
    plan = plan_of(name, dp, 2, 4, data, logit_rows=logit_rows, **given)
    plan = replace(plan, optimizer=replace(plan.optimizer, z_loss=z_loss))
    return with_eval(plan, 21) if evaluates else plan


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "variant"), cases())
def test_chunked_logits_equal_one_process(fleet, corpus, tmp_path, name, variant):
    given = dict(VARIANTS[variant])
    if given.pop("masked", False):
        path = random_corpus(tmp_path / "masked", 5, 160, 30, targets=0.2)
        corpus = data_of(path, document_mask=True, cache=str(tmp_path))
    plan = chunked_plan(name, corpus, **given)
    if plan.eval is not None:
        assert_evaluates_like_one_process(fleet, plan)
    else:
        assert_equals_one_process(fleet, plan, check_bytes=True)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=slow)])
def test_a_frozen_head_is_not_made_again(fleet, corpus, tp):
    lora = LoraSpec(4, 8.0, ("q_proj", "down_proj"))
    assert_equals_one_process(fleet, chunked_plan("zb-h2", corpus, tp=tp, lora=lora))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=slow)])
def test_the_first_losses_have_the_bits_of_kept_logits(fleet, corpus, dtype, tp):
    """The product of some rows has the bits of the full product here, so losses differ only after an update."""
    runs = [fleet.run(chunked_plan("1f1b", corpus, tp=tp, dtype=dtype, logit_rows=rows), [(0, 1)]) for rows in (0, 8)]
    kept, chunked = (losses_of(outcomes, 0) for outcomes in runs)
    assert kept == chunked
