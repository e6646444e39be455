"""Finds spikes on the device, from values that all ranks have, before a step changes any state."""

from __future__ import annotations

import torch

from pentad.schedules.spec.optimizer import SpikeSpec

TENSOR = "spikes.window"  # in a checkpoint


class SpikeFilter:
    """Compares each step with the last ones, like OLMo-core's SkipStepOptimizer, except that a value below the mean is
    no spike.

    `window` [2, steps], float64, holds their losses per token and global gradient norms, the newest last, NaN where
    there are none yet. It is part of the training state: equal on all ranks, saved and restored.
    """

    def __init__(self, spec: SpikeSpec, device: torch.device) -> None:
        self.spec = spec
        self.window = torch.full((2, spec.window), torch.nan, dtype=torch.float64, device=device)

    def filtered(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """The norm, or NaN if the step with this loss per token is a spike or not finite; its update is then skipped.

        All are float64 scalars. A spike enters the window, so that a lasting level becomes normal; a value that is not
        finite does not.
        """
        values = torch.stack([loss, norm])
        known = self.window.isfinite()
        count = known[0].sum()
        mean = torch.where(known, self.window, 0.0).sum(1) / count
        squares = torch.where(known, self.window - mean[:, None], 0.0).square().sum(1)
        limit = mean + self.spec.threshold * (squares / (count - 1)).sqrt()
        is_spike = (values > limit).any() & (count >= self.spec.min_steps)
        finite = values.isfinite().all()
        self.window.copy_(torch.where(finite, torch.cat([self.window[:, 1:], values[:, None]], 1), self.window))
        return torch.where(finite & ~is_spike, norm, torch.nan)

    def load(self, saved: torch.Tensor | None) -> None:
        """Takes over the newest steps of a saved window of any length; without one, starts over."""
        self.window.fill_(torch.nan)
        if saved is not None:
            count = min(saved.shape[1], self.window.shape[1])
            self.window[:, -count:] = saved[:, -count:]
