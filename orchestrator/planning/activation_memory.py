"""Bytes that one piece takes in half a layer: what F keeps for B, what B keeps for W, and what is there for a moment.

T tokens of a piece, t of them in this rank's part of the residual stream, H hidden, N heads and M key-value heads of
this rank, D width of a query and E of a value, I ffn of this rank; T' tokens of an expert-parallel group, R rows of its
experts here.
"""

from __future__ import annotations

from typing import NamedTuple

from pentad.schedules.spec.cp_layout import CpMethod
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import MLA, Experts, ModelShape
from pentad.schedules.spec.plan import Plan

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
INDEX = 8  # bytes of an int64
PROCESSORS = 132  # of a Hopper GPU: deterministic flash attention adds up dq in so many parts at most
WIDEST = 256  # head of the fused kernels


class Piece(NamedTuple):
    """What goes through a rank's stage at once: `rows` sequences with `length` positions each, in one of `slices`."""

    rows: int
    length: int
    dtype: str
    device: str = "cpu"
    slices: int = 1
    mesh: Mesh = Mesh()
    context: CpMethod = "ring"
    packed: bool = False
    deterministic: bool = True

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def part(self) -> int:
        return self.tokens // self.mesh.tp

    @property
    def compute(self) -> int:
        return BYTES[self.dtype]

    @property
    def main(self) -> int:
        return max(self.compute, BYTES["float32"])

    @property
    def is_fusable(self) -> bool:
        return self.device == "cuda" and self.dtype == "bfloat16"

    @property
    def is_late(self) -> bool:
        """Whether in B half a layer is behind it before the first operation between ranks is."""
        return self.mesh.cp > 1 and self.mesh.tp * self.mesh.ep == 1

    @property
    def gathered(self) -> int:
        """1 where tensor ranks make a second copy of a stream, of all tokens."""
        return int(self.mesh.tp > 1)


class Half(NamedTuple):
    """Bytes. `roots` and `leaves` are what B needs of F, as recompute tells them apart; `still` is what of the roots no
    OFFLOAD takes. `deferred` is what W needs of B: `shared` of it F had kept already, `given` of it is the gradient
    that came in, where that is kept as it came. `forward`, `backward` and `weight` are there for a moment besides.
    `pairs` are the elements of keys and values that slices share."""

    roots: int
    leaves: int
    still: int
    deferred: int
    shared: int
    given: int
    forward: int
    backward: int
    weight: int = 0
    pairs: int = 0


class Attended(NamedTuple):
    """Of an attention: bytes that B needs besides its heads' output, what of them no OFFLOAD takes, and workspaces of
    both directions."""

    kept: int
    still: int
    forward: int
    backward: int


def piece_of(plan: Plan) -> Piece:
    length = plan.batch.length // plan.program.slices // plan.mesh.cp
    sizes = plan.batch.rows, length, plan.dtype, plan.device, plan.program.slices
    return Piece(*sizes, plan.mesh, plan.cp_method, plan.document_mask, plan.deterministic)


def attention(model: ModelShape, piece: Piece) -> Half:
    """Queries, keys and values in one tensor."""
    tokens, hidden, width, c = piece.tokens, model.hidden, model.qk_head_dim, piece.compute
    heads, pairs = model.heads // piece.mesh.tp, max(1, model.kv_heads // piece.mesh.tp)
    every, out, stream = (heads + 2 * pairs) * width, heads * width, tokens * hidden * c
    apart = (heads + 2 * max(pairs, piece.mesh.cp)) * width  # where context ranks exchange them
    of = _attended(piece, heads, pairs, (width, width), every, apart)
    normed = model.qk_norm * tokens * (heads + pairs)
    again = piece.gathered * stream
    return Half(
        roots=tokens * out * c + of.kept + normed * (width * c + piece.main),
        leaves=0,
        still=of.still + normed * piece.main,
        deferred=2 * stream + tokens * (out + every) * c + model.qk_norm * 2 * width * piece.main,
        shared=tokens * out * c + (stream - again),
        given=stream - again,
        forward=again + max(again + stream, of.forward),
        backward=max(of.backward + tokens * (out + every) * c, again + piece.part * hidden * c),
        pairs=2 * tokens * pairs * width,
    )


def latent(model: ModelShape, of: MLA, piece: Piece) -> Half:
    """Keys and values from a vector a token, which is gathered; what comes before it is made where tokens are."""
    tokens, part, hidden, c, m = piece.tokens, piece.part, model.hidden, piece.compute, piece.main
    heads, width, again = model.heads // piece.mesh.tp, of.qk_nope_head_dim + of.qk_rope_head_dim, piece.gathered
    queries, both, out = heads * width, heads * (of.qk_nope_head_dim + of.v_head_dim), heads * of.v_head_dim
    mixed = _attended(piece, heads, heads, (width, of.v_head_dim), 2 * queries + both, 2 * queries + out)
    narrow = of.kv_lora_rank + of.q_lora_rank
    scales = part * m * (1 + bool(of.q_lora_rank))
    stream, norms = tokens * hidden * c, narrow * m
    # what the products read: narrow vectors of all tokens, and the normed stream where these are made
    reads = tokens * narrow * c + part * hidden * c
    if not of.q_lora_rank and again:
        reads += stream
    return Half(
        roots=tokens * out * c + mixed.kept + 2 * part * narrow * c + scales,
        leaves=0,
        still=mixed.still + scales,
        deferred=stream
        + tokens * (out + both + queries) * c
        + part * (narrow + of.qk_rope_head_dim) * c
        + reads
        + norms,
        shared=tokens * out * c + (part * hidden * c if again else reads),
        given=stream * (1 - again),
        forward=mixed.forward + tokens * (narrow + of.qk_rope_head_dim) * c + again * stream,
        backward=mixed.backward + tokens * (2 * queries + 2 * out) * c + again * stream,
        pairs=tokens * heads * (width + of.v_head_dim),
    )


def gated(hidden: int, ffn: int, piece: Piece) -> Half:
    tokens, c, again = piece.tokens, piece.compute, piece.gathered
    width, stream = ffn // piece.mesh.tp, piece.tokens * hidden * c
    own = piece.part * hidden * c
    return Half(
        roots=0,
        leaves=2 * tokens * width * c,
        still=0,
        deferred=2 * stream + 3 * tokens * width * c,
        shared=stream * (1 - again),
        given=stream * (1 - again),
        forward=own + tokens * width * c + again * stream,
        backward=max(tokens * width * c, own + again * stream),
    )


def experts(hidden: int, of: Experts, piece: Piece) -> Half:
    """As many rows as there can be: where a group gathers its tokens there is room for them, and where it exchanges
    them (on CPUs) no more than these come."""
    tokens, c, m, ep, again = piece.tokens, piece.compute, piece.main, piece.mesh.ep, piece.gathered
    held, width, beside = (
        of.num_experts // ep,
        of.intermediate_size // piece.mesh.tp,
        of.shared_intermediate_size // piece.mesh.tp,
    )
    came = ep * tokens
    rows, stream, alone = came * min(of.top_k, held), tokens * hidden * c, ep == 1
    far = 0 if alone else came * hidden * c
    routed = tokens * of.num_experts * m + tokens * of.top_k * m
    counted = of.num_experts * INDEX * (1 + (of.aux_loss_coef > 0 and piece.mesh.cp > 1))
    arranged = rows * (INDEX + m) + came * of.top_k * INDEX + held * 4
    still = tokens * of.top_k * INDEX + counted + arranged
    numbers = rows * INDEX + held * 4
    given = stream * (alone or of.shared_intermediate_size > 0)
    return Half(
        roots=routed + still + far,
        leaves=2 * rows * width * c + 2 * tokens * beside * c,
        still=still,
        deferred=3 * (rows * width + tokens * beside) * c
        + tokens * of.num_experts * c
        + numbers
        + 2 * far
        + given
        + stream,
        shared=numbers + far + stream * (1 - again),
        given=given * (1 - again),
        forward=again * stream + max(rows * hidden, rows * (hidden + width) + came * hidden) * c,
        backward=(rows * (hidden + width) + came * hidden) * c + again * stream,
        weight=rows * hidden * c,
    )


def _attended(piece: Piece, heads: int, pairs: int, widths: tuple[int, int], every: int, apart: int) -> Attended:
    """`every` elements a token are those of what queries, keys and values are parts of, `apart` where these are
    exchanged for heads of whole sequences; `widths` are of a query and of a value."""
    tokens, c, m = piece.tokens, piece.compute, piece.main
    query, value = widths
    exchanged = piece.mesh.cp > 1 and piece.context == "ulysses"
    whole = piece.mesh.cp == 1 or exchanged
    sums, out = heads * m, heads * value * c
    inputs = (apart if exchanged else every) * c
    seen = heads * piece.length * piece.slices * piece.mesh.cp  # of a token
    written = 4 * seen * m
    moved = pairs * (query + value) * c  # keys and values on their way between context ranks
    around = (
        0 if piece.mesh.cp == 1 else {"ring": 3, "all_gather": piece.mesh.cp + 1, "ulysses": 4}[piece.context] * moved
    )
    if piece.is_fusable or piece.packed or not whole:  # blocks that stand in no graph
        again = out if exchanged or not piece.is_fusable else 0
        merged = 0 if whole else heads * value * m
        back = {"ring": 2, "all_gather": 3, "ulysses": 1}[piece.context] * around  # what moves has sums in float32
        forward = _padded(piece, heads, widths) if piece.is_fusable else written
        backward = _workspace(piece, heads, pairs, widths) if piece.is_fusable else written
        kept = tokens * (inputs + sums + again)
        return Attended(kept, 0, tokens * (forward + around + merged), tokens * (backward + back))
    if query == value and (piece.device == "cpu" or (piece.dtype == "float32" and not piece.deterministic)):
        again = out * exchanged
        return Attended(tokens * (inputs + sums + again), tokens * sums, tokens * around, tokens * around)
    values = 0 if exchanged and c == m else heads * value  # in rows already
    graph = (2 * heads * query + values + seen) * m
    return Attended(tokens * (inputs + graph + out), tokens * graph, tokens * (written + around), tokens * written)


def _padded(piece: Piece, heads: int, widths: tuple[int, int]) -> int:
    """Bytes a token of values and output in columns of a query's width, the one that flash attention takes."""
    query, value = widths
    has_flash = piece.deterministic or piece.packed or piece.slices > 1
    return 2 * heads * query * piece.compute if has_flash and query != value else 0


def _workspace(piece: Piece, heads: int, pairs: int, widths: tuple[int, int]) -> int:
    """Bytes a token of what the backward pass of a fused attention has for a moment: what dq is added up in, as many
    parts as keep the processors busy, and a gradient of keys and values for every query head."""
    parts = -(-PROCESSORS // (piece.rows * heads)) if piece.deterministic else 1
    apart = 2 * heads * widths[0] * piece.compute if pairs < heads else 0
    return parts * heads * widths[0] * BYTES["float32"] + apart + _padded(piece, heads, widths)
