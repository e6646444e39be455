"""Scaled rotary tables are those of transformers, and both row orders give the same attention scores."""

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

from pentad.kernels.attention.rope import rope_
from pentad.kernels.attention.rope_tables import inverse_frequencies, rope_tables
from pentad.schedules.spec.model import ModelSpec, RopeScaling
from pentad.workers.hf.config_keys import Keys
from pentad.workers.hf.config_rope import parse_rope, rope_config
from pentad.workers.hf.layout import to_half_split, to_interleaved
from pentad.workers.hf.names import Rotary

THETA = {"rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1}
DEEP = {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(("theta", "width", "original"), [(1e4, 64, 4096), (5e5, 128, 8192), (1e6, 12, 32)])
@pytest.mark.parametrize("rope", [LLAMA3, YARN, DEEP, {**YARN, "attention_factor": 1.5}], ids=str)
def test_scaled_tables_are_those_of_transformers(rope: dict[str, Any], theta: float, width: int, original: int) -> None:
    keys = {"rope_parameters": {**rope, "rope_theta": theta, "original_max_position_embeddings": original}}
    config = LlamaConfig(head_dim=width, max_position_embeddings=original, **keys)
    expected, attention = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    base, scaling = parse_rope(Keys(keys, defaults=THETA), scales_softmax=True)
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
        rope_type=st.sampled_from(["llama3", "yarn"]),
        factor=st.floats(1, 64),
        original_max_position_embeddings=st.integers(8, 10_000),
        low_freq_factor=st.floats(0.5, 2),
        high_freq_factor=st.floats(3, 64),
        attention_factor=st.floats(0.5, 2),
    ),
)


@given(theta=st.floats(10, 1e7), width=st.integers(1, 64), scaling=scalings)
def test_tables_are_those_of_the_reference(theta: float, width: int, scaling: RopeScaling | None) -> None:
    model = ModelSpec(1, 2 * width, 1, 1, 1, 2, rope_theta=theta, rope_scaling=scaling)
    found = rope_tables(50, 2 * width, theta, "cpu", torch.float64, scaling)
    for table, expected in zip(found, reference.rope_table(model, 50), strict=True):
        assert torch.allclose(table, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tables_without_scaling_are_the_plain_formula(dtype: torch.dtype) -> None:
    found = rope_tables(64, 32, 1e4, "cpu", dtype)
    pair = torch.arange(16, dtype=torch.float64)
    angle = torch.outer(torch.arange(64, dtype=torch.float64), 1e4 ** (-2.0 * pair / 32))
    for table, exact in zip(found, (angle.cos(), angle.sin()), strict=True):
        assert table.dtype == dtype
        assert torch.equal(table, exact.to(dtype))


@given(heads=st.integers(1, 5), plain=st.integers(0, 5), pairs=st.integers(1, 6))
def test_the_two_row_orders_are_inverse_to_each_other(heads: int, plain: int, pairs: int) -> None:
    matrix = torch.randn(heads * (plain + 2 * pairs), 3)
    rotary = Rotary(heads, 2 * pairs)
    assert torch.equal(to_interleaved(to_half_split(matrix, rotary), rotary), matrix)
    assert torch.equal(to_half_split(to_interleaved(matrix, rotary), rotary), matrix)
    assert torch.equal(to_half_split(matrix, None), matrix)
    reordered = to_half_split(matrix, rotary).view(heads, -1, 3)
    assert torch.equal(reordered[:, :plain], matrix.view(heads, -1, 3)[:, :plain])


@given(heads=st.integers(1, 4), plain=st.integers(1, 5), pairs=st.integers(1, 6))
def test_attention_scores_are_the_same_in_both_row_orders(heads: int, plain: int, pairs: int) -> None:
    """Interleaved rows with DeepSeek-V3's rotation against half-split rows with pentad's own kernel."""
    width, length = 2 * pairs, 7
    x = torch.randn(length, 9, dtype=torch.float64)
    query = torch.randn(heads * (plain + width), 9, dtype=torch.float64)
    key = torch.randn(plain + width, 9, dtype=torch.float64)
    cos, sin = rope_tables(length, width, 100.0, "cpu", torch.float64)
    q, k = (x @ query.T).view(length, heads, -1).transpose(0, 1), (x @ key.T)[None]
    both = (torch.cat([table, table], -1)[None] for table in (cos, sin))
    rotated = apply_rotary_pos_emb_interleave(q[None, ..., plain:], k[None, ..., plain:], *both)
    expected = torch.cat([q[None, ..., :plain], rotated[0]], -1) @ torch.cat([k[None, ..., :plain], rotated[1]], -1).mT

    queries = (x @ to_half_split(query, Rotary(heads, width)).T).view(length, heads, -1)
    keys = (x @ to_half_split(key, Rotary(1, width)).T).view(length, 1, -1)
    for each in (queries, keys):
        rope_(each[..., plain:], cos, sin)
    found = queries.transpose(0, 1) @ keys.transpose(0, 1).mT
    assert torch.allclose(found, expected[0], rtol=0, atol=1e-12)


def test_a_scaling_returns_from_its_config() -> None:
    for rope in (LLAMA3, YARN, DEEP, {**DEEP, "mscale": 1.0}):
        keys = {"rope_scaling": {**rope, "original_max_position_embeddings": 4096}}
        theta, scaling = parse_rope(Keys(keys, defaults=THETA), scales_softmax=True)
        again = parse_rope(Keys(rope_config(theta, scaling), defaults={"rope_theta": 5.0}), scales_softmax=True)
        assert scaling is not None and again[1] is not None
        assert again == (theta, replace(scaling, softmax_factor=again[1].softmax_factor))
        assert again[1].softmax_factor == pytest.approx(scaling.softmax_factor, rel=1e-12)
