"""Which tokens a sequence of the run holds: a pure function of (seed, sequence index), so no rank owns any data.

The corpus is cut into N windows of equal length. An epoch visits each once, in the order of a keyed permutation of
range(N) that needs no table: a mixed-radix Feistel network with cycle walking (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002, method 3).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus import Corpus

_ROUNDS = 8


def sequence(corpus: Corpus, seed: int, index: int, length: int) -> np.ndarray:
    """Tokens [length + 1] int64 of the run's sequence `index`, counted from step 0 over all ranks.

    Adjacent windows share one token: the last target of one is the first input of the next.
    """
    return corpus.read(_window_start(corpus, seed, index, length), length + 1)


def document_starts(corpus: Corpus, seed: int, index: int, length: int) -> tuple[int, ...]:
    """Positions in the run's sequence `index` at which a document starts; position 0 always counts as a start."""
    inside = corpus.boundaries(_window_start(corpus, seed, index, length), length).tolist()
    return (0, *(start for start in inside if start))


def microbatch(
    corpus: Corpus, seed: int, step: int, global_batch_size: int, rows: Sequence[int], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, each [len(rows), length] int64, of these rows of the step's global batch."""
    assert all(0 <= row < global_batch_size for row in rows), f"{rows} of {global_batch_size} sequences"
    tokens = np.stack([sequence(corpus, seed, step * global_batch_size + row, length) for row in rows])
    return tokens[:, :-1], tokens[:, 1:]


def window_count(corpus: Corpus, length: int, argument: str = "data.path") -> int:
    """Windows of `length` inputs in the corpus: the sequences of one epoch. Raises PentadError if there is none."""
    windows = (corpus.tokens - 1) // length
    if windows < 1:
        raise PentadError(
            f"{argument} is '{corpus.path}', which holds {corpus.tokens} tokens: "
            f"expected at least {length + 1} (batch.sequence_length + 1)"
        )
    return windows


def permuted(index: int, count: int, key: str) -> int:
    """Element `index` of the permutation of range(count) that `key` selects."""
    high_radix = math.isqrt(count - 1) + 1
    low_radix = -(-count // high_radix)
    value = _feistel(index, high_radix, low_radix, key)
    while value >= count:  # cycle walking: at most high_radix values of the network are out of range
        value = _feistel(value, high_radix, low_radix, key)
    return value


def _window_start(corpus: Corpus, seed: int, index: int, length: int) -> int:
    """Corpus position at which the run's sequence `index` starts."""
    windows = window_count(corpus, length)
    epoch, index_in_epoch = divmod(index, windows)
    return permuted(index_in_epoch, windows, f"{seed}/{epoch}") * length


def _feistel(value: int, high_radix: int, low_radix: int, key: str) -> int:
    """A permutation of range(high_radix * low_radix): the two digits of `value` shift each other in turn."""
    high, low = divmod(value, low_radix)
    for number in range(0, _ROUNDS, 2):
        high = (high + _noise(key, number, low)) % high_radix
        low = (low + _noise(key, number + 1, high)) % low_radix
    return high * low_radix + low


def _noise(key: str, number: int, digit: int) -> int:
    """64 uniform bits for a round of the network and one of its digits."""
    return int.from_bytes(hashlib.blake2b(f"{key}/{number}/{digit}".encode(), digest_size=8).digest(), "little")
