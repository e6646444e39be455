"""config.json: unsupported features are refused in one sentence that names the key, and nothing is guessed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import hf_models
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import MLA, Experts, ModelSpec, RopeScaling
from pentad.workers.hf.config import make_config, make_section, parse_config, parse_section

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# As released, without its quantization.
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 64}


def test_llama_3_1_is_parsed_in_both_spellings() -> None:
    scaling = RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    expected = ModelSpec(32, 4096, 32, 8, 14336, 128256, 500000.0, 1e-5, rope_scaling=scaling)
    old = {**LLAMA, "rope_scaling": LLAMA3}
    new = {**LLAMA, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}
    del new["rope_theta"]
    assert parse_config(old) == parse_config(new) == ("llama", expected)


def test_deepseek_v3_is_parsed_as_released() -> None:
    family, model = parse_config(DEEPSEEK)
    assert (family, model.layers, model.mtp_layers, model.norm_eps) == ("deepseek-v3", 61, 1, 1e-6)
    assert model.mla == MLA(
        kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert model.experts == Experts(256, 8, 2048, 2048, "sigmoid", True, 2.5, 8, 4, 0.0, 0.001, 3)
    assert model.rope_scaling is not None
    assert model.rope_scaling.attention_factor == 1.0
    assert model.rope_scaling.softmax_factor == pytest.approx(1.3688879454113936**2)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (LLAMA, "architectures", ["GPT2LMHeadModel"]),
        (LLAMA, "hidden_act", "gelu"),
        (LLAMA, "attention_bias", True),
        (LLAMA, "mlp_bias", True),
        (LLAMA, "attention_dropout", 0.1),
        (LLAMA, "use_sliding_window", True),
        (LLAMA, "layer_types", ["full_attention", "sliding_attention"]),
        (LLAMA, "layer_types", [["full_attention"]]),
        (LLAMA, "partial_rotary_factor", 0.5),
        (LLAMA, "hidden_size", None),
        (LLAMA, "hidden_size", "4096"),
        (LLAMA, "num_hidden_layers", 0),
        (LLAMA, "num_hidden_layers", 10**9),
        (DEEPSEEK, "n_routed_experts", 10**9),
        (LLAMA, "rms_norm_eps", -1.0),
        (LLAMA, "tie_word_embeddings", "yes"),
        (LLAMA, "rope_scaling", "linear"),
        (LLAMA, "rope_scaling", {"type": "dynamic", "factor": 2.0}),
        (LLAMA, "rope_scaling", {"rope_type": "llama3", "factor": 2.0}),
        (LLAMA, "rope_parameters", {"rope_type": "yarn", "factor": 2.0, "truncate": 0}),
        ({**LLAMA, "architectures": ["MixtralForCausalLM"]}, "sliding_window", 4096),
        ({**LLAMA, "architectures": ["MixtralForCausalLM"]}, "router_jitter_noise", 0.1),
        (QWEN, "mlp_only_layers", [3]),
        (QWEN, "decoder_sparse_step", 2),
        (DEEPSEEK, "scoring_func", "softmax"),
        (DEEPSEEK, "topk_method", "greedy"),
        (DEEPSEEK, "moe_layer_freq", 2),
        (DEEPSEEK, "rms_norm_eps", 1e-5),
        (DEEPSEEK, "num_key_value_heads", 64),
        (DEEPSEEK, "n_routed_experts", None),
    ],
)
def test_an_unsupported_feature_is_refused_by_its_key(config: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(PentadError) as caught:
        parse_config({**config, key: value})
    text = str(caught.value)
    named = {"rope_scaling": "rope_scaling", "rope_parameters": "truncate"}.get(key, key)
    assert named in text and ": expected " in text and "\n" not in text and len(text) < 350


def test_a_config_without_architectures_is_recognized_by_its_model_type() -> None:
    bare = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert parse_config(bare) == parse_config(LLAMA)
    with pytest.raises(PentadError, match="model_type 'gpt2': expected one of llama"):
        parse_config({**bare, "model_type": "gpt2"})
    with pytest.raises(PentadError, match="model_type None"):
        parse_config({})


def test_qwen3_moe_may_start_with_dense_layers_in_both_spellings() -> None:
    _, model = parse_config({**QWEN, "mlp_only_layers": [0, 1]})
    assert model.experts is not None and model.experts.first_k_dense == 2
    _, model = parse_config({**QWEN, "num_hidden_layers": 2, "decoder_sparse_step": 2})
    assert model.experts is not None and model.experts.first_k_dense == 1


def test_the_balance_loss_of_mixtral_8x7b_weighs_a_sixteenth_of_its_coefficient() -> None:
    mixtral = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "router_aux_loss_coef": 0.02}
    family, model = parse_config(mixtral)
    assert model.experts is not None and model.experts.aux_loss_coef == 0.02 / 16
    assert make_config(family, model, positions=64)["router_aux_loss_coef"] == 0.02
    odd = parse_config({**QWEN, "num_hidden_layers": 48, "num_experts_per_tok": 7, "router_aux_loss_coef": 0.001})[1]
    assert make_config("qwen3-moe", odd, positions=64)["router_aux_loss_coef"] == 0.001


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("llama", {"qk_norm": "head"}, "qk_norm"),
        ("llama", {"mtp_layers": 1}, "mtp_layers"),
        ("qwen3", {}, "qk_norm"),
        ("llama", {"experts": Experts(4, 2, 8)}, "experts"),
        ("mixtral", {"experts": Experts(4, 2, 8)}, "ffn"),
        ("mixtral", {"experts": Experts(4, 2, 48, shared_intermediate_size=8)}, "experts.shared_intermediate_size"),
        ("qwen3-moe", {"qk_norm": "head", "experts": Experts(4, 2, 8, scoring_func="sigmoid")}, "experts.scoring_func"),
        ("deepseek-v3", {"norm_eps": 1e-6}, "mla"),
        (
            "llama",
            {"rope_scaling": RopeScaling("yarn", 4.0, 32, 1, 32, softmax_factor=2.0)},
            "rope_scaling.softmax_factor",
        ),
        ("gpt2", {}, "family"),
    ],
)
def test_a_model_that_files_cannot_express_is_refused_by_its_key(
    family: str, changes: dict[str, Any], key: str
) -> None:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64, **changes}
    with pytest.raises(PentadError, match=f"^model.{key} is .*: expected "):
        make_config(family, ModelSpec(**sizes), positions=64)


def test_a_section_with_other_keys_is_refused() -> None:
    section = make_section("llama", parse_config(LLAMA)[1])
    for wrong in (
        {**section, "latent": None},
        {**section, "depth": 3},
        {**section, "mla": {"kv_lora_rank": 3}},
        {"family": "llama"},
    ):
        with pytest.raises(PentadError, match=r"^the model section cannot be used .*: expected one that this version"):
            parse_section(wrong)


sizes = st.integers(1, 10_000)


@given(
    hidden=sizes,
    heads=st.integers(1, 64),
    shared=st.integers(1, 8),
    tied=st.booleans(),
    factor=st.floats(1.5, 100),
    mscale=st.integers(1, 20),
    mscale_all=st.integers(1, 20),
    rank=st.integers(0, 100),
    first=st.integers(0, 3),
)
def test_any_deepseek_model_returns_from_its_config(
    hidden: int, heads: int, shared: int, tied: bool, factor: float, mscale: int, mscale_all: int, rank: int, first: int
) -> None:
    config = {
        **DEEPSEEK,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": shared,
        "tie_word_embeddings": tied,
        "q_lora_rank": rank or None,
        "first_k_dense_replace": first,
        "rope_scaling": {
            **DEEPSEEK["rope_scaling"],
            "factor": factor,
            "mscale": mscale / 10,
            "mscale_all_dim": mscale_all / 10,
        },
    }
    family, model = parse_config(config)
    assert (model.mla is not None and model.mla.q_lora_rank) == rank
    _, again = parse_config(make_config(family, model, positions=100))
    assert model.rope_scaling is not None and again.rope_scaling is not None
    assert again.rope_scaling.attention_factor == pytest.approx(model.rope_scaling.attention_factor, rel=1e-11)
    assert again.rope_scaling.softmax_factor == pytest.approx(model.rope_scaling.softmax_factor, rel=1e-11)
    replaced = make_section(family, again) | {"rope_scaling": asdict(model.rope_scaling)}
    assert replaced == make_section(family, model)


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_transformers_reads_a_made_config_as_its_own(name: str) -> None:
    family, values = hf_models.MODELS[name]
    made = getattr(transformers, hf_models.CONFIGS.get(family, f"{family}Config"))
    before = made(**values, architectures=[f"{family}ForCausalLM"])
    kind, model = parse_config(before.to_dict())
    after = made.from_dict(make_config(kind, model, positions=64))
    assert parse_config(after.to_dict())[0] == kind
    rope = before.rope_parameters
    found = {key: value for key, value in after.rope_parameters.items() if key in rope}
    assert {k: pytest.approx(v) if isinstance(v, float) else v for k, v in rope.items()} == found
    differ = {k for k, v in before.to_dict().items() if after.to_dict().get(k, v) != v}
    free = {
        "pad_token_id",
        "rope_parameters",
        "rope_interleave",
        "max_position_embeddings",
        "head_dim",
        "dtype",
        "torch_dtype",
    }
    assert differ <= free
