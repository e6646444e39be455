"""Tensors that a stage allocates for one piece, their bytes, and when they are freed.

Follows `workers/model`, which allocates them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain

from pentad.orchestrator.activations.allocations import BYTES, INDEX, Allocation, Life, Piece
from pentad.orchestrator.activations.attention_memory import AttentionShape, attention_core, attention_shape
from pentad.schedules.spec.model import MLA, Experts, ModelSpec

OUTPUT_GRADIENT = "gradient of the result"  # what B receives, allocated by the next layer or stage unless gathered
INPUT_GRADIENTS = "gradients of the input, after and before its norm"
POST_NORM_GRADIENT = "gradient of the norm's input"  # the same where a norm follows, which allocates it


@lru_cache(maxsize=4096)
def sublayers(model: ModelSpec, has_experts: bool, has_window: bool, piece: Piece) -> list[list[list[Allocation]]]:
    """The allocations of a layer's attention and of its feed-forward network: of the norm before, the sublayer itself,
    and the norm after."""
    mixer = attention(model, has_window, piece) if model.mla is None else latent_attention(model, model.mla, piece)
    if has_experts and model.experts is not None:
        network = moe(model.hidden, model.experts, piece, has_biases=model.expert_biases)
    else:
        network = mlp(model.hidden, model.ffn, piece)
    before, own, after = _residual(model, mixer, piece, reused=model.mla is not None or piece.keeps_operands)
    attention_part = [before, own, _made_by("attn_proj", after)]
    piece = piece.of_network(has_experts)
    before, own, after = _residual(model, network, piece, reused=piece.keeps_operands)
    return [attention_part, [_made_by("attn_proj", before), own, after]]


def _made_by(part: str, allocations: Iterable[Allocation]) -> list[Allocation]:
    """The allocations, with those that F saves marked as made by RECOMPUTE of a part of the layer."""
    return [each._replace(parts=(part,)) if each.life.startswith("F-") else each for each in allocations]


def _residual(
    model: ModelSpec, sublayer: Iterable[Allocation], piece: Piece, *, reused: bool
) -> list[list[Allocation]]:
    """`reused`: W reads the sublayer's input as it is; otherwise it reads a gathered copy, or a cast."""
    before, own, after = list(residual_stream(model.hidden, piece, reused=reused)), list(sublayer), list[Allocation]()
    if model.norms != "after":
        stream, maximum = piece.stream(model.hidden), 0 if reused else _amax(piece)
        before = [*norm(model.hidden, piece), Allocation("absolute maximum", "F-B", maximum)]
        own = [each._replace(bytes=each.bytes + stream) if each.life == "B" and not reused else each for each in own]
        own.append(Allocation("normed stream", "B-W", reused * stream))
    if model.norms != "before":
        after = list(post_norm(model.hidden, piece))
        own = [each._replace(what=POST_NORM_GRADIENT) if each.what == OUTPUT_GRADIENT else each for each in own]
    return [before, own, after]


def _amax(piece: Piece) -> int:
    """Bytes of the maximum by which a norm scaled its cast."""
    return BYTES["float32"] * (piece.norm_casts and piece.fp8 is not None and piece.fp8.scaling == "tensor")


def residual_stream(hidden: int, piece: Piece, *, reused: bool) -> Iterator[Allocation]:
    """The input of a sublayer without a norm before it."""
    yield Allocation("residual stream", "F-W" if reused else "F-B", piece.stream(hidden))


def post_norm(hidden: int, piece: Piece) -> Iterator[Allocation]:
    """RMSNorm of a sublayer's result."""
    yield Allocation("result", "F-B", piece.stream(hidden))
    yield Allocation("scale", "F-B", piece.sequence_parallel_tokens * piece.wide, offload=False)
    yield Allocation("gradient of the weight", "B-W", hidden * piece.wide)


def norm(hidden: int, piece: Piece) -> Iterator[Allocation]:
    """RMSNorm of the residual stream; B computes its result again."""
    yield Allocation("residual stream", "F-B", piece.stream(hidden))
    yield Allocation("scale", "F-B", piece.sequence_parallel_tokens * piece.wide, offload=False)
    yield Allocation("gradient of the weight", "B-W", hidden * piece.wide)


def attention(model: ModelSpec, has_window: bool, piece: Piece) -> Iterator[Allocation]:
    """Grouped-query attention: queries, keys and values are parts of one tensor."""
    shape = attention_shape(model, piece)
    is_plain = not (has_window or model.attn_logit_softcapping or model.attention_sinks)
    saved, forward, backward = attention_core(shape, is_plain=is_plain, has_softcap=model.attn_logit_softcapping > 0)
    out, qkv, width = shape.output, shape.inputs, shape.heads * shape.value
    stream, copy = piece.full_stream(model.hidden), piece.copy(model.hidden)
    projected = (shape.heads + 2 * shape.kv_heads) * shape.query
    yield from saved
    yield from _made_by("qkv_linear", _head_norms(model, shape))
    biases = model.qkv_bias * (shape.heads + 2 * shape.kv_heads) * shape.query + model.out_bias * model.hidden
    yield Allocation(
        "gradients of biases and sinks", "B-W", (biases + model.attention_sinks * shape.heads) * piece.wide
    )
    yield Allocation(OUTPUT_GRADIENT, "B-W", piece.operand(model.hidden))
    yield Allocation("gradients of queries, keys and values", "B-W", piece.operand(projected))
    yield Allocation("gathered input", "B-W", piece.cast(model.hidden) or copy)
    yield Allocation("heads' output, cast", "B-W", piece.cast(width))
    yield Allocation("attention", "F", copy + forward)
    yield Allocation("product with the output weight", "F", 2 * copy + stream + piece.cast(width))
    joined = qkv * (1 if piece.fp8 is None else 2)  # both exist while W's operand is made from the parts' gradients
    if piece.mesh.cp == 1:  # the kernel's memory is free by then
        peak = max(backward + out + qkv - piece.operand(projected), joined)
    else:
        peak = backward + out + joined
    yield Allocation("attention, gradients of heads and of their parts", "B", peak)
    yield Allocation(INPUT_GRADIENTS, "B", copy + 2 * piece.stream(model.hidden))


def _head_norms(model: ModelSpec, shape: AttentionShape) -> Iterator[Allocation]:
    """RMSNorms of queries and keys, if the model has them."""
    if not model.qk_norm:
        return
    piece, width, heads, norms = shape.piece, shape.query, shape.heads + shape.kv_heads, 2
    tensors = tuple(piece.tokens * each * width * piece.itemsize for each in (shape.heads, shape.kv_heads))
    yield Allocation("heads before their norm", "F-B", sum(tensors), tensors=tensors)
    if model.qk_norm == "all_heads":
        heads, norms = 2, heads
    yield Allocation("heads' scales", "F-B", piece.tokens * heads * piece.wide, offload=False)
    yield Allocation("gradients of the heads' norms", "B-W", norms * width * piece.wide)


def latent_attention(model: ModelSpec, mla: MLA, piece: Piece) -> Iterator[Allocation]:
    """Multi-head latent attention (arXiv 2405.04434, 2.1): each tp rank computes the latent vectors of its own tokens,
    which are then gathered."""
    tokens, own, hidden, c = piece.tokens, piece.sequence_parallel_tokens, model.hidden, piece.itemsize
    shape = attention_shape(model, piece)
    saved, forward, backward = attention_core(shape)
    out, queries = shape.output, tokens * shape.heads * shape.query * c
    latents, tensors = mla.kv_lora_rank + mla.q_lora_rank, (own * mla.kv_lora_rank * c, own * mla.q_lora_rank * c)
    yield from saved
    yield from _made_by(
        "mla_up_proj",
        [
            Allocation("latents", "F-B", own * latents * c, tensors=tensors),
            Allocation("normed latents", "F-W" if piece.keeps_operands else "F-B", own * latents * c, tensors=tensors),
            Allocation("latents' scales", "F-B", own * piece.wide * (1 + bool(mla.q_lora_rank)), offload=False),
        ],
    )
    yield Allocation(OUTPUT_GRADIENT, "B-W", piece.operand(hidden))
    keys_values = piece.cast(shape.heads * (mla.qk_nope_head_dim + mla.v_head_dim))
    dqkv = piece.cast(shape.heads * shape.query) + keys_values if keys_values else shape.inputs - queries
    yield Allocation("gradients of queries, keys and values", "B-W", dqkv)
    yield Allocation("heads' output, cast", "B-W", piece.cast(shape.heads * shape.value))
    yield Allocation("gradients of latents and the rotary key", "B-W", own * (latents + mla.qk_rope_head_dim) * c)
    yield Allocation("gradients of the latents' norms", "B-W", latents * piece.wide)
    if piece.fp8 is not None:
        yield Allocation("latents, cast", "B-W", piece.cast(mla.kv_lora_rank) + piece.cast(mla.q_lora_rank or hidden))
    elif piece.is_gathered:
        yield Allocation("gathered latents", "B-W", tokens * latents * c)
        yield Allocation("gathered input of the queries", "B-W", 0 if mla.q_lora_rank else piece.copy(hidden))
    gathered = tokens * (latents + mla.qk_rope_head_dim) * c
    yield Allocation("attention, gathered latents", "F", forward + gathered + piece.copy(hidden))
    yield Allocation("attention, gradients of heads", "B", backward + 2 * (queries + out) + piece.copy(hidden))


def mlp(hidden: int, width: int, piece: Piece) -> Iterator[Allocation]:
    """Gated feed-forward network (SwiGLU); tp ranks split its width."""
    width //= piece.mesh.tp
    inner, copy = piece.tokens * width * piece.itemsize, piece.copy(hidden)
    yield Allocation("gate and up", "F-B", 2 * inner, parts=("mlp",))
    yield Allocation(OUTPUT_GRADIENT, "B-W", piece.operand(hidden))
    yield Allocation("gated", "B-W", piece.operand(width))
    yield Allocation("gradients of gate and up", "B-W", piece.operand(2 * width))
    yield Allocation("gathered input", "B-W", piece.cast(hidden) or copy)
    yield Allocation("gated and the result", "F", piece.operand(width) + piece.stream(hidden) + copy)
    yield Allocation("gradient of gated, casts for B", "B", inner + piece.cast(2 * width) + piece.cast(hidden))
    yield Allocation(INPUT_GRADIENTS, "B", 2 * piece.stream(hidden) + copy)


def moe(hidden: int, experts: Experts, piece: Piece, *, has_biases: bool = False) -> Iterator[Allocation]:
    """Mixture of experts, with the largest possible number of rows: ep groups that gather tokens or have slots (GPUs)
    allocate them all, and those that exchange tokens (CPUs) get no more."""
    tokens, c, wide, ep = piece.tokens, piece.itemsize, piece.wide, piece.mesh.ep
    local = experts.num_experts // ep
    width = experts.intermediate_size // piece.mesh.tp
    shared = experts.shared_intermediate_size // piece.mesh.tp
    group_tokens = ep * (piece.expert_slots or tokens)
    rows = group_tokens * min(experts.top_k, local)
    copy, in_8_bits, of_shared = piece.copy(hidden), piece.casts_experts, piece.of_shared_experts
    received = (0,) if ep == 1 else piece.expert_tensors(group_tokens, hidden)
    loads = 1 + (experts.aux_loss_coef > 0 and piece.mesh.cp > 1)
    tensors = tokens * experts.num_experts * wide, tokens * experts.top_k * wide
    yield Allocation("scores and weights", "F-B", sum(tensors), tensors=tensors)
    if experts.router_z_loss_coef:
        yield Allocation("logits of the router", "F-B", tokens * experts.num_experts * wide)
    yield Allocation("choices", "F-B", tokens * experts.top_k * INDEX, offload=False)
    yield Allocation("loads", "F-B", experts.num_experts * INDEX * loads, offload=False)
    if piece.expert_slots:
        yield Allocation("slots of tokens", "F-B", ep * (tokens + piece.expert_slots) * INDEX, offload=False)
    yield Allocation("row numbers and offsets", "F-W", rows * INDEX + local * 4, offload=False)
    yield Allocation(
        "row weights and positions", "F-B", rows * wide + group_tokens * experts.top_k * INDEX, offload=False
    )
    yield Allocation("received tokens", "F-W", sum(received), tensors=received)
    tensors = 2 * rows * width * c, 2 * tokens * shared * c
    yield Allocation("gate and up", "F-B", sum(tensors), parts=("moe",), tensors=tensors)
    if (ep == 1 and not in_8_bits) or (shared and of_shared.fp8 is None):
        yield Allocation(OUTPUT_GRADIENT, "B-W", tokens * hidden * c)
    yield Allocation("received gradients", "B-W", sum(received))
    if ep == 1 and in_8_bits:
        yield Allocation("tokens and their gradients, cast", "B-W", 2 * piece.expert_rows(tokens, hidden))
    inner = piece.expert_rows(rows, 3 * width)
    if shared:
        yield Allocation("shared expert's input and gradient, cast", "B-W", 2 * of_shared.cast(hidden))
        inner += of_shared.operand(shared) + of_shared.operand(2 * shared)
    yield Allocation("gated, gradients of gate and up", "B-W", inner)
    yield Allocation("gradients of the router's logits", "B-W", tokens * experts.num_experts * c)
    yield Allocation("gathered input", "B-W", copy)
    # in FP8, F and B read tokens in place and hold casts instead; W casts its operands back
    sorted_rows = (rows * (hidden + width) + group_tokens * hidden) * c
    yield Allocation("sorted rows and results", "F", sorted_rows + copy)
    yield Allocation("sorted rows and gradients", "B", sorted_rows + copy)
    yield Allocation("sorted rows", "W", rows * (hidden + in_8_bits * 2 * width) * c)
    if has_biases:
        yield Allocation("gradient of the router's bias", "B-W", experts.num_experts * wide)
        yield Allocation("factors of the gradients of biases", "B-W", 2 * rows * c)
        yield Allocation("biases of rows", "F", rows * (2 * width + hidden) * c)


def heads_and_mtp(model: ModelSpec, piece: Piece) -> Iterator[Allocation]:
    """Head and loss, and the MTP layers, each with a head."""
    yield from head(model, piece.of_head)
    piece = piece._replace(fp8=None)
    for _ in range(model.mtp_layers):
        yield from mtp_input(model, piece)
        has_window = model.window(model.layers) > 0
        yield from chain(*chain(*sublayers(model, model.experts is not None, has_window, piece)))
        yield from head(model, piece)


def head(model: ModelSpec, piece: Piece) -> Iterator[Allocation]:
    """The last norm, the output head and the loss. Logits become their gradient, which in FP8 is cast in both forms, or
    are made again in chunks."""
    width, hidden = model.vocab // piece.mesh.tp, model.hidden
    yield from norm(hidden, piece)
    yield Allocation("normed stream", "F-W" if piece.keeps_operands else "F-B", piece.stream(hidden))
    if piece.logit_rows:
        rows = min(piece.logit_rows, piece.tokens) * piece.itemsize
        chunk, beside = rows * width, (1 + piece.is_gathered) * rows * hidden
        yield Allocation("gradient of the normed stream", "F-B", piece.stream(hidden))
        yield Allocation("logits of a chunk, gathered input and gradient", "F", chunk + beside)
        yield Allocation("logits of a chunk", "W", chunk)
    else:
        yield Allocation("logits", "F-W" if piece.fp8 is None else "F-B", piece.tokens * width * piece.itemsize)
    yield Allocation("gradient of the logits, cast", "B-W", piece.cast(width))
    until: Life = "F-W" if piece.logit_rows else "F-B"
    yield Allocation("log-sum-exps", until, piece.tokens * piece.wide, offload=False)
    # tp ranks number targets from the first word of their shard
    yield Allocation("targets", until, piece.is_gathered * piece.tokens * INDEX, offload=False)
    yield Allocation("gathered input", "B-W", piece.cast(hidden) or piece.copy(hidden))
    if piece.fp8 is not None:
        yield Allocation("gathered input and its cast", "F", piece.copy(hidden) + piece.cast(hidden))
        yield Allocation("gathered input, cast for B", "B", piece.copy(hidden) + piece.cast(width))


def lookup(model: ModelSpec, piece: Piece) -> Iterator[Allocation]:
    """The embedding's gradient waits for W; tp ranks number tokens from the first word of their shard."""
    yield Allocation("gradient of the rows", "B-W", piece.full_stream(model.hidden))
    yield Allocation("tokens", "B-W", piece.is_gathered * piece.tokens * INDEX)
    yield Allocation("sums of parts of long runs of a token", "W", piece.tokens // 64 * model.hidden * piece.wide)


def mtp_input(model: ModelSpec, piece: Piece) -> Iterator[Allocation]:
    """The input of an MTP layer (arXiv 2412.19437, 2.2): a token's embedding joined with a stream saved anyway."""
    stream = piece.stream(model.hidden)
    yield Allocation("embedding", "F-B", stream)
    yield Allocation("scales", "F-B", 2 * piece.sequence_parallel_tokens * piece.wide, offload=False)
    yield Allocation("joined", "F-W", 2 * stream)
    yield Allocation("tokens", "F-B" if piece.is_gathered else "F-W", piece.tokens * INDEX, offload=False)
    yield Allocation("gradient of joined", "B-W", stream)
    yield Allocation("gradients of the norms", "B-W", 2 * model.hidden * piece.wide)
    yield from lookup(model, piece)
