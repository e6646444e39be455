"""Names of Hugging Face files and tensors, and the file tensors that make up each of pentad's tensors.

A tensor of pentad is a concatenation of file tensors in C order: queries, keys and values; gate and up; expert after
expert. So each form can be streamed from the other with one file tensor in memory. The rotary parts of DeepSeek-V3 are
interleaved in files (pair i is x[2 i], x[2 i + 1]) and half-split in pentad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.tensors import Tensor, tensors

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MODEL_FILE = "model.yaml"  # the model section that an import writes
OPTIMIZER, STATE = "optimizer", "state.json"  # the folder of an export's optimizer state; its step and kinds

# pentad's name after `layers.N.` -> the files' names after `model.layers.N.`; * stands for the number of an expert.
_LAYER = {
    "attention_norm": ["input_layernorm.weight"],
    "attention.qkv": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "attention.qkv_bias": ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"],
    "attention.query_down": ["self_attn.q_a_proj.weight"],
    "attention.query_norm": ["self_attn.q_norm.weight"],
    "attention.key_norm": ["self_attn.k_norm.weight"],
    "attention.query": ["self_attn.q_b_proj.weight"],
    "attention.latent": ["self_attn.kv_a_proj_with_mqa.weight"],
    "attention.latent_norm": ["self_attn.kv_a_layernorm.weight"],
    "attention.keys_values": ["self_attn.kv_b_proj.weight"],
    "attention.out": ["self_attn.o_proj.weight"],
    "mlp_norm": ["post_attention_layernorm.weight"],
    "mlp.gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.down": ["mlp.down_proj.weight"],
    "experts.router": ["mlp.gate.weight"],
    "experts.bias": ["mlp.gate.e_score_correction_bias"],
    "experts.gate_up": ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
    "experts.down": ["mlp.experts.*.down_proj.weight"],
    "shared.gate_up": ["mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"],
    "shared.down": ["mlp.shared_experts.down_proj.weight"],
}
_MLA = {"attention.query_norm": ["self_attn.q_a_layernorm.weight"]}
_MLA_WITHOUT_QUERY_DOWN = {"attention.query": ["self_attn.q_proj.weight"]}
_FUSED = {"experts.gate_up": ["mlp.experts.gate_up_proj"], "experts.down": ["mlp.experts.down_proj"]}
_POST_NORMS = {
    "attention_post_norm": ["post_attention_layernorm.weight"],
    "mlp_norm": ["pre_feedforward_layernorm.weight"],
    "mlp_post_norm": ["post_feedforward_layernorm.weight"],
}
_PHI3 = {"attention.qkv": ["self_attn.qkv_proj.weight"], "mlp.gate_up": ["mlp.gate_up_proj.weight"]}
_GPT_OSS = {
    "attention.out_bias": ["self_attn.o_proj.bias"],
    "attention.sinks": ["self_attn.sinks"],
    "experts.router": ["mlp.router.weight"],
    "experts.router_bias": ["mlp.router.bias"],
    "experts.gate_up": ["mlp.experts.gate_up_proj"],
    "experts.gate_up_bias": ["mlp.experts.gate_up_proj_bias"],
    "experts.down": ["mlp.experts.down_proj"],
    "experts.down_bias": ["mlp.experts.down_proj_bias"],
}
_MIXTRAL = {
    "experts.router": ["block_sparse_moe.gate.weight"],
    "experts.gate_up": ["block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"],
    "experts.down": ["block_sparse_moe.experts.*.w2.weight"],
}
_OF_FAMILY = {"olmo2": _POST_NORMS, "phi3": _PHI3, "gemma2": _POST_NORMS, "gemma3": _POST_NORMS, "gpt-oss": _GPT_OSS}
# The same for names after `mtp.N.`
_MTP = {
    "hidden_norm": ["hnorm.weight"],
    "embedding_norm": ["enorm.weight"],
    "join": ["eh_proj.weight"],
    "norm": ["shared_head.norm.weight"],
}
# The same for names without a prefix.
_ENDS = {"embedding": ["model.embed_tokens.weight"], "norm": ["model.norm.weight"], "head": ["lm_head.weight"]}

Sizes = tuple[int, ...]


class Rotary(NamedTuple):
    """Rows in `heads` equal groups; the last `width` rows of each group are interleaved rotary pairs."""

    heads: int
    width: int


class Stack(NamedTuple):
    """The form of a tensor of all experts: whether their matrices are transposed, and gate and up rows alternate."""

    is_transposed: bool
    alternates: bool


_GPT_OSS_STACKS = {
    "experts.gate_up": Stack(is_transposed=True, alternates=True),
    "experts.gate_up_bias": Stack(is_transposed=False, alternates=True),
    "experts.down": Stack(is_transposed=True, alternates=False),
}


class FileTensor(NamedTuple):
    """A tensor in the files; `stack` is the form of gpt-oss's experts."""

    name: str
    shape: Sizes
    rotary: Rotary | None = None
    stack: Stack | None = None


class TensorEntry(NamedTuple):
    """A tensor of pentad by its global name, and the file tensors whose elements make it up, in order."""

    name: str
    shape: Sizes
    parts: tuple[FileTensor, ...]


class TensorTable(NamedTuple):
    """All tensors of a model. `copies` maps file tensors that repeat another one to the original; files may lack such
    copies."""

    entries: tuple[TensorEntry, ...]
    copies: dict[str, str]


class FileLayout(NamedTuple):
    """How files store a family: `fused_experts` in one tensor, as transformers 5 holds them in memory, or in a tensor
    each, as on the hub; `interleaved` rotary parts, as for DeepSeek-V3 unless its config.json says otherwise."""

    fused_experts: bool = False
    interleaved: bool = True


def tensor_table(family: str, model: ModelSpec, layout: FileLayout = FileLayout()) -> TensorTable:  # noqa: B008 (a constant)
    """The tensors of a model, layer by layer, then embedding, norm and head."""
    held = {tensor.name: tensor for tensor in tensors(model)}
    num_layers = model.layers + model.mtp_layers
    of_layer, rotary = _layer_names(family, model, layout), _rotary_parts(model, layout)
    stacks = _GPT_OSS_STACKS if family == "gpt-oss" else {}
    tables = []  # (prefix of pentad's names, prefix of the files' names, names)
    for layer in range(num_layers):
        if f"layers.{layer}.experts.router" in held and model.experts is not None and model.experts.has_bias:
            bias = Tensor(f"layers.{layer}.experts.bias", (model.experts.num_experts,), 0.0)
            held[bias.name] = bias
        tables.append((f"layers.{layer}.", f"model.layers.{layer}.", of_layer))
        if layer >= model.layers:
            tables.append((f"mtp.{layer - model.layers}.", f"model.layers.{layer}.", _MTP))
    tables.append(("", "", _ENDS))
    entries = [
        _entry(held[ours + name], [theirs + each for each in names], rotary.get(name), stacks.get(name))
        for ours, theirs, table in tables
        for name, names in table.items()
        if ours + name in held
    ]
    embedding, head = (_ENDS[name][0] for name in ("embedding", "head"))
    copies = {head: embedding} if model.tie_word_embeddings else {}
    for layer in range(model.layers, num_layers):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = embedding
        copies[f"model.layers.{layer}.shared_head.head.weight"] = copies.get(head, head)
    return TensorTable(tuple(entries), copies)


def _layer_names(family: str, model: ModelSpec, layout: FileLayout) -> dict[str, list[str]]:
    names = dict(_LAYER)
    if model.mla is not None:
        names |= _MLA if model.mla.q_lora_rank else _MLA_WITHOUT_QUERY_DOWN
    if layout.fused_experts:
        names |= _FUSED
    elif family == "mixtral":
        names |= _MIXTRAL
    return names | _OF_FAMILY.get(family, {})


def _rotary_parts(model: ModelSpec, layout: FileLayout) -> dict[str, Rotary]:
    if model.mla is None or not layout.interleaved:
        return {}
    width = model.mla.qk_rope_head_dim
    return {"attention.query": Rotary(model.heads, width), "attention.latent": Rotary(1, width)}


def _entry(tensor: Tensor, names: Sequence[str], rotary: Rotary | None, stack: Stack | None) -> TensorEntry:
    if "*" in names[0]:
        count, rows, columns = tensor.shape
        shape = rows // len(names), columns
        parts = [FileTensor(name.replace("*", str(expert)), shape) for expert in range(count) for name in names]
    elif len(names) == 1:
        is_transposed = stack is not None and stack.is_transposed
        sizes = (tensor.shape[0], tensor.shape[2], tensor.shape[1]) if is_transposed else tensor.shape
        parts = [FileTensor(names[0], sizes, rotary, stack)]
    else:
        rows_of_each = (segment.size for segment in tensor.splits[0].segments)
        parts = [FileTensor(name, (size, *tensor.shape[1:])) for name, size in zip(names, rows_of_each, strict=True)]
    return TensorEntry(tensor.name, tensor.shape, tuple(parts))
