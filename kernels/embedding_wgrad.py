"""The gradient of an embedding, added to the rows of a wide accumulator that tokens have read, and to no others."""

import torch
from torch import Tensor

from pentad.kernels.backend import triton_on_gpu


@triton_on_gpu
def accumulate_embedding_gradient_(main: Tensor, dy: Tensor, tokens: Tensor, *, overwrite: bool = False) -> None:
    """main[tokens[t]] += dy[t] for each t, of main [V, H], dy [T, H] and tokens [T] int64; or = if it is to `overwrite`
    what main has, with zeros in all other rows. A token of -1 is another rank's and adds nothing.

    main is float32, or float64 for float64 inputs. The additions have the same order in every run.
    """
    if overwrite:
        main.zero_()
    is_known = tokens >= 0
    rows = torch.where(is_known.unsqueeze(1), dy, 0).to(main.dtype)
    main.index_put_((tokens.clamp(min=0),), rows, accumulate=True)  # not index_add_, which a GPU does in any order
