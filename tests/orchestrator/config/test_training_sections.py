"""What the optimizer section refuses, each in one sentence, and what its nulls resolve to."""

from __future__ import annotations

from pathlib import Path

import pytest
from custom_models import custom_model

from pentad.orchestrator.config.config import Layout, dump, load
from pentad.orchestrator.planning.numerics import optimizer_spec
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.optimizer import ParamGroup

NEAR_QKV = "layers.7.attention.qkv, layers.6.attention.qkv, layers.5.attention.qkv"
REFUSED = [
    ("name=sgd", "optimizer.name is 'sgd': expected one of adamw or muon"),
    ("momentum=0.9", "optimizer.momentum is 0.9: expected 0.95 for optimizer.name adamw: it belongs to muon"),
    ("nesterov=false", "optimizer.nesterov is false: expected true for optimizer.name adamw: it belongs to muon"),
    ("clip_norm=0", "optimizer.clip_norm is 0: expected more than 0"),
    ("stable_steps=3", "optimizer.stable_steps is 3: expected null for optimizer.schedule cosine: it belongs to wsd"),
    (
        "cycles=3",
        "optimizer.cycles is 3: expected null for optimizer.schedule cosine: it belongs to cosine_with_restarts",
    ),
    (
        "schedule=cosine_with_restarts",
        "optimizer.cycles is null: expected the number of cosines of optimizer.schedule cosine_with_restarts",
    ),
    (
        "schedule=wsd stable_steps=55",
        "optimizer.stable_steps is 55: expected at most run.steps - optimizer.warmup_steps = 54",
    ),
    ("decay_steps=20 warmup_steps=30", "optimizer.warmup_steps is 30: expected at most optimizer.decay_steps = 20"),
    (
        "groups=[{pattern:layers.*.attn.qkv}]",
        "optimizer.groups[0].pattern is 'layers.*.attn.qkv': expected a pattern that matches a tensor of the model, "
        f"such as {NEAR_QKV}",
    ),
    ("groups=[{patern:x}]", "optimizer.groups[0].patern is unknown; did you mean optimizer.groups[0].pattern?"),
    ("groups=[{weight_decay:1}]", "optimizer.groups[0].pattern is missing: expected a value: names of tensors"),
    ("groups=[3]", "optimizer.groups[0] is 3: expected a mapping with keys such as optimizer.groups[0].pattern"),
    ("groups.pattern=x", "optimizer.groups.pattern is unknown; did you mean optimizer.groups?"),
]


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED)
def test_a_mistake_in_the_section_is_one_sentence(overrides: str, sentence: str) -> None:
    with pytest.raises(PentadError) as caught:
        load(None, [f"optimizer.{override.replace(':', ': ')}" for override in overrides.split()])
    assert str(caught.value).startswith(sentence)


def test_a_model_of_ones_own_has_neither_z_loss_nor_muon(tmp_path: Path) -> None:
    config = load(None, ["optimizer.name=muon", "optimizer.z_loss=1e-4", "mesh.pp=1", "schedule.name=gpipe"])
    custom = custom_model(tmp_path, "gpt_dropout", layers=2)
    with pytest.raises(PentadError) as caught:
        config.check_layout(Layout(((0,),), 1), custom)
    assert "optimizer.z_loss is 0.0001: expected 0 for model" in str(caught.value)
    assert "optimizer.name is muon: expected adamw for model" in str(caught.value)


@pytest.mark.parametrize(("name", "key"), [("adamw", "beta2"), ("adamw", "beta1"), ("muon", "momentum")])
def test_a_moment_that_bfloat16_would_freeze_is_refused(name: str, key: str) -> None:
    overrides = [f"optimizer.name={name}", "precision.optimizer_state=bfloat16"]
    with pytest.raises(PentadError, match=rf"^optimizer\.{key} is 0\.999: expected at most 0\.996094 with precision"):
        load(None, [*overrides, f"optimizer.{key}=0.999"])
    assert optimizer_spec(load(None, overrides)).bf16_state


def test_groups_survive_the_saved_configuration() -> None:
    config = load(None, ["optimizer.groups=[{pattern: '*norm', weight_decay: 0.1}, {pattern: head}]"])
    assert optimizer_spec(config).groups == (ParamGroup("*norm", 1.0, 0.1), ParamGroup("head"))
    again = load(None, [])
    assert load(again, sections={"optimizer": {"groups": config.model_dump()["optimizer"]["groups"]}}) == config
    assert "pattern: head" in dump(config)


def test_nulls_of_a_schedule_follow_its_length() -> None:
    curve = optimizer_spec(load(None, ["run.steps=500", "optimizer.schedule=wsd"])).learning_rate
    assert (curve.warmup_steps, curve.stable_steps, curve.decay_steps) == (50, 350, 500)
    assert curve.minimum == pytest.approx(curve.peak / 10)
