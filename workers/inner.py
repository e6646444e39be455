"""The ranks that a layer is shared with: groups whose operations run inside F, B and W."""

from __future__ import annotations

from typing import NamedTuple

from pentad.workers.context import Context
from pentad.workers.experts import Site
from pentad.workers.tensor_ranks import TensorRanks


class Inner(NamedTuple):
    tensor: TensorRanks
    context: Context
    experts: Site
