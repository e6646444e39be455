"""The ranks that a layer is shared with: groups whose operations run inside F, B and W."""

from __future__ import annotations

from typing import NamedTuple

from pentad.workers.parallel.context_parallel import Context
from pentad.workers.parallel.expert_parallel import ExpertParallelGroup
from pentad.workers.parallel.tensor_parallel import TensorRanks


class Inner(NamedTuple):
    tensor: TensorRanks
    context: Context
    experts: ExpertParallelGroup

    @property
    def is_alone(self) -> bool:
        """Whether a rank shares its layers with no other."""
        return self.tensor.size == 1 and self.context.size == 1 and self.experts.group is None
