"""Tensors that a stage allocates for one piece (a slice of a microbatch), their bytes, and when they are freed.

Follows `workers/model`. Notation: T tokens of a piece, t of them in this rank's part of the residual stream (t = T /
tp), H hidden, N query heads and M key-value heads of this rank, D and E the widths of a query and of a value, I the
width of a feed-forward network on this rank, V its part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from pentad.schedules.spec.cp_layout import CpMethod
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import MLA, Experts, ModelSpec
from pentad.schedules.spec.plan import Plan

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
INDEX = 8  # bytes of an int64
PROCESSORS = 132  # of a Hopper GPU: deterministic flash attention sums dq in at most so many parts

# The operation that frees a workspace before it ends, or the one that allocates a tensor and the one that frees it.
Life = Literal["F", "B", "W", "F-B", "F-W", "B-W"]


class Piece(NamedTuple):
    """`rows` sequences with `length` positions each on a context rank, in one of `slices` of a microbatch."""

    rows: int
    length: int
    dtype: str
    device: str = "cpu"
    slices: int = 1
    mesh: Mesh = Mesh()
    cp_method: CpMethod = "ring"
    document_mask: bool = False
    deterministic: bool = True

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def sequence_parallel_tokens(self) -> int:
        return self.tokens // self.mesh.tp

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the dtype of compute."""
        return BYTES[self.dtype]

    @property
    def wide(self) -> int:
        """Bytes of an element of statistics, sums and main gradients."""
        return max(self.itemsize, BYTES["float32"])

    @property
    def is_gathered(self) -> bool:
        """Whether tensor ranks gather all tokens before a product, and so have a copy of its input."""
        return self.mesh.tp > 1

    def stream(self, hidden: int) -> int:
        """Bytes of this rank's part of the residual stream."""
        return self.sequence_parallel_tokens * hidden * self.itemsize

    def full_stream(self, hidden: int) -> int:
        return self.tokens * hidden * self.itemsize

    def copy(self, hidden: int) -> int:
        """Bytes of a gathered stream, 0 without tensor ranks."""
        return self.is_gathered * self.full_stream(hidden)


class Allocation(NamedTuple):
    """A tensor, or several. Selective recomputation frees those with `recompute` after F; OFFLOAD leaves those without
    `offload`. The `incoming` one is the gradient that B receives, allocated by the layer or stage behind."""

    what: str
    life: Life
    bytes: int
    offload: bool = True
    recompute: bool = False
    incoming: bool = False


class Totals(NamedTuple):
    """Sums of allocations: from F to B or W (`saved`, of which some recomputable, not offloadable, or `reused` by W),
    from B or F to W (`deferred`), and the largest workspace of F, B and W."""

    saved: int
    recomputable: int
    not_offloadable: int
    reused: int
    deferred: int
    incoming: int
    forward: int
    backward: int
    weight: int


def total(allocations: Iterable[Allocation]) -> Totals:
    found = list(allocations)
    saved = [each for each in found if each.life in ("F-B", "F-W")]

    def workspace(op: Life) -> int:
        return max((each.bytes for each in found if each.life == op), default=0)

    return Totals(
        saved=sum(each.bytes for each in saved),
        recomputable=sum(each.bytes for each in saved if each.recompute),
        not_offloadable=sum(each.bytes for each in saved if not each.offload),
        reused=sum(each.bytes for each in saved if each.life == "F-W"),
        deferred=sum(each.bytes for each in found if each.life in ("F-W", "B-W")),
        incoming=sum(each.bytes for each in found if each.incoming),
        forward=workspace("F"),
        backward=workspace("B"),
        weight=workspace("W"),
    )


def piece_of(plan: Plan) -> Piece:
    length = plan.batch.sequence_length // plan.program.slices // plan.mesh.cp
    sizes = plan.batch.micro_batch_size, length, plan.dtype, plan.device, plan.program.slices
    return Piece(*sizes, plan.mesh, plan.cp_method, plan.document_mask, plan.deterministic)


def norm(hidden: int, piece: Piece, *, reused: bool) -> Iterator[Allocation]:
    """RMSNorm of the residual stream; `reused`: W reads the result as it is."""
    stream = piece.stream(hidden)
    yield Allocation("residual stream", "F-B", stream)
    yield Allocation("scale", "F-B", piece.sequence_parallel_tokens * piece.wide, offload=False)
    yield Allocation("normed stream", "F-W" if reused else "F-B", stream, recompute=True)
    yield Allocation("gradient of the weight", "B-W", hidden * piece.wide)


def attention(model: ModelSpec, piece: Piece) -> Iterator[Allocation]:
    """Grouped-query attention: queries, keys and values are parts of one tensor."""
    tokens, hidden, width, c = piece.tokens, model.hidden, model.qk_head_dim, piece.itemsize
    heads, kv_heads = model.heads // piece.mesh.tp, max(1, model.kv_heads // piece.mesh.tp)
    qkv, out = tokens * (heads + 2 * kv_heads) * width * c, tokens * heads * width * c
    exchanged = tokens * (heads + 2 * max(kv_heads, piece.mesh.cp)) * width * c
    core = attention_core(AttentionShape(piece, heads, kv_heads, width, width, qkv, exchanged))
    stream, copy = piece.full_stream(hidden), piece.copy(hidden)
    yield from core.saved
    yield Allocation("heads' output", "F-W", out)
    if model.qk_norm:
        normed = tokens * (heads + kv_heads)
        yield Allocation("heads before their norm", "F-B", normed * width * c)
        yield Allocation("heads' scales", "F-B", normed * piece.wide, offload=False)
        yield Allocation("gradients of the heads' norms", "B-W", 2 * width * piece.wide)
    yield Allocation("gradient of the result", "B-W", stream, incoming=not piece.is_gathered)
    yield Allocation("gradients of queries, keys and values", "B-W", qkv)
    yield Allocation("gathered input", "B-W", copy)
    yield Allocation("attention", "F", copy + core.forward)
    yield Allocation("product with the output weight", "F", 2 * copy + stream)
    yield Allocation("attention, gradients of heads and of their parts", "B", core.backward + out + qkv)
    yield Allocation("gradient of the input", "B", copy + piece.stream(hidden))


def latent_attention(model: ModelSpec, mla: MLA, piece: Piece) -> Iterator[Allocation]:
    """Multi-head latent attention (arXiv 2405.04434, 2.1): latent vectors are made of a rank's own tokens, then
    gathered."""
    tokens, own, hidden, c = piece.tokens, piece.sequence_parallel_tokens, model.hidden, piece.itemsize
    heads, width = model.heads // piece.mesh.tp, model.qk_head_dim
    queries, out = tokens * heads * width * c, tokens * heads * mla.v_head_dim * c
    keys_values = tokens * heads * (mla.qk_nope_head_dim + mla.v_head_dim) * c
    core = attention_core(
        AttentionShape(piece, heads, heads, width, mla.v_head_dim, 2 * queries + keys_values, 2 * queries + out)
    )
    latents = mla.kv_lora_rank + mla.q_lora_rank
    yield from core.saved
    yield Allocation("heads' output", "F-W", out)
    yield Allocation("latents", "F-B", own * latents * c)
    yield Allocation("normed latents", "F-B" if piece.is_gathered else "F-W", own * latents * c)
    yield Allocation("latents' scales", "F-B", own * piece.wide * (1 + bool(mla.q_lora_rank)), offload=False)
    yield Allocation("gradient of the result", "B-W", piece.full_stream(hidden), incoming=not piece.is_gathered)
    yield Allocation("gradients of queries, keys and values", "B-W", queries + keys_values)
    yield Allocation("gradients of latents and the rotary key", "B-W", own * (latents + mla.qk_rope_head_dim) * c)
    yield Allocation("gradients of the latents' norms", "B-W", latents * piece.wide)
    if piece.is_gathered:
        yield Allocation("gathered latents", "B-W", tokens * latents * c)
        yield Allocation("gathered input of the queries", "B-W", 0 if mla.q_lora_rank else piece.copy(hidden))
    gathered = tokens * (latents + mla.qk_rope_head_dim) * c
    yield Allocation("attention, gathered latents", "F", core.forward + gathered + piece.copy(hidden))
    yield Allocation("attention, gradients of heads", "B", core.backward + 2 * (queries + out) + piece.copy(hidden))


def mlp(hidden: int, width: int, piece: Piece) -> Iterator[Allocation]:
    """Gated feed-forward network (SwiGLU) of a width that tensor ranks split."""
    inner, copy = piece.tokens * (width // piece.mesh.tp) * piece.itemsize, piece.copy(hidden)
    yield Allocation("gate and up", "F-B", 2 * inner, recompute=True)
    yield Allocation("gradient of the result", "B-W", piece.full_stream(hidden), incoming=not piece.is_gathered)
    yield Allocation("gated", "B-W", inner)
    yield Allocation("gradients of gate and up", "B-W", 2 * inner)
    yield Allocation("gathered input", "B-W", copy)
    yield Allocation("gated and the result", "F", inner + piece.stream(hidden) + copy)
    yield Allocation("gradient of gated", "B", inner)
    yield Allocation("gradient of the input", "B", piece.stream(hidden) + copy)


def moe(hidden: int, experts: Experts, piece: Piece) -> Iterator[Allocation]:
    """Mixture of experts. Rows are as many as there can be: groups that gather tokens (GPUs) have room for all of them,
    and no more come to those that exchange them (CPUs)."""
    tokens, c, wide, ep = piece.tokens, piece.itemsize, piece.wide, piece.mesh.ep
    local = experts.num_experts // ep
    width = experts.intermediate_size // piece.mesh.tp
    shared = experts.shared_intermediate_size // piece.mesh.tp
    group_tokens = ep * tokens
    rows = group_tokens * min(experts.top_k, local)
    copy, received = piece.copy(hidden), 0 if ep == 1 else group_tokens * hidden * c
    loads = 1 + (experts.aux_loss_coef > 0 and piece.mesh.cp > 1)
    yield Allocation("scores and weights", "F-B", tokens * (experts.num_experts + experts.top_k) * wide)
    yield Allocation("choices", "F-B", tokens * experts.top_k * INDEX, offload=False)
    yield Allocation("loads", "F-B", experts.num_experts * INDEX * loads, offload=False)
    yield Allocation("row numbers and offsets", "F-W", rows * INDEX + local * 4, offload=False)
    yield Allocation(
        "row weights and positions", "F-B", rows * wide + group_tokens * experts.top_k * INDEX, offload=False
    )
    yield Allocation("received tokens", "F-W", received)
    yield Allocation("gate and up", "F-B", 2 * (rows * width + tokens * shared) * c, recompute=True)
    if ep == 1 or shared:
        yield Allocation("gradient of the result", "B-W", tokens * hidden * c, incoming=not piece.is_gathered)
    yield Allocation("received gradients", "B-W", received)
    yield Allocation("gated, gradients of gate and up", "B-W", 3 * (rows * width + tokens * shared) * c)
    yield Allocation("gradients of the router's logits", "B-W", tokens * experts.num_experts * c)
    yield Allocation("gathered input", "B-W", copy)
    sorted_rows = (rows * (hidden + width) + group_tokens * hidden) * c
    yield Allocation("sorted rows and results", "F", sorted_rows + copy)
    yield Allocation("sorted rows and gradients", "B", sorted_rows + copy)
    yield Allocation("sorted rows", "W", rows * hidden * c)


def head(model: ModelSpec, piece: Piece) -> Iterator[Allocation]:
    """The last norm, the output head and the loss; logits become their gradient."""
    yield from norm(model.hidden, piece, reused=not piece.is_gathered)
    yield Allocation("logits", "F-W", piece.tokens * (model.vocab // piece.mesh.tp) * piece.itemsize)
    yield Allocation("log-sum-exps", "F-B", piece.tokens * piece.wide, offload=False)
    # tensor ranks count targets from their own first word
    yield Allocation("targets", "F-B", piece.is_gathered * piece.tokens * INDEX, offload=False)
    yield Allocation("gathered input", "B-W", piece.copy(model.hidden))


def lookup(model: ModelSpec, piece: Piece) -> Iterator[Allocation]:
    """The embedding's gradient waits for W; tensor ranks count tokens from their own first word."""
    yield Allocation("gradient of the rows", "B-W", piece.full_stream(model.hidden))
    yield Allocation("tokens", "B-W", piece.is_gathered * piece.tokens * INDEX)


def mtp_input(model: ModelSpec, piece: Piece) -> Iterator[Allocation]:
    """What an MTP layer (arXiv 2412.19437, 2.2) reads: a token's embedding joined with a stream that is saved
    anyway."""
    stream = piece.stream(model.hidden)
    yield Allocation("embedding", "F-B", stream)
    yield Allocation("scales", "F-B", 2 * piece.sequence_parallel_tokens * piece.wide, offload=False)
    yield Allocation("joined", "F-W", 2 * stream)
    yield Allocation("tokens", "F-B" if piece.is_gathered else "F-W", piece.tokens * INDEX, offload=False)
    yield Allocation("gradient of joined", "B-W", stream)
    yield Allocation("gradients of the norms", "B-W", 2 * model.hidden * piece.wide)
    yield from lookup(model, piece)


def kv_elements(model: ModelSpec, piece: Piece) -> int:
    """Elements of the keys and values of one layer."""
    if model.mla is not None:
        return piece.tokens * model.heads // piece.mesh.tp * (model.qk_head_dim + model.mla.v_head_dim)
    return piece.tokens * max(1, model.kv_heads // piece.mesh.tp) * 2 * model.qk_head_dim


class AttentionShape(NamedTuple):
    """`inputs` are the bytes of the tensors that queries, keys and values are parts of, `exchanged` those of the same
    for whole sequences and fewer heads (Ulysses)."""

    piece: Piece
    heads: int
    kv_heads: int
    query: int
    value: int
    inputs: int
    exchanged: int

    @property
    def is_exchanged(self) -> bool:
        return self.piece.mesh.cp > 1 and self.piece.cp_method == "ulysses"

    @property
    def saved_inputs(self) -> int:
        return self.exchanged if self.is_exchanged else self.inputs

    @property
    def output(self) -> int:
        return self.piece.tokens * self.heads * self.value * self.piece.itemsize

    @property
    def log_sum_exps(self) -> int:
        return self.piece.tokens * self.heads * self.piece.wide

    @property
    def scores(self) -> int:
        """Elements of all scores."""
        return self.piece.tokens * self.heads * self.piece.length * self.piece.slices * self.piece.mesh.cp

    @property
    def transfers(self) -> int:
        """Bytes of keys and values in flight between context ranks."""
        cp, piece = self.piece.mesh.cp, self.piece
        if cp == 1:
            return 0
        blocks = {"ring": 3, "all_gather": cp + 1, "ulysses": 4}[piece.cp_method]
        return blocks * piece.tokens * self.kv_heads * (self.query + self.value) * piece.itemsize


class AttentionCore(NamedTuple):
    """What scaled dot-product attention saves besides its output, and its workspaces."""

    saved: list[Allocation]
    forward: int
    backward: int


def attention_core(shape: AttentionShape) -> AttentionCore:
    """By the kernel that computes it (kernels/attention)."""
    piece = shape.piece
    is_flash = piece.device == "cuda" and piece.dtype == "bfloat16"
    if is_flash or piece.document_mask or (piece.mesh.cp > 1 and not shape.is_exchanged):
        return _partial_attention(shape, is_flash=is_flash)
    if shape.query == shape.value and (piece.device == "cpu" or (piece.dtype == "float32" and not piece.deterministic)):
        return _torch_attention(shape)
    return _eager_attention(shape)


def _partial_attention(shape: AttentionShape, *, is_flash: bool) -> AttentionCore:
    """Blocks of a sequence, merged by their log-sum-exps: flash attention on a GPU, else products in float32."""
    piece = shape.piece
    saved = [
        Allocation("queries, keys and values", "F-B", shape.saved_inputs),
        Allocation("log-sum-exps", "F-B", shape.log_sum_exps),
    ]
    if shape.is_exchanged or not is_flash:
        saved.append(Allocation("output", "F-B", shape.output))
    is_split = piece.mesh.cp > 1 and not shape.is_exchanged
    merged = is_split * piece.tokens * shape.heads * shape.value * piece.wide
    gradient_blocks = {"ring": 2, "all_gather": 3, "ulysses": 1}[piece.cp_method]  # gradients in flight are float32
    forward = _padded_values(shape) if is_flash else 4 * shape.scores * piece.wide
    backward = _flash_backward(shape) if is_flash else 4 * shape.scores * piece.wide
    return AttentionCore(saved, forward + shape.transfers + merged, backward + gradient_blocks * shape.transfers)


def _torch_attention(shape: AttentionShape) -> AttentionCore:
    """torch's own fused kernel, in an autograd graph."""
    saved = [
        Allocation("queries, keys and values", "F-B", shape.saved_inputs),
        Allocation("log-sum-exps", "F-B", shape.log_sum_exps, offload=False),
    ]
    if shape.is_exchanged:
        saved.append(Allocation("output", "F-B", shape.output))
    return AttentionCore(saved, shape.transfers, shape.transfers)


def _eager_attention(shape: AttentionShape) -> AttentionCore:
    """Scores and probabilities in an autograd graph."""
    piece = shape.piece
    is_view = shape.is_exchanged and piece.itemsize == piece.wide  # values are in rows already
    graph = piece.tokens * shape.heads * (2 * shape.query + (0 if is_view else shape.value)) + shape.scores
    saved = [
        Allocation("queries, keys and values", "F-B", shape.saved_inputs),
        Allocation("scaled queries and keys, values, probabilities", "F-B", graph * piece.wide, offload=False),
        Allocation("output", "F-B", shape.output),
    ]
    workspace = 4 * shape.scores * piece.wide
    return AttentionCore(saved, workspace + shape.transfers, workspace)


def _padded_values(shape: AttentionShape) -> int:
    """Values and output in columns of a query's width, the only ones that flash attention takes."""
    piece = shape.piece
    is_flash_attn = piece.deterministic or piece.document_mask or piece.slices > 1
    if not is_flash_attn or shape.query == shape.value:
        return 0
    return 2 * piece.tokens * shape.heads * shape.query * piece.itemsize


def _flash_backward(shape: AttentionShape) -> int:
    """dq in float32, in as many parts as keep all processors busy, and gradients of keys and values for every query
    head."""
    piece = shape.piece
    parts = -(-PROCESSORS // (piece.rows * shape.heads)) if piece.deterministic else 1
    queries = piece.tokens * shape.heads * shape.query
    kv_gradients = 2 * queries * piece.itemsize if shape.kv_heads < shape.heads else 0
    return parts * queries * BYTES["float32"] + kv_gradients + _padded_values(shape)
