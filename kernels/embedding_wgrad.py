"""The gradient of an embedding, added only to those rows of a wide accumulator that tokens have read."""

import torch
from torch import Tensor

from pentad.kernels.backend import triton_on_gpu


@triton_on_gpu
def accumulate_embedding_gradient_(main: Tensor, dy: Tensor, tokens: Tensor, *, overwrite: bool = False) -> None:
    """main[tokens[t]] += dy[t] for each t, with main [V, H], dy [T, H] and tokens [T] int64. With `overwrite`, main is
    zeroed first. A token of -1 belongs to another rank and adds nothing.

    main is float32, or float64 for float64 inputs. The additions have the same order in every run.
    """
    if overwrite:
        main.zero_()
    is_known = tokens >= 0
    rows = torch.where(is_known.unsqueeze(1), dy, 0).to(main.dtype)
    main.index_put_((tokens.clamp(min=0),), rows, accumulate=True)  # not index_add_, which a GPU does in any order
