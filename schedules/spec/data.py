"""The data of a run: its sources, how they are mixed, and which tokens have a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Packing = Literal["windows", "documents"]


@dataclass(frozen=True)
class SourceSpec:
    """A corpus: a folder, a URI, or 'builtin:NAME'. `weight` is its relative share of sequences, `epochs` how often it
    may be read before it drops out. Once it has been opened, `fingerprint` identifies its content, and `sequences` are
    those of an epoch. `key` is the config key of its path."""

    name: str
    path: str
    key: str = "data.path"
    weight: float = 1.0
    epochs: float | None = None
    fingerprint: str = ""
    sequences: int = 0


class WeightChange(NamedTuple):
    """From `step` on, counted from 0, the sources have these weights, in their order."""

    step: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class DataSpec:
    """Sequences of all `sources`; built-in corpora and copies of remote ones are in the folder `cache`.

    `packing` cuts a source into 'windows' of its flat stream of tokens, or fills every sequence with entire
    'documents'. With `document_mask`, documents packed into a sequence do not attend to each other; with
    `eod_mask_loss`, the end token of a document does not predict the first token of the next one. The share `holdout`
    of every source, its last documents, is for evaluation.
    """

    sources: tuple[SourceSpec, ...]
    cache: str = ""
    curriculum: tuple[WeightChange, ...] = ()
    packing: Packing = "windows"
    document_mask: bool = False
    eod_mask_loss: bool = False
    holdout: float = 0.0
