"""F, B and W of somebody else's layers: autograd goes from result to input, and weight products wait for W.

A layer's parameters are `Weight`s. Where one is multiplied by (torch.nn.functional.linear) or looked up (embedding),
B computes the gradient of the input and leaves a Product or Lookup to W. All other uses are differentiated in B, which
leaves W their gradients to add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from pentad.workers.model.weight_grad import Deferred, Lookup, Product, Sum


class Bound(NamedTuple):
    """Weights, main gradients and what layers have for parameters, by name; the weights lie in one storage, from
    element `start` on."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    leaves: dict[str, Tensor]
    storage: int
    start: int


class End(NamedTuple):
    """Where B starts: a result without its memory. `edge` is missing where it depends on no parameter and no input."""

    edge: GradientEdge | None
    shape: torch.Size
    dtype: torch.dtype


class Owner:
    """Whose parameters they are: `now` is where their values are at present, `tape` that of the piece in F."""

    now: Bound
    tape: Tape | None = None


class Tape:
    """Of one piece: what its F has saved for B, and what B leaves to W.

    Weights are not saved but found again, for they may lie elsewhere by then (ZeRO 3).
    """

    def __init__(self, owner: Owner) -> None:
        self.owner, self.leaves = owner, owner.now.leaves
        self.anchor = torch.zeros((), requires_grad=True)  # so that B visits every product
        self.saved: list[Tensor] = []
        self.work: list[Deferred] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """F, with a graph."""
        self.owner.tape = self
        try:
            with torch.enable_grad(), saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self.owner.tape = None

    def backward(self, x: Tensor | None, end: End, dy: Tensor) -> Tensor | None:
        """B: the gradient of x, where there is one; `work` is what W has to do. The graph is used up."""
        self.saved.clear()
        if end.edge is None:
            return None if x is None else torch.zeros_like(x)
        given = [] if x is None else [x]
        inputs = [self.anchor, *self.leaves.values(), *given]
        found = torch.autograd.grad([end.edge], inputs, [dy.view(end.shape)], allow_unused=True)
        for name, gradient in zip(self.leaves, found[1:], strict=False):
            if gradient is not None:
                self.work.append(Sum(self.owner.now.gradients[name], gradient))
        if x is None:
            return None
        return torch.zeros_like(x) if found[-1] is None else found[-1]

    def _pack(self, tensor: Tensor) -> Any:
        bound = self.owner.now
        if storage_of(tensor) == bound.storage:
            return tensor.storage_offset() - bound.start, tensor.shape, tensor.stride()
        self.saved.append(tensor)
        return tensor, tensor._version

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed[0], Tensor):
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError("a tensor that B needs was changed in place after its use")
            return tensor
        offset, size, stride = packed
        bound = self.owner.now
        return next(iter(bound.weights.values())).as_strided(size, stride, bound.start + offset)


class Weight(Tensor):
    """A parameter as a layer sees it: a leaf of the graph, unless an operation leaves its gradient to W."""

    called: str
    owner: Owner

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _run(func, args, kwargs or {})


class Watch(TorchFunctionMode):
    """What `Weight` does, for tensors without memory, which can be no `Weight`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    if func in DEFERRED and torch.is_grad_enabled():
        found = DEFERRED[func](*args, **kwargs)
        if found is not NotImplemented:
            return found
    return func(*args, **kwargs)


def end_of(result: Tensor) -> End:
    return End(get_gradient_edge(result) if result.requires_grad else None, result.shape, result.dtype)


def weight(value: Tensor, name: str, owner: Owner, kind: type[Tensor] = Weight) -> Any:
    made: Any = value.detach() if kind is Tensor else value.detach().as_subclass(kind)
    made.called, made.owner = name, owner
    return made.requires_grad_()


def bound(weights: dict[str, Tensor], gradients: dict[str, Tensor], owner: Owner, kind: type[Tensor] = Weight) -> Bound:
    """`weights` share one storage; the leaves are plain tensors where `kind` is."""
    leaves = {name: weight(value, name, owner, kind) for name, value in weights.items()}
    first = min(weights.values(), key=Tensor.storage_offset, default=torch.empty(0))
    return Bound(weights, gradients, leaves, storage_of(first) if weights else 0, int(first.storage_offset()))


def storage_of(tensor: Tensor) -> int:
    """Tells storages apart, those without memory too."""
    return tensor.untyped_storage()._cdata


def without(slots: set[int], item: Deferred) -> Deferred:
    """The same work for W without memory in these storages: transfers use their slots again after B."""
    return item._replace(
        **{
            name: value.clone()
            for name, value in item._asdict().items()
            if name != "gradient" and isinstance(value, Tensor) and storage_of(value) in slots
        }
    )


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, tape: Tape, name: str, bias: str | None) -> Tensor:
        weights = tape.owner.now.weights
        ctx.tape, ctx.name, ctx.bias = tape, name, bias
        ctx.save_for_backward(x)
        return F.linear(x, weights[name], None if bias is None else weights[bias])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,), tape, now = ctx.saved_tensors, ctx.tape, ctx.tape.owner.now
        flat = dy.reshape(-1, dy.shape[-1]).contiguous()
        tape.work.append(Product(now.gradients[ctx.name], flat, x.detach().reshape(-1, x.shape[-1]).contiguous()))
        if ctx.bias is not None:
            gradient = now.gradients[ctx.bias]
            tape.work.append(Sum(gradient, flat.sum(0, dtype=gradient.dtype)))
        dx = torch.mm(flat, now.weights[ctx.name]).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, anchor: Tensor, tape: Tape, name: str) -> Tensor:
        ctx.tape, ctx.name, ctx.tokens = tape, name, tokens
        return F.embedding(tokens, tape.owner.now.weights[name])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        gradient = ctx.tape.owner.now.gradients[ctx.name]
        rows = dy.reshape(-1, dy.shape[-1]).contiguous()
        ctx.tape.work.append(Lookup(gradient, rows, ctx.tokens.reshape(-1)))
        return None, None, None, None


def _tape(tensor: Any) -> Tape | None:
    """Of the piece in F, for a parameter."""
    owner = getattr(tensor, "owner", None)
    return owner.tape if isinstance(owner, Owner) else None


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    tape = _tape(weight)
    if tape is None or weight.dim() != 2 or _tape(input) or (bias is not None and _tape(bias) is not tape):
        return NotImplemented
    return _Linear.apply(input, tape.anchor, tape, weight.called, None if bias is None else bias.called)


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    special = padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse
    tape = _tape(weight)
    if special or tape is None:
        return NotImplemented
    return _Embedding.apply(input, tape.anchor, tape, weight.called)


DEFERRED: dict[Callable[..., Any], Callable[..., Any]] = {F.linear: _linear, F.embedding: _embedding}
