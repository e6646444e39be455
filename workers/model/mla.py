"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): an attention sublayer whose keys and values
are projected from one low-rank latent vector per token.

Latents are computed from this rank's tokens and then gathered, which moves less than gathering the stream. T tokens, t
of them this rank's; R and Q the ranks of the key-value and query latents; N heads of this rank; P and O the query
widths without and with rotary position, E the value width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.attention.rope import rope_
from pentad.schedules.spec import model
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.linear.casts import Casts
from pentad.workers.linear.linear import Linear
from pentad.workers.linear.weight_grad import LinearWgrad, Param, Params, Wgrad
from pentad.workers.model.attention import Kept, KeptProjections, attend, attend_again, attend_backward, kept_of
from pentad.workers.model.layer_context import LayerContext, SequenceContext
from pentad.workers.model.lora import Adapter, ColumnAdapters, LocalAdapter, RowAdapter
from pentad.workers.model.norm import Norm, SavedNorm
from pentad.workers.parallel.async_ops import Task, gather2, ready
from pentad.workers.parallel.context_parallel import KeptAttention, SavedContext
from pentad.workers.parallel.row_split import RowSplit


class QueryLatent(NamedTuple):
    down: Param  # [Q, H]
    norm: Norm  # [Q]
    adapter: LocalAdapter


class SavedLatent(NamedTuple):
    normed: Tensor  # [t, R]
    norm: SavedNorm


class MLASaved(NamedTuple):
    context: SavedContext
    out: Tensor  # [T, N E]
    q_latent: SavedLatent | None
    kv_latent: SavedLatent


class MLA(NamedTuple):
    query_latent: QueryLatent | None
    query: Linear  # [N (P + O), Q], or [N (P + O), H] without a query latent
    latent: Param  # [R + O, H]
    latent_norm: Norm  # [R]
    keys_values: Linear  # [N (P + E), R]
    out: Linear  # [H, N E]
    query_adapters: ColumnAdapters
    latent_adapter: LocalAdapter
    keys_values_adapters: ColumnAdapters
    out_adapter: RowAdapter

    @classmethod
    def bind(cls, params: Params, prefix: str, model: ModelSpec, casts: Casts | None = None) -> MLA:
        """With `casts`, the products of heads are in 8 bits, but not those that compute latents."""
        at, query_latent = f"{prefix}.attention", None
        if f"{at}.query_down" in params:
            down, norm = params[f"{at}.query_down"], Norm.bind(params, f"{at}.query_norm", model)
            query_latent = QueryLatent(down, norm, LocalAdapter.bind(params, f"{at}.q_a_proj", len(down.weight)))
        query, keys_values = (Linear.bind(params, f"{at}.{name}", casts) for name in ("query", "keys_values"))
        out = Linear.bind(params, f"{at}.out", casts, row_parallel=True)
        latent, norm = params[f"{at}.latent"], Norm.bind(params, f"{at}.latent_norm", model)
        q_proj = "q_proj" if query_latent is None else "q_b_proj"
        columns = {q_proj: query, "kv_b_proj": keys_values}
        of_query, of_kv = (
            ColumnAdapters(Adapter.bind_all(params, at, {name: len(each.weight)})) for name, each in columns.items()
        )
        of_latent = LocalAdapter.bind(params, f"{at}.kv_a_proj_with_mqa", len(latent.weight))
        of_out = RowAdapter.bind(params, f"{at}.o_proj", len(out.weight))
        return cls(query_latent, query, latent, norm, keys_values, out, of_query, of_latent, of_kv, of_out)

    @property
    def caster(self) -> None:
        """None: the products that compute latents read the stream in the compute dtype."""

    def only_w_reads(self, context: LayerContext) -> bool:
        return False

    def forward(
        self, context: LayerContext, sequence: SequenceContext, x: Tensor
    ) -> Task[tuple[Tensor, MLASaved, None]]:
        saved = yield from self._attend(context, sequence, x)
        return (yield from self.project(context, saved.out)), saved, None

    def _attend(
        self, context: LayerContext, sequence: SequenceContext, x: Tensor, kept: KeptAttention | None = None
    ) -> Task[MLASaved]:
        """Everything but the output projection. What was `kept` of attention is not recomputed."""
        (q, k, v), latents = yield from self._queries_keys_values(context, sequence, x)
        out, saved = yield from attend(context, sequence, q, k, v, kept=kept)
        return MLASaved(saved, out, *latents)

    def _queries_keys_values(
        self, context: LayerContext, sequence: SequenceContext, x: Tensor
    ) -> Task[tuple[tuple[Tensor, ...], tuple[SavedLatent | None, SavedLatent]]]:
        """((queries and keys [T, N, P + O], values [T, N, E]), (query latent, key-value latent))."""
        shape, axes, tp, rotary = _shape(context), context.axes, context.tp, sequence.rotary
        nope, rank = shape.qk_nope_head_dim, shape.kv_lora_rank
        q_latent = None
        if self.query_latent is not None:
            down = torch.mm(x, self.query_latent.down.weight.t())
            self.query_latent.adapter.add_(context, x, down)
            q_latent = _norm_latent(down, self.query_latent.norm)
        q_gather = tp.all_gather(x if q_latent is None else q_latent.normed)
        latent = torch.mm(x, self.latent.weight.t())  # [t, R + O]
        self.latent_adapter.add_(context, x, latent)
        kv_latent = _norm_latent(latent[:, :rank].contiguous(), self.latent_norm)
        latent = torch.cat((kv_latent.normed, latent[:, rank:]), dim=1)
        q_input, latent = yield from gather2(q_gather, tp.all_gather(latent))  # [T, Q], [T, R + O]
        q = self.query.forward(axes, self.query.input(axes, q_input, rows=True))
        yield from self.query_adapters.add_(context, x if q_latent is None else q_latent.normed, q)
        q = q.view(q.shape[0], -1, nope + shape.qk_rope_head_dim)  # [T, N, P + O]
        rope_(q[:, :, nope:], rotary.cos, rotary.sin)
        rotary_key = latent[:, None, rank:]  # [T, 1, O], shared by all heads
        rope_(rotary_key, rotary.cos, rotary.sin)
        kv = self.keys_values.forward(axes, self.keys_values.input(axes, latent[:, :rank], rows=True))
        yield from self.keys_values_adapters.add_(context, kv_latent.normed, kv)
        kv = kv.view(q.shape[0], q.shape[1], -1)  # [T, N, P + E]
        k = torch.cat((kv[:, :, :nope], rotary_key.expand(-1, q.shape[1], -1)), dim=2)
        return (q, k, kv[:, :, nope:]), (q_latent, kv_latent)

    def project(self, context: LayerContext, out: Tensor) -> Task[Tensor]:
        """The result [T / tp, H] from the output of the heads."""
        axes = context.axes
        y = yield from self.out.forward_scattered(axes, self.out.input(axes, out, rows=True))
        yield from self.out_adapter.add_(context, out, y)
        return y

    def keep(self, saved: MLASaved, recomputed: Collection[str], split: RowSplit | None = None) -> Kept[MLASaved]:
        """What is kept if these parts are recomputed: latents and what follows from them are recomputed for all
        rows."""
        drops_inputs, drops_result = (name in recomputed for name in ("mla_up_proj", "core_attn"))
        latents = saved.q_latent, saved.kv_latent
        return kept_of(saved, latents, drops_inputs=drops_inputs, drops_result=drops_result)

    def rebuild(
        self,
        context: LayerContext,
        sequence: SequenceContext,
        x: Callable[[RowSplit | None], Tensor],
        kept: Kept[MLASaved],
        split: RowSplit | None = None,
    ) -> Task[MLASaved]:
        """Recomputes what `keep` left out, with the kernels of the forward; `x` returns the sublayer's input."""
        if isinstance(kept, MLASaved):
            return kept
        if isinstance(kept, KeptProjections):
            out, saved = yield from attend_again(context, sequence, kept.inputs)
            return MLASaved(saved, out, *kept.norms)
        return (yield from self._attend(context, sequence, x(None), kept))

    def backward(
        self,
        context: LayerContext,
        sequence: SequenceContext,
        x: Tensor,
        saved: MLASaved,
        recomputable: None,
        dy: Tensor,
    ) -> Task[tuple[Tensor, list[Wgrad]]]:
        shape, axes, tp, latent = _shape(context), context.axes, context.tp, saved.kv_latent
        nope, rank = shape.qk_nope_head_dim, shape.kv_lora_rank
        dnarrow = yield from self.out_adapter.narrow_grad(context, dy)
        adapters = yield from self.out_adapter.wgrads(context, saved.out, dy, dnarrow)
        doutput, dout = yield from self.out.input_grad_gathered(axes, dy)
        del dy
        self.out_adapter.input_grad_(dnarrow, dout)
        (dq, dk, dv), _ = yield from attend_backward(context, sequence, saved.context, dout, shape.v_head_dim)
        del dout
        dq, dk, dv = (grad.flatten(0, 1) for grad in (dq, dk, dv))  # [T, N, ...]
        for grad in (dq, dk):
            rope_(grad[:, :, nope:], sequence.rotary.cos, sequence.rotary.sin, inverse=True)
        dqueries = self.query.output_grad(axes, dq.flatten(1))
        del dq
        drotary_key = dk[:, :, nope:].sum(1)  # all heads share it
        dkv = self.keys_values.output_grad(axes, torch.cat((dk[:, :, :nope], dv), dim=2).flatten(1))
        own_q_input = x if saved.q_latent is None else saved.q_latent.normed
        rows = tp.all_gather if self.latent.gradient is not None else ready  # only W needs all rows
        latent_gather, q_gather = rows(latent.normed), rows(own_q_input)
        dinput = self.keys_values.input_grad(axes, dkv)
        dlatent_scatter = tp.reduce_scatter(torch.cat((dinput, drotary_key), dim=1))
        dq_scatter = self.query.input_grad_scattered(axes, dqueries)
        in_flight = gather2(gather2(latent_gather, q_gather), gather2(dlatent_scatter, dq_scatter))
        (kv_latent, q_input), (dlatent, dq_input) = yield from in_flight  # dlatent [t, R + O], dq_input [t, Q]
        dnormed = dlatent[:, :rank].contiguous()
        adapters += yield from self.query_adapters.backward_(context, own_q_input, dqueries, dq_input)
        adapters += yield from self.keys_values_adapters.backward_(context, latent.normed, dkv, dnormed)
        dinput, latent_norm = self.latent_norm.backward(dnormed, latent.norm)
        dlatent = torch.cat((dinput, dlatent[:, rank:]), dim=1)
        work: list[Wgrad] = [
            self.out.wgrad(doutput, self.out.input(axes, saved.out, columns=True)),
            self.keys_values.wgrad(dkv, self.keys_values.input(axes, kv_latent, columns=True)),
            LinearWgrad(self.latent.gradient, dlatent, x),
            latent_norm,
            self.query.wgrad(dqueries, self.query.input(axes, q_input, columns=True)),
        ]
        dx, query_work = self._query_latent_backward(context, x, saved.q_latent, dq_input)
        dx = torch.mm(dlatent, self.latent.weight) + dx
        adapters += self.latent_adapter.backward_(context, x, dlatent, dx)
        return dx, [*work, *query_work, *adapters]

    def _query_latent_backward(
        self, context: LayerContext, x: Tensor, saved: SavedLatent | None, dq_input: Tensor
    ) -> tuple[Tensor, list[Wgrad]]:
        """(gradient of x through the queries, work for W) from the gradient of the query projection's input."""
        if self.query_latent is None or saved is None:
            return dq_input, []
        down, norm, adapter = self.query_latent
        dlatent, query_norm = norm.backward(dq_input, saved.norm)
        dx = torch.mm(dlatent, down.weight)
        adapters = adapter.backward_(context, x, dlatent, dx)
        return dx, [LinearWgrad(down.gradient, dlatent, x), query_norm, *adapters]


def _norm_latent(x: Tensor, norm: Norm) -> SavedLatent:
    return SavedLatent(*norm.forward(x))


def _shape(context: LayerContext) -> model.MLA:
    assert context.model.mla is not None
    return context.model.mla
