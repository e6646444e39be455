"""A decoder layer with a hand-written backward: F, B and W are three calls without autograd between them.

Two sublayers, attention and feed-forward, are each added to the residual stream, with RMSNorms before or after them. T
tokens of this rank's part of the stream, H hidden.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pentad.kernels.fp8.fp8_tensor import TILE
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.linear.casts import Casts, NormedSaved, Operand, SplitOver
from pentad.workers.linear.weight_grad import Params, Wgrad
from pentad.workers.model.attention import Attention
from pentad.workers.model.layer_context import LayerContext, SequenceContext, Sublayer
from pentad.workers.model.mla import MLA
from pentad.workers.model.mlp import MLP
from pentad.workers.model.moe import MoE
from pentad.workers.model.norm import Norm, SavedNorm
from pentad.workers.parallel.async_ops import Task
from pentad.workers.parallel.row_split import FirstRows, RowSplit


class ResidualSaved(NamedTuple):
    """Activations that B needs and RECOMPUTE cannot cheaply rebuild."""

    stream: Tensor  # [T, H], the residual stream before the sublayer
    rstd: Tensor | None  # [T], of the norm before it
    amax: Tensor | None  # [1, 1], of what the norm wrote in 8 bits with a tensor's scale that is kept nowhere else
    sublayer: Any
    post_norm: SavedNorm | None  # of rows [T, H]

    def rest(self, split: RowSplit | None) -> ResidualSaved:
        """The same for the rest of the rows only, for `read_again`."""
        if split is None:
            return self
        return self._replace(stream=split.rest(self.stream), rstd=None if self.rstd is None else split.rest(self.rstd))


class Residual(NamedTuple):
    """A sublayer and the addition of its result to the residual stream."""

    norm: Norm | None
    sublayer: Sublayer
    post_norm: Norm | None

    def read(
        self, context: LayerContext, branch: Tensor, stream: Tensor | None
    ) -> tuple[Operand, Tensor, Tensor | None, Tensor | None]:
        """(what the sublayer reads, residual stream, scale [T] of the norm, absolute maximum of what it cast) from the
        two terms of the residual stream.

        A norm adds the terms, since it reads both anyway, and casts if the sublayer needs only 8 bits.
        """
        if self.norm is None:
            # W still reads x when the buffer of a stage's input may already hold the next one.
            x = branch.clone() if stream is None else branch + stream
            return x, x, None, None
        casts, name = self._casts(context, branch)
        if casts is None:
            x, (stream, rstd) = self.norm.forward(branch, stream)
            return x, stream, rstd, None
        weight, eps, offset = self.norm.param.weight, self.norm.eps, self.norm.offset
        split = SplitOver(context.cp, context.tp)
        forms, saved = casts.norm(branch, stream, weight, eps, offset, name, split)
        return forms, *saved

    def _casts(self, context: LayerContext, stream: Tensor) -> tuple[Casts | None, str]:
        """The casts for the norm to apply to this rank's rows, and the parameter whose product reads them. None for
        rows with scales of their own, and for parts of tiles, which tp ranks gather first."""
        caster = self.sublayer.caster
        is_cut = context.tp.size > 1 and stream.shape[0] % TILE != 0
        if caster is None or caster.casts is None or is_cut or caster.casts.recipe.scaling == "row":
            return None, ""
        return caster.casts, caster.name

    def forward(
        self, context: LayerContext, sequence: SequenceContext, branch: Tensor, stream: Tensor | None
    ) -> Task[tuple[Tensor, Tensor, ResidualSaved, Any]]:
        """(branch, stream, saved, recomputable); the residual stream is `branch` + `stream`, both [T, H], before as
        well as after."""
        x, stream, rstd, amax = self.read(context, branch, stream)
        branch, saved, recomputable = yield from self.sublayer.forward(context, sequence, x)
        post_norm = None
        if self.post_norm is not None:
            branch, post_norm = self.post_norm.forward(branch)
        return branch, stream, ResidualSaved(stream, rstd, amax, saved, post_norm), recomputable

    def read_again(
        self, context: LayerContext, saved: ResidualSaved, *, rows: bool = False, columns: bool = False
    ) -> Operand:
        """What the sublayer read, bit for bit, from the residual stream: nobody saves the result of a norm. In 8 bits,
        it has the form that is asked for: rows for F or columns for W."""
        if self.norm is None or saved.rstd is None:
            return saved.stream
        casts, name = self._casts(context, saved.stream)
        if casts is None:
            return self.norm.forward(saved.stream)[0]
        normed, weight = NormedSaved(saved.stream, saved.rstd, saved.amax), self.norm.param.weight
        return casts.normed_again(normed, weight, self.norm.offset, name, rows=rows, columns=columns)

    def backward(
        self, context: LayerContext, sequence: SequenceContext, saved: ResidualSaved, recomputable: Any, dy: Tensor
    ) -> Task[tuple[Tensor, list[Wgrad]]]:
        """B: (gradient of the residual stream before, work for W) from the gradient after, both [T, H]."""
        dbranch, norm_work = dy, list[Wgrad]()
        if self.post_norm is not None and saved.post_norm is not None:
            dbranch, work = self.post_norm.backward(dy, saved.post_norm)
            norm_work.append(work)
        again = None
        if self.norm is not None and self.sublayer.only_w_reads(context):
            again = torch.empty_like(saved.stream)  # filled by the norm's backward
        x = self.read_again(context, saved, columns=True) if again is None else again
        dx, sublayer_work = yield from self.sublayer.backward(
            context, sequence, x, saved.sublayer, recomputable, dbranch
        )
        del x
        if self.norm is None or saved.rstd is None:
            return dx + dy, [*sublayer_work, *norm_work]
        dy, work = self.norm.backward(dx, SavedNorm(saved.stream, saved.rstd), dy, again)
        return dy, [*sublayer_work, *norm_work, work]


class LayerSaved(NamedTuple):
    attention: ResidualSaved
    mlp: ResidualSaved


class KeptStream(NamedTuple):
    """The first rows of the residual stream between the sublayers, and of what the norms next to it save."""

    stream: Tensor
    rstd: Tensor | None
    post_norm: SavedNorm | None  # of the norm after attention

    def joined(
        self, stream: Tensor, rstd: Tensor | None, post_norm: SavedNorm | None, split: RowSplit
    ) -> tuple[Tensor, Tensor | None, SavedNorm | None]:
        """All rows of each, given the rest of them."""
        return (
            split.join(self.stream, stream),
            None if self.rstd is None or rstd is None else split.join(self.rstd, rstd),
            None if self.post_norm is None or post_norm is None else self.post_norm.joined(post_norm, split),
        )


class KeptNetwork(NamedTuple):
    """What is kept of a feed-forward network if its input is recomputed, for all rows or for the rest of them."""

    sublayer: Any
    post_norm: SavedNorm | None
    first: KeptStream | None


class LayerKept(NamedTuple):
    """What F keeps for `rebuild`: at least the input of the layer and, for the feed-forward, what other ranks sent."""

    attention: ResidualSaved  # with what its sublayer keeps
    mlp: ResidualSaved | KeptNetwork
    recomputable: Any  # of the feed-forward; FirstRows or None if it is recomputed


class Layer(NamedTuple):
    attention: Residual
    mlp: Residual

    @classmethod
    def bind(
        cls,
        params: Params,
        model: ModelSpec,
        number: int,
        casts: Casts | None = None,
        expert_casts: Casts | None = None,
        shared_casts: Casts | None = None,
    ) -> Layer:
        """Layer `number` of a model with its parameters. Its products are in 8 bits with `casts`, those of experts with
        `expert_casts`, and those of the shared expert with `shared_casts`."""
        prefix = f"layers.{number}"

        def residual(name: str, sublayer: Sublayer) -> Residual:
            norms = (Norm.bind_optional(params, f"{prefix}.{name}_{kind}", model) for kind in ("norm", "post_norm"))
            before, after = norms
            return Residual(before, sublayer, after)

        has_experts = model.experts is not None and number >= model.experts.first_k_dense
        attention: Sublayer
        if model.mla is None:
            attention = Attention.bind(params, prefix, model, casts)
        else:
            attention = MLA.bind(params, prefix, model, casts)
        mlp: Sublayer = (
            MoE.bind(params, prefix, model, expert_casts, shared_casts)
            if has_experts
            else MLP.bind(params, f"{prefix}.mlp", model, casts)
        )
        return cls(residual("attention", attention), residual("mlp", mlp))

    def forward(
        self, context: LayerContext, sequence: SequenceContext, branch: Tensor, stream: Tensor | None
    ) -> Task[tuple[Tensor, Tensor, LayerSaved, Any]]:
        """(branch, stream, saved, recomputable), as in `Residual.forward`; nothing of attention is recomputable."""
        branch, stream, attention, _ = yield from self.attention.forward(context, sequence, branch, stream)
        branch, stream, mlp, recomputable = yield from self.mlp.forward(context, sequence, branch, stream)
        return branch, stream, LayerSaved(attention, mlp), recomputable

    def keep(
        self, saved: LayerSaved, recomputable: Any, recomputed: Collection[str], split: RowSplit | None = None
    ) -> LayerKept:
        """What is kept if these parts of the layer are recomputed (schedules/passes/recompute.py); with `split`, also
        the first rows of those that work on rows."""
        sublayer: Any = self.attention.sublayer
        attention = saved.attention._replace(sublayer=sublayer.keep(saved.attention.sublayer, recomputed, split))
        mlp: ResidualSaved | KeptNetwork = saved.mlp
        if "attn_proj" in recomputed:
            first = None if split is None else _first_rows(saved, split)
            attention, mlp = attention._replace(post_norm=None), KeptNetwork(mlp.sublayer, mlp.post_norm, first)
        if not self._network_is_mlp:
            return LayerKept(attention, mlp, None if "moe" in recomputed else recomputable)
        if "mlp" in recomputed:
            recomputable = None if split is None else FirstRows(split.first(recomputable))
        return LayerKept(attention, mlp, recomputable)

    @property
    def _network_is_mlp(self) -> bool:
        return not isinstance(self.mlp.sublayer, MoE)

    def rebuild(
        self, context: LayerContext, sequence: SequenceContext, kept: LayerKept, split: RowSplit | None = None
    ) -> Task[tuple[LayerSaved, Any]]:
        """RECOMPUTE: (saved, recomputable) of the forward, bit for bit, with the same kernels."""
        sublayer: Any = self.attention.sublayer
        attention, mlp, recomputable = kept

        def read(rows: RowSplit | None) -> Operand:
            return self.attention.read_again(context, kept.attention.rest(rows), rows=True)

        whole = yield from sublayer.rebuild(context, sequence, read, attention.sublayer, split)
        attention = attention._replace(sublayer=whole)
        x = None  # the input of the network, or the rest of its rows, once computed
        if isinstance(mlp, KeptNetwork):
            branch = yield from sublayer.project(context, whole.out if split is None else split.rest(whole.out))
            post_norm = None
            if self.attention.post_norm is not None:
                branch, post_norm = self.attention.post_norm.forward(branch)
            x, stream, rstd, amax = self.mlp.read(context, branch, attention.rest(split).stream)
            if split is not None and mlp.first is not None:
                stream, rstd, post_norm = mlp.first.joined(stream, rstd, post_norm, split)
            attention = attention._replace(post_norm=post_norm or attention.post_norm)
            mlp = ResidualSaved(stream, rstd, amax, mlp.sublayer, mlp.post_norm)
        first = recomputable.rows if isinstance(recomputable, FirstRows) else None
        if recomputable is None or first is not None:
            rows = None if first is None else split
            if x is None or rows is not split:
                x = self.mlp.read_again(context, mlp.rest(rows), rows=True)
            network: Any = self.mlp.sublayer
            recomputable = network.recompute(context, x, mlp.sublayer)
            if first is not None and rows is not None:
                recomputable = rows.join(first, recomputable)
        return LayerSaved(attention, mlp), recomputable

    def backward(
        self,
        context: LayerContext,
        sequence: SequenceContext,
        saved: LayerSaved,
        recomputable: Any,
        dy: Tensor,
    ) -> Task[tuple[Tensor, list[Wgrad]]]:
        """B: (gradient of the residual stream before the layer, work for W) from the gradient after it, both [T, H]."""
        dy, mlp_work = yield from self.mlp.backward(context, sequence, saved.mlp, recomputable, dy)
        dy, attention_work = yield from self.attention.backward(context, sequence, saved.attention, None, dy)
        return dy, [*mlp_work, *attention_work]


def _first_rows(saved: LayerSaved, split: RowSplit) -> KeptStream:
    """The first rows of what attention's projection produces."""
    stream, rstd, post_norm = saved.mlp.stream, saved.mlp.rstd, saved.attention.post_norm
    return KeptStream(
        split.first(stream),
        None if rstd is None else split.first(rstd),
        None if post_norm is None else post_norm.first(split),
    )
