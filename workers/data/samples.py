"""Which tokens a sequence of the run holds: a pure function of (seed, sequence number), so that no rank owns any data.

The corpus is cut into N windows. An epoch visits each once, in an order drawn by a Feistel network on the N numbers,
which is computed at one place without a table (mixed-radix Feistel with cycle walking: Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002, method 3).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus import Corpus

_ROUNDS = 8


def sequence(corpus: Corpus, seed: int, number: int, length: int) -> np.ndarray:
    """Tokens [length + 1] int64 of the run's sequence `number`, which counts from the run's start over all ranks.

    Neighbouring windows share one token: the last target of one is the first input of the next.
    """
    return corpus.read(_first(corpus, seed, number, length), length + 1)


def document_starts(corpus: Corpus, seed: int, number: int, length: int) -> tuple[int, ...]:
    """Where documents begin among the inputs of the run's sequence `number`; its first one begins, or goes on, at 0."""
    inside = corpus.boundaries(_first(corpus, seed, number, length), length).tolist()
    return (0, *(start for start in inside if start))


def microbatch(
    corpus: Corpus, seed: int, step: int, sequences: int, rows: Sequence[int], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, each [len(rows), length] int64, of rows `rows` of the step's `sequences` sequences."""
    assert all(0 <= row < sequences for row in rows), f"{rows} of {sequences} sequences"
    numbers = (step * sequences + row for row in rows)
    tokens = np.stack([sequence(corpus, seed, number, length) for number in numbers])
    return tokens[:, :-1], tokens[:, 1:]


def _first(corpus: Corpus, seed: int, number: int, length: int) -> int:
    """Where in the corpus a sequence of the run begins."""
    windows = window_count(corpus, length)
    epoch, place = divmod(number, windows)
    return shuffled(place, windows, f"{seed}/{epoch}") * length


def window_count(corpus: Corpus, length: int) -> int:
    """Windows of `length` inputs in the corpus: the sequences of one epoch. Raises PentadError if there is none."""
    windows = (corpus.tokens - 1) // length
    if windows < 1:
        raise PentadError(
            f"data.path is '{corpus.path}', which holds {corpus.tokens} tokens; "
            f"expected at least {length + 1} for a sequence of {length}"
        )
    return windows


def shuffled(place: int, count: int, key: str) -> int:
    """The number at `place` of the permutation of range(count) that `key` names."""
    high_count = math.isqrt(count - 1) + 1
    low_count = -(-count // high_count)
    number = _feistel(place, high_count, low_count, key)
    while number >= count:  # at most high_count of the network's numbers lie outside
        number = _feistel(number, high_count, low_count, key)
    return number


def _feistel(number: int, high_count: int, low_count: int, key: str) -> int:
    """A permutation of range(high_count * low_count): the two digits of `number` shift each other in turn."""
    high, low = divmod(number, low_count)
    for turn in range(0, _ROUNDS, 2):
        high = (high + _noise(key, turn, low)) % high_count
        low = (low + _noise(key, turn + 1, high)) % low_count
    return high * low_count + low


def _noise(key: str, turn: int, digit: int) -> int:
    """64 uniform bits drawn by the key, the round and the other digit."""
    return int.from_bytes(hashlib.blake2b(f"{key}/{turn}/{digit}".encode(), digest_size=8).digest(), "little")
