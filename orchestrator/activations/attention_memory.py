"""What scaled dot-product attention allocates for one piece, and with which kernel (kernels/attention)."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from pentad.orchestrator.activations.allocations import BYTES, Allocation, Piece
from pentad.schedules.spec.model import ModelSpec

# Of queries and values, as in kernels/attention/attention_partial.py, on GPUs with the shared memory of an A100 or
# more.
TRITON_HEAD_DIMS, MAX_HEAD_DIM = {(32, 32), (64, 64), (128, 128), (192, 128), (256, 256)}, 256
# For cuDNN's deterministic backward, as in kernels/attention/attention_cudnn.py.
CUDNN_HEAD_DIM, CUDNN_WIDE_HEAD_DIMS, CUDNN_TILE, CUDNN_WORKSPACE = 128, {(192, 128), (256, 256)}, 128, 2 * 2**30
PROCESSORS = 132  # of a Hopper GPU: deterministic flash attention sums dq in at most this many parts


class AttentionShape(NamedTuple):
    """Heads of this rank and their widths. `inputs` are the bytes of the tensors that contain queries, keys and values;
    `nope` is the width of the unrotated part of keys, if keys have parts (MLA)."""

    piece: Piece
    heads: int
    kv_heads: int
    query: int
    value: int
    inputs: int
    nope: int = 0

    @property
    def is_exchanged(self) -> bool:
        """Whether ranks hold entire sequences of fewer heads (Ulysses)."""
        return self.piece.mesh.cp > 1 and self.piece.cp_method == "ulysses"

    @property
    def exchanged(self) -> int:
        """Elements of queries, keys and values that ranks exchange with Ulysses, at least one key-value head each."""
        kv_heads = max(self.kv_heads, self.piece.mesh.cp)
        return self.piece.tokens * (self.heads * self.query + kv_heads * (self.query + self.value))

    @property
    def tensors(self) -> tuple[int, ...]:
        """Bytes of the tensors of queries, keys and values, or of those that are exchanged, if there are several."""
        unit = self.piece.tokens * self.piece.itemsize
        if self.is_exchanged:
            kv_heads = max(self.kv_heads, self.piece.mesh.cp)
            return unit * self.heads * self.query, unit * kv_heads * self.query, unit * kv_heads * self.value
        queries = unit * self.heads * self.query
        return (queries, queries, self.inputs - 2 * queries) if self.nope else ()

    @property
    def keys_values(self) -> int:
        """Elements of keys and values."""
        return self.piece.tokens * self.kv_heads * (self.query + self.value)

    @property
    def output(self) -> int:
        """Bytes of the heads' output."""
        return self.piece.tokens * self.heads * self.value * self.piece.itemsize

    @property
    def kernel_sizes(self) -> tuple[int, ...]:
        """The sizes, as in KernelTimes."""
        cp = self.piece.mesh.cp if self.is_exchanged else 1
        heads = self.heads // cp, max(1, self.kv_heads // cp)
        return self.piece.rows, self.piece.length * cp, *heads, self.query, self.value

    def kernel_op(self, *, backward: bool) -> str:
        """The op, as in KernelTimes."""
        phase = "_backward" * backward + "_deterministic" * (backward and self.piece.deterministic)
        return f"{'packed_' * self.piece.document_mask}attention{phase}"


def attention_shape(model: ModelSpec, piece: Piece) -> AttentionShape:
    heads, query, mla = model.heads // piece.mesh.tp, model.qk_head_dim, model.mla
    nope = 0 if mla is None else mla.qk_nope_head_dim
    if mla is None:
        kv_heads, value = max(1, model.kv_heads // piece.mesh.tp), query
        inputs = heads * query + kv_heads * 2 * query
    else:  # keys have two parts
        kv_heads, value = heads, mla.v_head_dim
        inputs = heads * (2 * query + mla.qk_nope_head_dim + value)
    return AttentionShape(piece, heads, kv_heads, query, value, piece.tokens * inputs * piece.itemsize, nope)


def attention_core(
    shape: AttentionShape, *, is_plain: bool = True, has_softcap: bool = False
) -> tuple[list[Allocation], int, int]:
    """(what scaled dot-product attention saves, bytes of its workspace in F, and in B), for the kernel that computes
    it. `is_plain` attention has no windows, soft caps or sinks."""
    piece, cp, is_exchanged = shape.piece, shape.piece.mesh.cp, shape.is_exchanged
    is_split, is_graph = cp > 1 and not is_exchanged, False
    forward_kernel, backward_kernel = (
        _kernel(shape, is_plain=is_plain, has_softcap=has_softcap, backward=each) for each in (False, True)
    )
    is_gpu_kernel = forward_kernel != "torch"
    is_reference = piece.device == "cuda" and piece.kernels.name == "torch"
    is_blocks = is_split or piece.document_mask or not is_plain or is_reference
    is_fused = piece.device == "cpu" or (piece.dtype == "float32" and not piece.deterministic)
    inputs = shape.exchanged * piece.itemsize if is_exchanged else shape.inputs
    log_sum_exps = other = Allocation("log-sum-exps", "F-B", piece.tokens * shape.heads * piece.wide)
    scores = piece.tokens * shape.heads * piece.length * piece.slices * cp
    score_workspace = 4 * scores * piece.wide
    # keys and values in flight between cp ranks, as blocks
    blocks = {"ring": 3, "all_gather": cp + 1, "ulysses": 4}[piece.cp_method] if cp > 1 else 0
    forward = backward = blocks * shape.keys_values * piece.itemsize
    if is_gpu_kernel or is_blocks:
        # blocks of a sequence, merged by their log-sum-exps: by fused kernels on a GPU, else by products in float32
        saves_output = not is_gpu_kernel
        backward *= {"ring": 2, "all_gather": 3, "ulysses": 1}[piece.cp_method]  # gradients in flight are float32
        forward += is_split * piece.tokens * shape.heads * shape.value * piece.wide
        padded = _padded_values(shape) if forward_kernel == "flash" else 0
        forward += padded if is_gpu_kernel else score_workspace
        backward += _fused_backward(shape, backward_kernel) if is_gpu_kernel else score_workspace
    elif is_fused and shape.query == shape.value:
        # torch's own kernel, in an autograd graph
        is_graph, saves_output, other = True, False, log_sum_exps._replace(offload=False)
    else:
        # scores and probabilities in an autograd graph
        is_view = is_exchanged and piece.itemsize == piece.wide  # values are already in rows
        graph = piece.tokens * shape.heads * (2 * shape.query + (0 if is_view else shape.value)) + scores
        what = "scaled queries and keys, values, probabilities"
        is_graph, saves_output = True, True
        other = Allocation(what, "F-B", graph * piece.wide, offload=False)
        forward, backward = forward + score_workspace, score_workspace
    # A graph is rebuilt by computing the attention again; otherwise its result is kept, once.
    projections = "mla_up_proj" if shape.nope else "qkv_linear"
    again = ("core_attn", projections) if is_graph else ("core_attn",)
    is_apart = saves_output or is_exchanged
    saved = [
        Allocation("queries, keys and values", "F-B", inputs, parts=(projections,), tensors=shape.tensors),
        other._replace(parts=again),
        Allocation("output", "F-B", shape.output * is_apart, parts=again),
        Allocation(
            "heads' output",
            "F-W" if piece.fp8 is None else "F-B",
            shape.output,
            parts=("core_attn", projections) if is_apart else again,
        ),
    ]
    return saved, forward, backward


def _kernel(shape: AttentionShape, *, is_plain: bool, has_softcap: bool, backward: bool) -> str:
    """The kernel that runs, chosen as in kernels/attention/attention_partial.py."""
    piece, has_triton = shape.piece, _has_triton(shape)
    if piece.device != "cuda" or piece.dtype != "bfloat16" or (has_softcap and not has_triton):
        return "torch"
    in_order = backward and piece.deterministic
    is_cudnn = in_order_workspace(shape) > 0 if in_order else True
    serving = ["triton"] * has_triton
    if not has_softcap:
        serving.insert(0 if backward and not in_order and shape.value == MAX_HEAD_DIM else 1, "flash")
    if is_cudnn and _has_cudnn(piece, is_plain=is_plain):
        serving.insert(0, "cudnn")
    chosen = piece.kernels.name
    if chosen == "auto":
        op = shape.kernel_op(backward=backward)
        chosen = piece.kernels.of((op, *shape.kernel_sizes[2:])) if is_plain else ""
    return chosen if chosen in (*serving, "torch") else serving[0]


def _has_cudnn(piece: Piece, *, is_plain: bool) -> bool:
    """Whether cuDNN's kernels serve such calls."""
    return is_plain and not piece.document_mask and piece.slices == 1


def _has_triton(shape: AttentionShape) -> bool:
    """Whether our Triton kernels serve these head dims."""
    return (shape.query, shape.value) in TRITON_HEAD_DIMS


def _padded_values(shape: AttentionShape) -> int:
    """Bytes of values and output padded to the width of queries, as flash attention takes no other."""
    if shape.query == shape.value:
        return 0
    return 2 * shape.piece.tokens * shape.heads * shape.query * shape.piece.itemsize


def _fused_backward(shape: AttentionShape, kernel: str) -> int:
    """Bytes of dq in float32, and of gradients of keys and values for every query head. Deterministic flash attention
    has as many parts of dq as keep all processors busy. Our kernels have two terms for each query instead."""
    piece, queries = shape.piece, shape.piece.tokens * shape.heads * shape.query
    kv_gradients = 2 * queries * piece.itemsize if shape.kv_heads < shape.heads else 0
    if kernel == "cudnn":
        return in_order_workspace(shape) if piece.deterministic else queries * BYTES["float32"] + kv_gradients
    if kernel == "triton":
        return 2 * piece.tokens * shape.heads * BYTES["float32"]
    parts = -(-PROCESSORS // (piece.rows * shape.heads)) if piece.deterministic else 1
    return parts * queries * BYTES["float32"] + kv_gradients + _padded_values(shape)


def in_order_workspace(shape: AttentionShape, *, whole: bool = False) -> int:
    """Bytes that cuDNN's deterministic backward needs: the gradients of all probabilities of a call, and those of keys
    and values for every query head. 0 if it serves no call, or not that of a `whole` piece."""
    piece, widths = shape.piece, (shape.query, shape.value)
    is_served = max(widths) <= CUDNN_HEAD_DIM or widths in CUDNN_WIDE_HEAD_DIMS
    if not piece.kernels.cudnn_frontend or not is_served:
        return 0
    length, is_split = shape.kernel_sizes[1], piece.mesh.cp > 1 and not shape.is_exchanged
    halves = is_split and not whole  # blocks between ranks have half of the queries or keys
    return max(_workspace_of(shape, keys) for keys in (length, length // 2)[: 1 + halves])


def _workspace_of(shape: AttentionShape, keys: int) -> int:
    """Bytes for this many keys."""
    rows, queries, heads, kv_heads, *_ = shape.kernel_sizes
    group = heads // kv_heads
    probabilities = 2 * group * prod(-(-each // CUDNN_TILE) * CUDNN_TILE for each in (queries, keys))
    parts = _parts(rows, probabilities * kv_heads) * kv_heads or _parts(kv_heads, probabilities)
    gradients = BYTES["bfloat16"] * group * keys * (shape.query + shape.value) if group > 1 else 0
    return parts * (probabilities + gradients)


def _parts(number: int, size: int) -> int:
    """The most pieces of `size` bytes for which there is room, as a divisor of `number`; 0 if not even one fits."""
    return next((each for each in range(number, 0, -1) if number % each == 0 and each * size <= CUDNN_WORKSPACE), 0)
