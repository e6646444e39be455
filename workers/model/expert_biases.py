"""Biases of the router and the experts (gpt-oss). R rows sorted by expert, `local` experts on this rank.

Every tp rank adds its share of the down projection's bias, as the results are summed over the ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.moe.moe_permute import ExpertRows
from pentad.workers.linear.weight_grad import GroupedWgrad, Param, Params, Wgrad


class ExpertBiases(NamedTuple):
    router: Param  # [E]
    gate_up: Param  # [local, 2I]
    down: Param  # [local, H]

    @classmethod
    def bind(cls, params: Params, prefix: str) -> ExpertBiases | None:
        """None for experts without biases."""
        at = f"{prefix}.experts"
        if f"{at}.router_bias" not in params:
            return None
        return cls(*(params[f"{at}.{name}_bias"] for name in ("router", "gate_up", "down")))

    def add_gate_up_(self, gate_up: Tensor, rows: ExpertRows) -> None:
        """gate_up [R, 2I] += the bias of each row's expert."""
        gate_up += self.gate_up.weight[_experts(rows)]

    def add_down_(self, out: Tensor, rows: ExpertRows, share: float) -> None:
        """out [R, H] += share * the weight of each row * the bias of its expert."""
        out += (share * rows.weights)[:, None].to(out.dtype) * self.down.weight[_experts(rows)]

    def weights_backward(self, dout_rows: Tensor, rows: ExpertRows, share: float) -> Tensor:
        """The biases' part of the gradient of the rows' weights [R], from the gradient of the rows' results [R, H]."""
        return share * (dout_rows.to(rows.weights.dtype) * self.down.weight[_experts(rows)]).sum(1)

    def wgrads(self, dgate_up: Tensor, dout: Tensor, rows: ExpertRows, share: float) -> list[Wgrad]:
        """The work for W, from dgate_up [R, 2I] and `dout` [T', H] of the received tokens."""
        if self.gate_up.gradient is None or self.down.gradient is None:
            return []
        ones = dgate_up.new_ones(dgate_up.shape[0], 1)
        weights = (share * rows.weights)[:, None].to(dout.dtype)
        return [
            GroupedWgrad(self.gate_up.gradient.unsqueeze(2), dgate_up, ones, rows.offsets, None, None),
            GroupedWgrad(self.down.gradient.unsqueeze(2), dout, weights, rows.offsets, rows.tokens, None),
        ]


def _experts(rows: ExpertRows) -> Tensor:
    """[R]: the local expert of each row; an arbitrary one for unused rows."""
    number = torch.arange(rows.weights.shape[0], dtype=rows.offsets.dtype, device=rows.offsets.device)
    return torch.searchsorted(rows.offsets, number, right=True).clamp(max=rows.offsets.shape[0] - 1)
