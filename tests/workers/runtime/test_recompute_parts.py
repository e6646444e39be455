"""Recomputed parts of layers change no bit: by themselves and together, with every schedule and on every axis."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from bits import same_bits
from plans import MODEL, plan_of
from small_models import FAMILIES, HEADS

from pentad.schedules.passes.recompute import ROW_WISE, parts_of
from pentad.schedules.spec.lora import SEPARATE, LoraSpec
from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = pytest.mark.timeout(60)
slow = pytest.mark.slow
DENSE, EXPERTS, ZERO_3 = {"model": HEADS}, {"model": FAMILIES["deepseek-v3"]}, {"memory_options": MemoryOptions(zero=3)}
LATENTS = LoraSpec(3, 6.0, ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpipe": ("gpipe", {**DENSE, "pp": 2}),
    "looped-bfs": ("looped-bfs", {**DENSE, "pp": 2}),
    "interleaved": ("interleaved", {**DENSE, "pp": 2}),
    "zb-h2": ("zb-h2", {**EXPERTS, "pp": 2}),
    "zb-v": ("zb-v", {**EXPERTS, "pp": 2}),
    "dualpipe": ("dualpipe", {**DENSE, "pp": 2}),
    "dualpipev": ("dualpipev", {**EXPERTS, "pp": 2}),
    "slices": ("seq-1f1b", {"model": FAMILIES["qwen3"], "pp": 2, "slices": 2}),
    "float32": ("1f1b", {"model": MODEL, "dtype": "float32"}),
    "dense tp2": ("1f1b", {**DENSE, "tp": 2}),
    "experts tp2": ("zb-h2", {**EXPERTS, "tp": 2, "pp": 2}),
    "experts ep2": ("1f1b", {**EXPERTS, "ep": 2}),
    "ring": ("1f1b", {**DENSE, "cp": 2}),
    "all_gather": ("1f1b", {**EXPERTS, "cp": 2, "cp_method": "all_gather"}),
    "ulysses": ("1f1b", {**DENSE, "cp": 2, "cp_method": "ulysses"}),
    "ulysses, documents": ("1f1b", {**EXPERTS, "cp": 2, "cp_method": "ulysses"}),
    "units": ("zb-h2", {**EXPERTS, "pp": 2, "unit_layers": 1}),
    "zero": ("1f1b", {**DENSE, **ZERO_3, "dp": 2, "unit_layers": 1}),
    "offload": ("1f1b", {**DENSE, "pp": 2, "offload": 0.4}),
    "adapters": ("1f1b", {**DENSE, "tp": 2, "lora": LoraSpec(3, 6.0, SEPARATE)}),
    "latents' adapters": ("1f1b", {"model": FAMILIES["deepseek-v2-lite"], "pp": 2, "lora": LATENTS}),
    "norms after": ("1f1b", {"model": FAMILIES["olmo2"], "tp": 2}),
    "norms around": ("1f1b", {"model": FAMILIES["gemma2"], "pp": 2}),
    "sinks": ("1f1b", {"model": FAMILIES["gpt-oss"], "ep": 2}),
}
# (case, recomputed share of the rows), for all row-wise parts that the model has.
ROWS = [("zb-v", 0.5)]
# Under tp, attn_proj is a batched product over tiles, which here has other bits than the single product of some rows.
ROWS_SLOW = [("dense tp2", 0.5), *((case, 0.4) for case in CASES if case != "experts tp2")]
ALWAYS = [("zb-v", 5), ("dense tp2", 4), ("ulysses", 1)]  # with this many parts at once
PAIRS = [(case, 2) for case in ("dense tp2", "experts tp2")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "count"),
    [
        *ALWAYS,
        *(pytest.param(case, 1, marks=slow) for case in CASES if (case, 1) not in ALWAYS),
        *(
            pytest.param(case, len(parts_of(given["model"])), marks=slow)
            for case, (_, given) in CASES.items()
            if case not in ("dense tp2", "zb-v")
        ),
        *(pytest.param(*each, marks=slow) for each in PAIRS),
    ],
)
def test_recomputed_parts_change_no_bit(fleet, corpus, case, count) -> None:
    """Every combination of this many parts."""
    name, given = CASES[case]
    given = {"dp": 1, "pp": 1, "microbatches": 4, "data": corpus, "document_mask": "documents" in case, **given}
    plain = fleet.run(plan_of(name, **given), [(0, 2)])
    for parts in combinations(parts_of(given["model"]), count):
        found = fleet.run(plan_of(name, **given, recompute=",".join(parts)), [(0, 2)])
        for one, other in zip(plain, found, strict=True):
            assert [each.losses for each in one.results] == [each.losses for each in other.results], parts
            assert same_bits(one.state, other.state), parts
            assert all(same_bits(*pair) for pair in zip(one.gradients, other.gradients, strict=True)), parts


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fraction"), [*ROWS, *(pytest.param(*each, marks=slow) for each in ROWS_SLOW)])
def test_recomputed_rows_change_no_bit(fleet, corpus, case, fraction) -> None:
    """The first rows are saved, for every combination of row-wise parts, and for all parts."""
    name, given = CASES[case]
    given = {"dp": 1, "pp": 1, "microbatches": 4, "data": corpus, "document_mask": "documents" in case, **given}
    plain = fleet.run(plan_of(name, **given), [(0, 2)])
    row_wise = [part for part in parts_of(given["model"]) if part in ROW_WISE]
    sets = [each for count in range(len(row_wise)) for each in combinations(row_wise, count + 1)]
    for parts in (*sets, parts_of(given["model"])):
        found = fleet.run(plan_of(name, **given, recompute=",".join(parts), recompute_fraction=fraction), [(0, 2)])
        for one, other in zip(plain, found, strict=True):
            assert [each.losses for each in one.results] == [each.losses for each in other.results], parts
            assert same_bits(one.state, other.state), parts
            assert all(same_bits(*pair) for pair in zip(one.gradients, other.gradients, strict=True)), parts
