"""Laws of rotary embeddings: scaled tables are those of transformers; another order of rows gives the same scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import reference_families as reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

from pentad.kernels.attention.rope import rope_reference_
from pentad.kernels.attention.rope_tables import inverse_frequencies, rope_tables
from pentad.schedules.spec.model import ModelShape, RopeScaling
from pentad.workers.hf.config_rope import rope_keys, rope_of
from pentad.workers.hf.hf_keys import Keys
from pentad.workers.hf.layout import to_halves, to_pairs
from pentad.workers.hf.names import Rotary

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1}
DEEP = {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(("theta", "width", "original"), [(1e4, 64, 4096), (5e5, 128, 8192), (1e6, 12, 32)])
@pytest.mark.parametrize("said", [LLAMA3, YARN, DEEP, {**YARN, "attention_factor": 1.5}], ids=str)
def test_scaled_tables_are_those_of_transformers(said: dict[str, Any], theta: float, width: int, original: int) -> None:
    keys = {"rope_parameters": {**said, "rope_theta": theta, "original_max_position_embeddings": original}}
    config = LlamaConfig(head_dim=width, max_position_embeddings=original, **keys)
    expected, attention = ROPE_INIT_FUNCTIONS[said["rope_type"]](config, "cpu")
    base, scaling = rope_of(Keys(keys), 1e4, softmax=True)
    assert base == theta and scaling is not None
    found = inverse_frequencies(width, theta, scaling, "cpu")
    assert torch.allclose(found, expected.double(), rtol=2e-6, atol=0)
    assert scaling.attention_factor == pytest.approx(attention, rel=1e-12)
    cos, sin = rope_tables(100, width, theta, "cpu", torch.float64, scaling)
    angle = torch.arange(100, dtype=torch.float64)[:, None] * found
    assert torch.equal(cos, scaling.attention_factor * angle.cos()) and torch.equal(
        sin, scaling.attention_factor * angle.sin()
    )


scalings = st.one_of(
    st.none(),
    st.builds(
        RopeScaling,
        kind=st.sampled_from(["llama3", "yarn"]),
        factor=st.floats(1, 64),
        original=st.integers(8, 10_000),
        low=st.floats(0.5, 2),
        high=st.floats(3, 64),
        attention=st.floats(0.5, 2),
    ),
)


@given(theta=st.floats(10, 1e7), width=st.integers(1, 64), scaling=scalings)
def test_two_ways_to_write_a_table_agree(theta: float, width: int, scaling: RopeScaling | None) -> None:
    shape = ModelShape(1, 2 * width, 1, 1, 1, 2, rope_theta=theta, rope_scaling=scaling)
    found = rope_tables(50, 2 * width, theta, "cpu", torch.float64, scaling)
    for mine, theirs in zip(found, reference.rope_table(shape, 50), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_a_scaling_the_table_is_the_plain_one(dtype: torch.dtype) -> None:
    found = rope_tables(64, 32, 1e4, "cpu", dtype)
    pair = torch.arange(16, dtype=torch.float64)
    angle = torch.outer(torch.arange(64, dtype=torch.float64), 1e4 ** (-2.0 * pair / 32))
    for mine, exact in zip(found, (angle.cos(), angle.sin()), strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine, exact.to(dtype))


@given(heads=st.integers(1, 5), plain=st.integers(0, 5), pairs=st.integers(1, 6))
def test_pairs_and_halves_are_each_others_inverse(heads: int, plain: int, pairs: int) -> None:
    matrix = torch.randn(heads * (plain + 2 * pairs), 3)
    rotary = Rotary(heads, 2 * pairs)
    assert torch.equal(to_pairs(to_halves(matrix, rotary), rotary), matrix)
    assert torch.equal(to_halves(to_pairs(matrix, rotary), rotary), matrix)
    assert torch.equal(to_halves(matrix, None), matrix)
    turned = to_halves(matrix, rotary).view(heads, -1, 3)
    assert torch.equal(turned[:, :plain], matrix.view(heads, -1, 3)[:, :plain])


@given(heads=st.integers(1, 4), plain=st.integers(1, 5), pairs=st.integers(1, 6))
def test_scores_are_the_same_in_either_order(heads: int, plain: int, pairs: int) -> None:
    """Interleaved rows with DeepSeek-V3's rotation against half-split rows with pentad's own kernel."""
    width, length = 2 * pairs, 7
    x = torch.randn(length, 9, dtype=torch.float64)
    query = torch.randn(heads * (plain + width), 9, dtype=torch.float64)
    key = torch.randn(plain + width, 9, dtype=torch.float64)
    cos, sin = rope_tables(length, width, 100.0, "cpu", torch.float64)
    q, k = (x @ query.T).view(length, heads, -1).transpose(0, 1), (x @ key.T)[None]
    both = (torch.cat([table, table], -1)[None] for table in (cos, sin))
    turned = apply_rotary_pos_emb_interleave(q[None, ..., plain:], k[None, ..., plain:], *both)
    expected = torch.cat([q[None, ..., :plain], turned[0]], -1) @ torch.cat([k[None, ..., :plain], turned[1]], -1).mT

    mine = (x @ to_halves(query, Rotary(heads, width)).T).view(length, heads, -1)
    its = (x @ to_halves(key, Rotary(1, width)).T).view(length, 1, -1)
    for each in (mine, its):
        rope_reference_(each[..., plain:], cos, sin)
    found = mine.transpose(0, 1) @ its.transpose(0, 1).mT
    assert torch.allclose(found, expected[0], rtol=0, atol=1e-12)


def test_a_scaling_returns_from_its_keys() -> None:
    for said in (LLAMA3, YARN, DEEP, {**DEEP, "mscale": 1.0}):
        keys = {"rope_scaling": {**said, "original_max_position_embeddings": 4096}}
        theta, scaling = rope_of(Keys(keys), 1e4, softmax=True)
        again = rope_of(Keys(rope_keys(theta, scaling)), 5.0, softmax=True)
        assert scaling is not None and again[1] is not None
        assert again == (theta, replace(scaling, softmax_factor=again[1].softmax_factor))
        assert again[1].softmax_factor == pytest.approx(scaling.softmax_factor, rel=1e-12)
