"""FP8 products by definition, with autograd: the meaning of a recipe in a few lines of float64 torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pentad.schedules.spec.model import Fp8Spec

PROJECTIONS = ("attention.qkv", "attention.query", "attention.keys_values", "attention.out", "mlp.gate_up", "mlp.down")
EXPERTS = ("experts.gate_up", "experts.down")
SHARED = ("shared.gate_up", "shared.down")
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class AmaxHistory:
    """Delayed scaling: the absolute maxima of the operands of all products in the previous step and in this one, by
    name of the weight and kind of operand."""

    def __init__(self) -> None:
        self.before: dict[tuple[str, str], Tensor] = {}
        self.now: dict[tuple[str, str], Tensor] = {}

    def begin_step(self) -> None:
        """Called after a step whose maxima count."""
        self.before |= {key: amax for key, amax in self.now.items() if amax > 0}
        self.now.clear()

    def amax(self, key: tuple[str, str], x: Tensor) -> Tensor:
        """The maximum by which x is scaled."""
        own = x.detach().abs().amax().float()
        self.now[key] = torch.maximum(own, self.now.get(key, own))
        return self.before.get(key, own)


class Fp8Weight:
    """A weight [N, K] that `x @ weight.T` multiplies in FP8. With `by_row` its gradient is the product of the operands
    of these products; otherwise the operands are cast again, along tokens. `history` is that of weights of this name.
    """

    def __init__(
        self,
        weight: Tensor,
        spec: Fp8Spec,
        *,
        by_row: bool = False,
        name: str = "",
        history: AmaxHistory | None = None,
    ) -> None:
        self.weight, self.spec, self.by_row, self.name = weight, spec, by_row, name
        self.history = history if spec.delayed else None

    def amax(self, role: str, x: Tensor) -> Tensor | None:
        return None if self.history is None else self.history.amax((self.name, role), x)

    @property
    def T(self) -> Fp8Weight:
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        x, found = args
        y: Tensor = _Product.apply(x.flatten(0, -2), found.weight, found)
        return y.unflatten(0, x.shape[:-1])


class Fp8Experts:
    """The weights [E, N, K] of experts."""

    def __init__(self, weights: Tensor, spec: Fp8Spec) -> None:
        self.weights, self.spec = weights, spec

    def __getitem__(self, expert: int) -> Fp8Weight:
        return Fp8Weight(self.weights[expert], self.spec, by_row=True)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, given: Fp8Weight) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.given, ctx.amax, spec = given, given.amax("activation", x), given.spec
        return rounded(x, spec, "e4m3", 1, ctx.amax) @ rounded(weight, spec, "e4m3", 128).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), spec, amax = ctx.saved_tensors, ctx.given.spec, ctx.given.amax("gradient", dy)
        dx = rounded(dy, spec, spec.gradients, 1, amax) @ rounded(weight.T, spec, "e4m3", 128).T
        if ctx.given.by_row:
            return dx, rounded(dy, spec, spec.gradients, 1).T @ rounded(x, spec, "e4m3", 1), None
        dweight = rounded(dy.T, spec, spec.gradients, 1, amax) @ rounded(x.T, spec, "e4m3", 1, ctx.amax).T
        return dx, dweight, None


def rounded(x: Tensor, spec: Fp8Spec, name: str, block_rows: int, amax: Tensor | None = None) -> Tensor:
    """The numbers that a matrix [M, K] represents after the cast for a product over K; scaled by `amax` if given."""
    dtype = DTYPES[name]
    rows, columns = {"tensor": x.shape, "row": (1, x.shape[1]), "block": (block_rows, 128)}[spec.scaling]
    tiles = x.unfold(0, rows, rows).unfold(1, columns, columns)  # [M / rows, K / columns, rows, columns]
    limit = torch.finfo(dtype).max
    largest = tiles.abs().amax((2, 3), keepdim=True).float() if amax is None else amax.expand(1, 1, 1, 1)
    scale = largest * torch.tensor(1 / limit)
    scale = torch.where(scale == 0, 1, scale)
    if spec.power_of_two:
        scale = 2 ** torch.ceil(torch.log2(scale.double())).float()
    numbers = (tiles * (1 / scale).double()).clamp(-limit, limit).to(dtype).double() * scale.double()
    return numbers.transpose(1, 2).reshape(x.shape)


def in_8_bits(
    weights: dict[str, Tensor], spec: Fp8Spec, layers: int, history: AmaxHistory | None = None
) -> dict[str, Any]:
    """The weights of a model; those of projections multiply in FP8."""
    found: dict[str, Any] = dict(weights)
    for name, weight in weights.items():
        prefix, _, rest = name.removeprefix("layers.").partition(".")
        if rest in PROJECTIONS + SHARED * spec.shared_experts and spec.covers(int(prefix), layers):
            found[name] = Fp8Weight(weight, spec, name=name, history=history)
        if rest in EXPERTS and spec.experts and spec.covers(int(prefix), layers):
            found[name] = Fp8Experts(weight, spec)
    if spec.head:
        head = weights.get("head", weights["embedding"])
        found |= {"head": Fp8Weight(head, spec, name="head", history=history), "mtp.head": head}
    return found
