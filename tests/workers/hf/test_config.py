"""Laws of config.json: what pentad cannot do is refused in one sentence that names the key, and nothing is guessed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import hf_models
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import MLA, Experts, ModelShape, RopeScaling
from pentad.workers.hf.config import config_of, of_section, section_of, shape_of

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
# As the released model's file says, but for its quantization.
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


def test_llama_3_1_is_read_in_the_old_spelling_and_in_the_new_one() -> None:
    scaling = RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    expected = ModelShape(32, 4096, 32, 8, 14336, 128256, 500000.0, 1e-5, rope_scaling=scaling)
    old = {**LLAMA, "rope_scaling": LLAMA3}
    new = {**LLAMA, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}
    del new["rope_theta"]
    assert shape_of(old) == shape_of(new) == ("llama", expected)


def test_deepseek_v3_is_read_as_it_was_released() -> None:
    family, shape = shape_of(DEEPSEEK)
    assert (family, shape.layers, shape.mtp_layers, shape.norm_eps) == ("deepseek-v3", 61, 1, 1e-6)
    assert shape.mla == MLA(
        kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert shape.experts == Experts(256, 8, 2048, 2048, "sigmoid", True, 2.5, 8, 4, 0.0, 0.001, 3)
    assert shape.rope_scaling is not None
    assert shape.rope_scaling.attention_factor == 1.0
    assert shape.rope_scaling.softmax_factor == pytest.approx(1.3688879454113936**2)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (LLAMA, "architectures", ["MistralForCausalLM"]),
        (LLAMA, "hidden_act", "gelu"),
        (LLAMA, "attention_bias", True),
        (LLAMA, "mlp_bias", True),
        (LLAMA, "attention_dropout", 0.1),
        (LLAMA, "use_sliding_window", True),
        (LLAMA, "layer_types", ["full_attention", "sliding_attention"]),
        (LLAMA, "partial_rotary_factor", 0.5),
        (LLAMA, "hidden_size", None),
        (LLAMA, "hidden_size", "4096"),
        (LLAMA, "num_hidden_layers", 0),
        (LLAMA, "rms_norm_eps", -1.0),
        (LLAMA, "tie_word_embeddings", "yes"),
        (LLAMA, "rope_scaling", "linear"),
        (LLAMA, "rope_scaling", {"type": "dynamic", "factor": 2.0}),
        (LLAMA, "rope_scaling", {"rope_type": "llama3", "factor": 2.0}),
        (LLAMA, "rope_parameters", {"rope_type": "yarn", "factor": 2.0, "truncate": False}),
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
def test_what_pentad_cannot_do_is_one_sentence_that_names_the_key(
    config: dict[str, Any], key: str, value: object
) -> None:
    with pytest.raises(PentadError) as caught:
        shape_of({**config, key: value})
    text = str(caught.value)
    named = {"rope_scaling": "rope_scaling", "rope_parameters": "truncate"}.get(key, key)
    assert named in text and ", " in text and "\n" not in text and len(text) < 250


def test_a_config_without_an_architecture_is_known_by_its_type() -> None:
    bare = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert shape_of(bare) == shape_of(LLAMA)
    with pytest.raises(PentadError, match="model_type 'gpt2': expected one of llama"):
        shape_of({**bare, "model_type": "gpt2"})
    with pytest.raises(PentadError, match="model_type None"):
        shape_of({})


def test_qwen3_moe_may_begin_with_dense_layers_however_that_is_said() -> None:
    _, shape = shape_of({**QWEN, "mlp_only_layers": [0, 1]})
    assert shape.experts is not None and shape.experts.first_k_dense == 2
    _, shape = shape_of({**QWEN, "num_hidden_layers": 2, "decoder_sparse_step": 2})
    assert shape.experts is not None and shape.experts.first_k_dense == 1


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("llama", {"qk_norm": True}, "qk_norm"),
        ("llama", {"predicted": 1}, "predicted"),
        ("qwen3", {}, "qk_norm"),
        ("llama", {"experts": Experts(4, 2, 8)}, "experts"),
        ("mixtral", {"experts": Experts(4, 2, 8)}, "ffn"),
        ("mixtral", {"experts": Experts(4, 2, 48, shared_intermediate_size=8)}, "experts.shared"),
        ("qwen3-moe", {"qk_norm": True, "experts": Experts(4, 2, 8, scoring_func="sigmoid")}, "experts.score"),
        ("deepseek-v3", {"norm_eps": 1e-6}, "latent"),
        ("llama", {"scaling": RopeScaling("yarn", 4.0, 32, 1, 32, softmax_factor=2.0)}, "scaling.softmax"),
        ("gpt2", {}, "family"),
    ],
)
def test_what_a_familys_files_cannot_hold_is_refused(family: str, changes: dict[str, Any], key: str) -> None:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64, **changes}
    with pytest.raises(PentadError, match=f"{key} "):
        config_of(family, ModelShape(**sizes), positions=64)


def test_a_section_that_is_not_pentads_is_refused() -> None:
    section = section_of("llama", shape_of(LLAMA)[1])
    for wrong in ({**section, "depth": 3}, {**section, "mla": {"kv_lora_rank": 3}}, {"family": "llama"}):
        with pytest.raises(PentadError, match="no section of pentad"):
            of_section(wrong)


sizes = st.integers(1, 10_000)


@given(
    hidden=sizes,
    heads=st.integers(1, 64),
    shared=st.integers(1, 8),
    tied=st.booleans(),
    factor=st.floats(1.5, 100),
    some=st.integers(1, 20),
    more=st.integers(1, 20),
    rank=st.integers(0, 100),
    first=st.integers(0, 3),
)
def test_any_deepseek_shape_survives_its_config(
    hidden: int, heads: int, shared: int, tied: bool, factor: float, some: int, more: int, rank: int, first: int
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
            "mscale": some / 10,
            "mscale_all_dim": more / 10,
        },
    }
    family, shape = shape_of(config)
    assert (shape.mla is not None and shape.mla.q_lora_rank) == rank
    _, again = shape_of(config_of(family, shape, positions=100))
    assert shape.rope_scaling is not None and again.rope_scaling is not None
    assert again.rope_scaling.attention_factor == pytest.approx(shape.rope_scaling.attention_factor, rel=1e-11)
    assert again.rope_scaling.softmax_factor == pytest.approx(shape.rope_scaling.softmax_factor, rel=1e-11)
    replaced = section_of(family, again) | {"scaling": asdict(shape.rope_scaling)}
    assert replaced == section_of(family, shape)


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_transformers_reads_the_config_as_its_own(name: str) -> None:
    family, values = hf_models.MODELS[name]
    made = getattr(transformers, f"{family}Config")
    before = made(**values, architectures=[f"{family}ForCausalLM"])
    kind, shape = shape_of(before.to_dict())
    after = made.from_dict(config_of(kind, shape, positions=64))
    assert shape_of(after.to_dict())[0] == kind
    rope = before.rope_parameters
    found = {key: value for key, value in after.rope_parameters.items() if key in rope}
    assert {k: pytest.approx(v) if isinstance(v, float) else v for k, v in rope.items()} == found
    differ = {k for k, v in before.to_dict().items() if after.to_dict().get(k, v) != v}
    free = {"rope_parameters", "rope_interleave", "max_position_embeddings", "head_dim", "dtype", "torch_dtype"}
    assert differ <= free
