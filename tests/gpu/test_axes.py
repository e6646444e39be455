"""Laws 1 and 4 on GPUs for tensor, context and expert parallelism: one process's numbers, and the same bits twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bits import same_bits
from exactness import assert_equals_one_process
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import SHALLOW, plan_on_mesh
from small_models import FAMILIES, GEMMA, HEADS, MOE, WIDE, WIDE_MOE

from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.parallel.tensor_parallel import SPLIT_ROWS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU), two_gpus]
Case = tuple[str, dict[str, int], dict[str, Any]]
CASES: list[Case] = [
    ("1f1b", {"tp": 2}, {}),
    ("1f1b", {"tp": 4}, {}),
    ("zb-h2", {"tp": 2, "pp": 2}, {}),
    ("1f1b", {"cp": 4}, {"model": HEADS}),
    ("1f1b", {"cp": 2}, {"model": HEADS, "cp_method": "all_gather"}),
    ("gpipe", {"cp": 2, "tp": 2}, {"model": HEADS, "cp_method": "ulysses"}),
    ("1f1b", {"cp": 2}, {"model": HEADS, "document_mask": True}),
    ("1f1b", {"ep": 2}, {"model": MOE}),
    ("1f1b", {"ep": 4}, {"model": MOE}),
    ("dualpipe", {"ep": 2, "pp": 2}, {"model": MOE}),
    ("1f1b", {"ep": 2, "dp": 2}, {"model": MOE, "memory_options": MemoryOptions(zero=3)}),
    ("zb-h2", {"tp": 2, "pp": 2}, {"model": FAMILIES["deepseek-v3"]}),
    ("zb-v", {"tp": 2, "pp": 2}, {"model": replace(FAMILIES["deepseek-v3"], mtp_layers=1, tie_word_embeddings=True)}),
    *(("zb-h2", {"tp": 2, "pp": 2}, {"model": FAMILIES[name]}) for name in ("olmo2", "gemma2", "gemma3", "gpt-oss")),
    *(("1f1b", {"cp": 2}, {"model": FAMILIES[name], "document_mask": True}) for name in ("mistral", "gpt-oss")),
    ("1f1b", {"ep": 2, "tp": 2}, {"model": FAMILIES["gpt-oss"]}),
    ("1f1b", {"tp": 2, "dp": 2}, {"model": FAMILIES["qwen3"], "memory_options": MemoryOptions(zero=1)}),
]
WINDOW: dict[str, Any] = {"sliding_window": 3, "layer_types": ("sliding_attention", "full_attention")}
REPEATED: list[Case] = [
    ("zb-h2", {"tp": 2, "pp": 2}, {"model": WIDE}),
    ("1f1b", {"cp": 2}, {"model": WIDE}),
    ("1f1b", {"cp": 2}, {"model": WIDE, "cp_method": "ulysses"}),
    ("1f1b", {"cp": 2}, {"model": replace(WIDE, **WINDOW), "document_mask": True}),
    ("1f1b", {"cp": 2}, {"model": replace(WIDE, **WINDOW, attention_sinks=True)}),
    ("zb-h2", {"tp": 2, "pp": 2}, {"model": replace(WIDE, **GEMMA, qk_norm="all_heads", qkv_bias=True)}),
    ("1f1b", {"ep": 2}, {"model": replace(WIDE_MOE, expert_biases=True, hidden_act="clamped_silu")}),
    ("1f1b", {"ep": 2}, {"model": WIDE_MOE}),
    ("dualpipe", {"ep": 2, "pp": 2}, {"model": WIDE_MOE}),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "sizes", "more"), CASES)
def test_shared_layers_equal_one_process(gpus, corpus, name, sizes, more):
    options = more.get("memory_options", MemoryOptions())
    plan = on_gpu(plan_on_mesh(corpus, name, sizes, **more), dtype="float64", memory_options=options)
    assert_equals_one_process(gpus, plan)


@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("slots", ["few", "all"])
@pytest.mark.parametrize(("name", "sizes"), [("1f1b", {"ep": 2}), ("dualpipe", {"ep": 2, "pp": 2})])
def test_tokens_in_slots_equal_one_process(gpus, corpus, name, sizes, slots, transport):
    """With too few slots, steps are run again."""
    plan = on_gpu(plan_on_mesh(corpus, name, sizes, model=MOE), transport, dtype="float64")
    assert_equals_one_process(gpus, replace(plan, expert_slots=1 if slots == "few" else plan.slice_tokens))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize(
    ("name", "tp", "more"),
    [
        ("1f1b", 2, {}),
        ("1f1b", 4, {}),
        ("dualpipev", 2, {}),
        ("1f1b", 2, {"logit_rows": 2 * SPLIT_ROWS}),
        ("1f1b", 2, {"model": replace(FAMILIES["deepseek-v3"], layers=2)}),
    ],
)
def test_products_that_overlap_with_their_messages_equal_one_process(gpus, corpus, name, tp, more, transport):
    plan = plan_on_mesh(corpus, name, {"tp": tp}, **{"model": SHALLOW, **more})
    # a sequence of this length for each rank
    long = replace(plan.batch, global_batch_size=tp * plan.batch.microbatches, sequence_length=SPLIT_ROWS)
    assert_equals_one_process(gpus, on_gpu(replace(plan, batch=long), transport, dtype="float64"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "sizes", "more"), REPEATED)
def test_repeated_runs_have_the_same_bits_and_float64_s_losses(gpus, corpus, name, sizes, more, dtype):
    plan = on_gpu(plan_on_mesh(corpus, name, sizes, **more), dtype=dtype)
    one, two = (gpus.run(plan, [(0, 3)]) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        assert same_bits(first.state, second.state)
    wide = gpus.run(replace(plan, dtype="float64"), [(0, 3)])
    for outcome, expected in zip(one, wide, strict=True):
        for found, exact in zip(outcome.results, expected.results, strict=True):
            for microbatch, loss in exact.losses.items():
                assert found.losses[microbatch] == pytest.approx(loss, rel=2e-2 if dtype == "bfloat16" else 1e-4)
