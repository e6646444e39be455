"""F, B and W of a user's torch modules: autograd runs from the result to the input, and weight GEMMs are left to W.

A layer sees its parameters as `DeferringWeight`s. If one is the weight of torch.nn.functional.linear or embedding, B
computes only the gradient of the input, and leaves a LinearWgrad or EmbeddingWgrad to W. Every other use is
differentiated in B, and W adds the gradients.
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

from pentad.workers.linear.weight_grad import AddWgrad, EmbeddingWgrad, LinearWgrad, Params, Wgrad
from pentad.workers.model.base_stage import storage_id


class BoundParameters(NamedTuple):
    """Parameters and their autograd leaves by name; the weights share one storage, from element `offset` on."""

    params: Params
    leaves: dict[str, Tensor]
    storage: int
    offset: int


class GraphOutput(NamedTuple):
    """Where B starts: a result without its memory. `edge` is None if the result depends on no parameter or input."""

    edge: GradientEdge | None
    shape: torch.Size
    dtype: torch.dtype


class ParameterOwner:
    """Holds the parameters of a stage, wherever they are at present, and the tape of the slice running its forward."""

    bound: BoundParameters
    tape: Tape | None = None


class Tape:
    """What the forward of one slice saves for B, and the work that B leaves to W.

    Weights are not saved but looked up again, because they may have moved by then (ZeRO-3).
    """

    def __init__(self, owner: ParameterOwner) -> None:
        self.owner, self.leaves = owner, owner.bound.leaves
        self.saved: list[Tensor] = []
        self.work: list[Wgrad] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records a forward."""
        self.owner.tape = self
        try:
            with torch.enable_grad(), saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self.owner.tape = None

    def backward(self, x: Tensor | None, output: GraphOutput, dy: Tensor) -> Tensor | None:
        """Runs B: returns the gradient of x, if any; fills `work` and frees the graph."""
        self.saved.clear()
        if output.edge is None:
            return None if x is None else torch.zeros_like(x)
        inputs = [*self.leaves.values(), *([] if x is None else [x])]
        grads = torch.autograd.grad([output.edge], inputs, [dy.view(output.shape)], allow_unused=True)
        for name, gradient in zip(self.leaves, grads, strict=False):
            if gradient is not None:
                self.work.append(AddWgrad(self.owner.bound.params[name].gradient, gradient))
        if x is None:
            return None
        return torch.zeros_like(x) if grads[-1] is None else grads[-1]

    def _pack(self, tensor: Tensor) -> Any:
        bound = self.owner.bound
        if storage_id(tensor) == bound.storage:
            return tensor.storage_offset() - bound.offset, tensor.shape, tensor.stride()
        self.saved.append(tensor)
        return tensor, tensor._version

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed[0], Tensor):
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError("a tensor that the backward needs was changed in place after its use")
            return tensor
        offset, size, stride = packed
        bound = self.owner.bound
        return next(iter(bound.params.values())).weight.as_strided(size, stride, bound.offset + offset)


class DeferringWeight(Tensor):
    """A parameter as a layer sees it: a leaf of the graph, unless its gradient is left to W."""

    param_name: str
    owner: ParameterOwner

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _call(func, args, kwargs or {})


class DeferringMode(TorchFunctionMode):
    """The same for fake tensors, which cannot be `DeferringWeight`s."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})


def graph_output(result: Tensor) -> GraphOutput:
    return GraphOutput(get_gradient_edge(result) if result.requires_grad else None, result.shape, result.dtype)


def bind_parameters(params: Params, owner: ParameterOwner, *, fake: bool = False) -> BoundParameters:
    """Creates autograd leaves for parameters whose weights share one storage; plain tensors for `fake` ones."""
    leaves: dict[str, Any] = {}
    for name, (weight, *_) in params.items():
        leaf: Any = weight.detach() if fake else weight.detach().as_subclass(DeferringWeight)
        leaf.param_name, leaf.owner = name, owner
        leaves[name] = leaf.requires_grad_()
    if not params:
        return BoundParameters({}, {}, 0, 0)
    first = min((each.weight for each in params.values()), key=Tensor.storage_offset)
    return BoundParameters(params, leaves, storage_id(first), int(first.storage_offset()))


def operands(item: Wgrad) -> dict[str, Tensor]:
    """The tensors that W reads besides the gradient, by field."""
    return {name: x for name, x in item._asdict().items() if name != "gradient" and isinstance(x, Tensor)}


def copy_from(storages: set[int], item: Wgrad) -> Wgrad:
    """The same work for W, with copies of its operands in these storages, which transfers reuse after B."""
    copies: dict[str, Any] = {name: x.clone() for name, x in operands(item).items() if storage_id(x) in storages}
    return item._replace(**copies)


def _call(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    if func in _DEFERRED and torch.is_grad_enabled():
        result = _DEFERRED[func](*args, **kwargs)
        if result is not NotImplemented:
            return result
    return func(*args, **kwargs)


class _Linear(Function):
    """A linear layer whose weight gradient is left to W. Weight and bias are inputs only so that autograd reaches this
    function: their gradients are None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any) -> Tensor:
        params = weight.owner.bound.params
        ctx.tape, ctx.weight, ctx.bias = weight.owner.tape, weight.param_name, None if bias is None else bias.param_name
        ctx.save_for_backward(x)
        return F.linear(x, params[ctx.weight].weight, None if bias is None else params[ctx.bias].weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,), tape, params = ctx.saved_tensors, ctx.tape, ctx.tape.owner.bound.params
        weight, gradient, _ = params[ctx.weight]
        flat_dy = dy.reshape(-1, dy.shape[-1]).contiguous()
        flat_x = x.detach().reshape(-1, x.shape[-1]).contiguous()
        tape.work.append(LinearWgrad(gradient, flat_dy, flat_x))
        if ctx.bias is not None:
            tape.work.append(AddWgrad(params[ctx.bias].gradient, flat_dy.sum(0, dtype=gradient.dtype)))
        dx = torch.mm(flat_dy, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, None, None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Any) -> Tensor:
        ctx.tape, ctx.weight, ctx.tokens = weight.owner.tape, weight.param_name, tokens
        return F.embedding(tokens, weight.owner.bound.params[ctx.weight].weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        gradient = ctx.tape.owner.bound.params[ctx.weight].gradient
        rows = dy.reshape(-1, dy.shape[-1]).contiguous()
        ctx.tape.work.append(EmbeddingWgrad(gradient, rows, ctx.tokens.reshape(-1)))
        return None, None


def _tape(tensor: Any) -> Tape | None:
    """The tape that is recording, if this tensor is a parameter; else None."""
    owner = getattr(tensor, "owner", None)
    return owner.tape if isinstance(owner, ParameterOwner) else None


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    tape = _tape(weight)
    if tape is None or weight.dim() != 2 or _tape(input) or (bias is not None and _tape(bias) is not tape):
        return NotImplemented
    return _Linear.apply(input, weight, bias)


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
    return NotImplemented if special or _tape(weight) is None else _Embedding.apply(input, weight)


_DEFERRED: dict[Callable[..., Any], Callable[..., Any]] = {F.linear: _linear, F.embedding: _embedding}
