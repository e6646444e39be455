"""Each rule of the model section is one sentence: the key, its value, and the value expected."""

import pytest

from pentad.orchestrator.config.config import load
from pentad.schedules.ir.errors import PentadError

EXPERTS = {"num_experts": 8, "top_k": 2, "intermediate_size": 32}
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
GROUPS = {**EXPERTS, "num_groups": 4, "topk_groups": 2}
VALID: dict[str, dict[str, object]] = {
    "mixtral": {"experts": EXPERTS},
    "deepseek-v3": {"experts": GROUPS, "mla": MLA, "mtp_layers": 1},
    "mistral": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "llama": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
}


def model(family: str, **changes: object) -> dict[str, object]:
    return {"model": {"family": family, **VALID[family], **changes}}


@pytest.mark.parametrize("family", VALID)
def test_the_unchanged_sections_are_accepted(family: str) -> None:
    assert load(None, sections=model(family)).model.family == family


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        (
            *("deepseek-v3", {"experts": {**GROUPS, "num_experts": 9}}),
            "model.experts.num_experts is 9: expected a multiple of model.experts.num_groups = 4",
        ),
        (
            *("deepseek-v3", {"experts": {**GROUPS, "topk_groups": 5}}),
            "model.experts.topk_groups is 5: expected at most model.experts.num_groups = 4",
        ),
        (
            *("deepseek-v3", {"experts": {**GROUPS, "top_k": 5}}),
            "model.experts.top_k is 5: expected at most 4, the experts of 2 of 4 groups",
        ),
        (
            *("deepseek-v3", {"mla": {**MLA, "qk_rope_head_dim": 3}}),
            "model.mla.qk_rope_head_dim is 3: expected an even width (rotary pairs)",
        ),
        (
            *("deepseek-v3", {"experts": {**GROUPS, "first_k_dense": 8}}),
            "model.experts.first_k_dense is 8: expected less than model.layers = 8",
        ),
        (
            *("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "high_freq_factor": 1.0}}),
            "model.rope_scaling.high_freq_factor is 1.0: expected more than low_freq_factor = 1",
        ),
        (
            *("mixtral", {"attn_logit_softcapping": 30.0}),
            "model.attn_logit_softcapping is 30.0: expected 0 for model.family = mixtral",
        ),
        (
            *("mixtral", {"layer_types": ["full_attention"]}),
            "model.layer_types is ['full_attention']: expected null for model.family = mixtral",
        ),
        (
            *("mistral", {"sliding_window": 0}),
            "model.sliding_window is 0: expected at least 1 with sliding_attention in model.layer_types",
        ),
        ("mixtral", {"mtp_layers": 1}, "model.mtp_layers is 1: expected 0 for model.family = mixtral"),
        ("mixtral", {"head_dim": 33}, "model.head_dim is 33: expected an even head size (rotary pairs)"),
        ("mixtral", {"experts": None}, "model.experts is null: expected a mapping for model.family = mixtral"),
    ],
)
def test_a_broken_rule_is_one_sentence(family: str, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PentadError) as caught:
        load(None, sections=model(family, **changes))
    assert str(caught.value) == sentence
