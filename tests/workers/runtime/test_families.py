"""Laws 1 and 4 for the parts of layers that only some families have, on meshes of every axis.

All are slow; test_axes.py has a selection that always runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from exactness import assert_equals_one_process
from plans import plan_on_mesh
from resume import assert_repeatable
from small_models import FAMILIES

from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
ZERO_3 = MemoryOptions(zero=3)
NAMES = ("qwen2", "mistral", "olmo2", "gemma2", "gemma3", "gpt-oss")
MESHES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "zb-h2 pp2": ("zb-h2", {"pp": 2}, {"recompute": "selective"}),
    "dualpipev pp2 tp2": ("dualpipev", {"pp": 2, "tp": 2}, {}),
    "tp4": ("1f1b", {"tp": 4}, {}),
    "cp2 tp2 ring": ("1f1b", {"cp": 2, "tp": 2}, {}),
    "cp4 ring, masked": ("gpipe", {"cp": 4}, {"document_mask": True}),
    "cp2 pp2 all_gather, masked": ("zb-h2", {"cp": 2, "pp": 2}, {"cp_method": "all_gather", "document_mask": True}),
    "cp2 ulysses": ("gpipe", {"cp": 2}, {"cp_method": "ulysses", "document_mask": True}),
    "dp2 tp2, ZeRO-3": ("1f1b", {"dp": 2, "tp": 2}, {"memory_options": ZERO_3, "recompute": "full"}),
    "ep2 pp2": ("zb-h2", {"ep": 2, "pp": 2}, {}),
    "ep2 tp2": ("1f1b", {"ep": 2, "tp": 2}, {"recompute": "selective"}),
    "ep4, ZeRO-3": ("1f1b", {"ep": 4}, {"memory_options": ZERO_3}),
    "seq-1f1b pp2": ("seq-1f1b", {"pp": 2}, {"slices": 4}),
}


REPEATED = [
    ("qwen2", "1f1b", {"tp": 2, "dp": 2}, {"memory_options": ZERO_3}),
    ("mistral", "dualpipev", {"pp": 2, "cp": 2}, {"document_mask": True}),
    ("olmo2", "zb-h2", {"pp": 2, "tp": 2}, {"recompute": "selective"}),
    ("gemma2", "zb-h2", {"pp": 2, "tp": 2}, {}),
    ("gemma3", "1f1b", {"cp": 2, "dp": 2}, {"cp_method": "all_gather", "memory_options": ZERO_3}),
    ("gpt-oss", "zb-h2", {"pp": 2, "ep": 2}, {}),
    ("gpt-oss", "gpipe", {"cp": 4}, {"cp_method": "ulysses"}),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "name", "sizes", "more"), REPEATED)
def test_repeated_and_resumed_runs_are_bit_identical(fleet, corpus, tmp_path, family, name, sizes, more, dtype):
    model = replace(FAMILIES[family], kv_heads=4)
    plan = replace(plan_on_mesh(corpus, name, sizes, model=model, **more), dtype=dtype)
    assert_repeatable(fleet, plan, tmp_path)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", NAMES)
def test_a_family_equals_one_process(fleet, corpus, family, mesh):
    name, sizes, more = MESHES[mesh]
    if "ep" in sizes and FAMILIES[family].experts is None:
        pytest.skip("a dense model has no experts")
    assert_equals_one_process(fleet, plan_on_mesh(corpus, name, sizes, model=FAMILIES[family], **more))
