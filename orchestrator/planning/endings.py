"""Bytes of one piece at the end of a model: its last norm, head and loss, and layers that predict further tokens.

T tokens of a piece, t of them in this rank's part of the residual stream, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

from pentad.orchestrator.planning.activation_memory import INDEX, Piece
from pentad.schedules.spec.model import ModelShape


class End(NamedTuple):
    """What B needs of F, what of that no OFFLOAD takes, what W needs of B, and what of that F had kept already."""

    roots: int = 0
    still: int = 0
    deferred: int = 0
    shared: int = 0

    def plus(self, other: End, times: int = 1) -> End:
        return End(*(one + times * more for one, more in zip(self, other, strict=True)))


def head(model: ModelShape, piece: Piece) -> End:
    """Logits become their gradient; tensor ranks count targets from their own first word."""
    stream, whole = (tokens * model.hidden * piece.compute for tokens in (piece.part, piece.tokens))
    logits = piece.tokens * (model.vocab // piece.mesh.tp) * piece.compute
    statistics = (piece.tokens + piece.part) * piece.main + piece.gathered * piece.tokens * INDEX
    return End(
        roots=logits + 2 * stream + statistics,
        still=statistics,
        deferred=logits + whole + model.hidden * piece.main,
        shared=logits + (0 if piece.gathered else stream),
    )


def ahead(model: ModelShape, piece: Piece, layer: End) -> End:
    """One more token: an embedding joined to a stream that is kept anyhow, a `layer`, and the head once more."""
    stream, known = piece.part * model.hidden * piece.compute, piece.tokens * INDEX
    joined = End(
        roots=3 * stream + 2 * piece.part * piece.main + known,
        still=2 * piece.part * piece.main + known,
        deferred=3 * stream + 2 * model.hidden * piece.main + looked(model, piece) + (0 if piece.gathered else known),
        shared=2 * stream + (0 if piece.gathered else known),
    )
    return joined.plus(layer).plus(head(model, piece))


def looked(model: ModelShape, piece: Piece) -> int:
    """The gradient of embedded rows waits for W; tensor ranks number them from their own first word."""
    return piece.tokens * (model.hidden * piece.compute + piece.gathered * INDEX)
