"""A piece of a rank's work (a slice of a microbatch), and the tensors that a stage allocates for it, in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

from pentad.schedules.passes.recompute import is_row_wise, recomputed_parts, saved_rows
from pentad.schedules.simulate.rates import KernelChoice
from pentad.schedules.spec.cp_layout import CpMethod
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import Fp8Spec, ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import LayerRange

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
INDEX = 8  # bytes of an int64
FP8_TILE = 128

# The operation that a workspace lives in, or the operations that allocate and free a tensor.
Life = Literal["F", "B", "W", "F-B", "F-W", "B-W"]


def wide_bytes(dtype: str) -> int:
    """Bytes of an element of statistics, sums, main gradients and optimizer state with this compute dtype."""
    return max(BYTES[dtype], BYTES["float32"])


class Piece(NamedTuple):
    """`rows` sequences of `length` positions each on a cp rank, one of `slices` of a microbatch. `fp8` says which
    products are in FP8 (None: none), and `gpu` names the GPU ('': the assumed one). `recompute_fraction` is the share
    of rows that row-wise parts of layers recompute; logits are made in chunks of `logit_rows` (0: all are kept).
    `expert_slots`, `zero_shards` and `kernels` are as in Plan."""

    rows: int
    length: int
    dtype: str
    device: str = "cpu"
    slices: int = 1
    mesh: Mesh = Mesh()
    cp_method: CpMethod = "ring"
    document_mask: bool = False
    deterministic: bool = True
    fp8: Fp8Spec | None = None
    gpu: str = ""
    recompute_fraction: float = 1.0
    logit_rows: int = 0
    expert_slots: int = 0
    zero_shards: int = 0
    kernels: KernelChoice = KernelChoice()

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def sequence_parallel_tokens(self) -> int:
        return self.tokens // self.mesh.tp

    @property
    def saved_rows(self) -> int:
        """How many of this rank's rows are saved in recomputed row-wise parts."""
        return saved_rows(self.sequence_parallel_tokens, self.recompute_fraction)

    @property
    def rest(self) -> Piece:
        """The piece with only the rows that are recomputed, as tp ranks exchange them."""
        return self._replace(rows=1, length=self.tokens - self.saved_rows * self.mesh.tp)

    def saved_of(self, size: int, parts: Collection[str]) -> int:
        """The part of `size` (bytes, or anything proportional to rows) that F saves although RECOMPUTE of these parts
        of a layer can make it."""
        return size * self.saved_rows // self.sequence_parallel_tokens if is_row_wise(parts) else 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the compute dtype."""
        return BYTES[self.dtype]

    @property
    def wide(self) -> int:
        return wide_bytes(self.dtype)

    @property
    def is_gathered(self) -> bool:
        """Whether tp ranks gather all tokens before a product, and so have a copy of its input."""
        return self.mesh.tp > 1

    def stream(self, hidden: int) -> int:
        """Bytes of this rank's part of the residual stream."""
        return self.sequence_parallel_tokens * hidden * self.itemsize

    def full_stream(self, hidden: int) -> int:
        return self.tokens * hidden * self.itemsize

    def of_layer(self, layer: int, layers: int) -> Piece:
        """The piece in layer number `layer` of `layers`: without FP8 if its products are not in FP8."""
        return self if self.fp8 is None or self.fp8.covers(layer, layers) else self._replace(fp8=None)

    def of_network(self, has_experts: bool) -> Piece:
        """The piece in a feed-forward network. The input of experts is not cast by its norm, as the router reads it
        too."""
        return self._replace(fp8=None) if has_experts else self

    @property
    def keeps_operands(self) -> bool:
        """Whether W reads the tensors of F and B as they are, neither gathered copies nor casts."""
        return not self.is_gathered and self.fp8 is None

    @property
    def norm_casts(self) -> bool:
        """Whether a norm casts this rank's rows, which tp ranks then gather in FP8; these must be whole tiles."""
        is_cut = self.is_gathered and self.sequence_parallel_tokens % FP8_TILE != 0
        return self.fp8 is not None and self.fp8.scaling != "row" and not is_cut

    def cast(self, width: int) -> int:
        """Bytes of an operand of W [width, T] in FP8 with its scales; 0 without FP8."""
        if self.fp8 is None:
            return 0
        scales = {"tensor": 1, "row": width, "block": width * self.tokens // FP8_TILE}[self.fp8.scaling]
        return self.tokens * width + scales * BYTES["float32"]

    def operand(self, width: int) -> int:
        """Bytes that W reads of a tensor [T, width]."""
        return self.cast(width) or self.tokens * width * self.itemsize

    @property
    def casts_experts(self) -> bool:
        return self.fp8 is not None and self.fp8.experts

    @property
    def of_shared_experts(self) -> Piece:
        """The piece in the products of shared experts."""
        return self if self.fp8 is None or self.fp8.shared_experts else self._replace(fp8=None)

    @property
    def of_head(self) -> Piece:
        """The piece in the products of the output head."""
        return self if self.fp8 is None or self.fp8.head else self._replace(fp8=None)

    def expert_rows(self, rows: int, width: int) -> int:
        """Bytes of rows [rows, width] of the experts' products."""
        return sum(self.expert_tensors(rows, width))

    def expert_tensors(self, rows: int, width: int) -> tuple[int, ...]:
        """Bytes of the tensors of these rows: in FP8 values, and a scale for every 128 of them."""
        if self.casts_experts:
            return rows * width, rows * width // FP8_TILE * BYTES["float32"]
        return (rows * width * self.itemsize,)

    @property
    def logit_chunks(self) -> Counter[int]:
        """The chunks of logits by number of rows, as many from every tp rank; empty if logits are kept."""
        if not self.logit_rows:
            return Counter()
        tp, own = self.mesh.tp, self.tokens // self.mesh.tp
        step = max(1, self.logit_rows // tp)
        return Counter({tp * step: own // step}) + Counter([tp * (own % step)] if own % step else [])

    def copy(self, hidden: int) -> int:
        """Bytes of a gathered stream; 0 without tp."""
        return self.is_gathered * self.full_stream(hidden)


class Allocation(NamedTuple):
    """A tensor, or several with the sizes `tensors`. F does not save it if one of these `parts` of a layer
    (schedules/passes/recompute.py) is recomputed. OFFLOAD leaves it if `offload` is false."""

    what: str
    life: Life
    bytes: int
    offload: bool = True
    parts: tuple[str, ...] = ()
    tensors: tuple[int, ...] = ()


class Totals(NamedTuple):
    """Sums of allocations: held from F to B or W (`saved`, part of which may be recomputable, not offloadable, or
    `reused` by W), held from B or F to W (`deferred`), and the largest workspace of F, B and W. `recomputable` is keyed
    by the parts of a layer, any of which makes it; `largest_rows` is the largest allocation that row-wise parts make.
    """

    saved: int
    recomputable: dict[tuple[str, ...], int]
    largest_rows: int
    not_offloadable: int
    reused: int
    deferred: int
    forward: int
    backward: int
    weight: int

    def recomputed(self, mode: str, piece: Piece) -> int:
        """Bytes that F does not save in this recomputation mode, which is not 'full'."""
        parts = recomputed_parts(mode)
        found = ((each, size) for each, size in self.recomputable.items() if not parts.isdisjoint(each))
        return sum(size - piece.saved_of(size, each) for each, size in found)


def total(allocations: Iterable[Allocation]) -> Totals:
    found = list(allocations)
    size = {life: sum(each.bytes for each in found if each.life == life) for life in ("F-B", "F-W", "B-W")}
    most = {op: max((each.bytes for each in found if each.life == op), default=0) for op in ("F", "B", "W")}
    recomputable = dict.fromkeys((each.parts for each in found if each.parts), 0)
    for each in found:
        if each.parts:
            recomputable[each.parts] += each.bytes
    return Totals(
        saved=size["F-B"] + size["F-W"],
        recomputable=recomputable,
        largest_rows=max((each.bytes for each in found if each.parts and is_row_wise(each.parts)), default=0),
        not_offloadable=sum(each.bytes for each in found if not each.offload),
        reused=size["F-W"],
        deferred=size["F-W"] + size["B-W"],
        forward=most["F"],
        backward=most["B"],
        weight=most["W"],
    )


def piece_of(plan: Plan) -> Piece:
    length = plan.batch.sequence_length // plan.program.slices // plan.mesh.cp
    rows = plan.batch.micro_batch_size
    if plan.batch.capacity:  # one sequence of the tokens that a rank can hold
        rows, length = 1, plan.batch.capacity
    sizes = rows, length, plan.dtype, plan.device, plan.program.slices
    mask, fraction, chunk = plan.data.document_mask, plan.recompute_fraction, plan.logit_rows
    found = Piece(*sizes, plan.mesh, plan.cp_method, mask, plan.deterministic, plan.fp8, plan.gpu, fraction, chunk)
    return found._replace(expert_slots=plan.expert_slots, zero_shards=plan.zero_shards, kernels=plan.kernels)


class LayerTraits(NamedTuple):
    """What the sizes of a layer depend on. `is_covered`: its products are in FP8 if the piece's are."""

    has_experts: bool
    has_window: bool
    is_covered: bool


def traits_of(model: ModelSpec, held: LayerRange, piece: Piece) -> tuple[LayerTraits, ...]:
    """The traits of each layer."""
    return tuple(
        LayerTraits(
            number >= model.dense_layers, model.window(number) > 0, piece.of_layer(number, model.layers) is piece
        )
        for number in held.numbers
    )
