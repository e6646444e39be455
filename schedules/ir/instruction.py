"""Operations and instructions, the vocabulary of programs, with a text form that converts both ways.

`2F0` is the forward of microbatch 0 on stage 2. Lowered instructions add their peer, group, slot and waits:
`2SEND_F0>3 after 2F0`, `3RECV_F0<2@1 after 3W5` (into slot 1), `2ALL_REDUCE#stage2`, `NORM#pp`, `(1F4+2BW0)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError


class Op(StrEnum):
    """What an instruction does. F, B and W are the letters of the zero-bubble papers (torch calls B `I` and BW `B`)."""

    F = "F"  # forward
    B = "B"  # backward for the input
    W = "W"  # backward for the weights
    BW = "BW"  # both in one
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    ALL_GATHER = "ALL_GATHER"  # parameters of a stage
    FREE = "FREE"  # drops the gathered parameters of a stage
    REDUCE_SCATTER = "REDUCE_SCATTER"  # gradients of a stage
    ALL_REDUCE = "ALL_REDUCE"  # gradients of a stage
    NORM = "NORM"  # global gradient norm
    STEP = "STEP"  # optimizer
    VALIDATE = "VALIDATE"  # confirms the previous, optimistic STEP once its norm is known
    ROLLBACK = "ROLLBACK"  # redoes that STEP if the norm was over the limit
    RECOMPUTE = "RECOMPUTE"  # the forward again, before its backward
    OFFLOAD = "OFFLOAD"  # activations to host memory
    RELOAD = "RELOAD"  # and back
    LOSS = "LOSS"  # sums the losses over all ranks: the end of a forward-only program


COMPUTE = frozenset({Op.F, Op.B, Op.W, Op.BW})
SENDS = {Op.SEND_F: Op.RECV_F, Op.SEND_B: Op.RECV_B}
RECEIVES = {Op.RECV_F: Op.SEND_F, Op.RECV_B: Op.SEND_B}
REDUCTIONS = frozenset({Op.REDUCE_SCATTER, Op.ALL_REDUCE})  # `microbatch` is -1 once a step
OF_ALL_RANKS = frozenset({Op.NORM, Op.LOSS})
COLLECTIVES = REDUCTIONS | OF_ALL_RANKS | {Op.ALL_GATHER}


class Key(NamedTuple):
    """Identifies an instruction within its rank's stream."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{_number(self.stage)}{self.op}{_number(self.microbatch)}"


class Instruction(NamedTuple):
    """One instruction of a rank.

    `stage` and `microbatch` are -1 for ops without one (NORM, STEP, LOSS). Lowering fills in the rest: `peer` is the
    pipeline rank at the other end of a transfer, `group` names the ranks of a collective, `slot` is the receive buffer
    that a transfer fills, and `waits` are the keys of earlier instructions in the stream, on other lanes, that must end
    before this one starts. The first wait of a send is the result that it sends.
    """

    op: Op
    stage: int = -1
    microbatch: int = -1
    peer: int = -1
    group: str = ""
    slot: int = -1
    waits: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        return Key(self.op, self.stage, self.microbatch)

    @property
    def lane(self) -> str:
        """The queue it runs on, in order: one CUDA stream with its own communicator.

        Every pair of a transfer op and a peer has its own lane, so no transfer waits behind an unrelated one.
        """
        if self.op in SENDS:
            return f"{self.op}>{self.peer}"
        if self.op in RECEIVES:
            return f"{self.op}<{self.peer}"
        if self.op in COLLECTIVES:
            return "gather" if self.op is Op.ALL_GATHER else "reduce"
        return self.op.lower() if self.op in (Op.OFFLOAD, Op.RELOAD) else "compute"

    @property
    def parts(self) -> tuple[Instruction, ...]:
        return (self,)

    def __str__(self) -> str:
        arrow = "" if self.peer == -1 else f"{'>' if self.op in SENDS else '<'}{self.peer}"
        group = f"#{self.group}" if self.group else ""
        slot = "" if self.slot == -1 else f"@{self.slot}"
        after = " after " + ",".join(map(str, self.waits)) if self.waits else ""
        return f"{self.key}{arrow}{group}{slot}{after}"


class Overlap(NamedTuple):
    """The forward of one microbatch and the backward of another, interleaved into one action (DualPipe)."""

    forward: Instruction
    backward: Instruction

    @property
    def key(self) -> Key:
        return self.forward.key

    @property
    def lane(self) -> str:
        return "compute"

    @property
    def parts(self) -> tuple[Instruction, ...]:
        return tuple(self)

    @property
    def waits(self) -> tuple[Key, ...]:
        return self.forward.waits + self.backward.waits

    def __str__(self) -> str:
        return f"({self.forward}+{self.backward})"


Action = Instruction | Overlap

_KEY = r"(\d{0,9})(" + "|".join(sorted((op.value for op in Op), key=len, reverse=True)) + r")(\d{0,9})"
_INSTRUCTION = re.compile(_KEY + r"(?:[<>](\d{1,9}))?(?:#(\w+))?(?:@(\d{1,9}))?(?: after (\S+))?", re.ASCII)
_KEY_ONLY = re.compile(_KEY, re.ASCII)


def parse(text: str) -> Action:
    """The inverse of `str`. Raises PentadError on any other text."""
    if text.startswith("(") and text.endswith(")"):
        forward, _, backward = text[1:-1].partition("+")
        return Overlap(_parse_one(forward), _parse_one(backward))
    return _parse_one(text)


def parse_key(text: str) -> Key:
    """The inverse of `str` for keys such as `2F0`. Raises PentadError on any other text."""
    found = _KEY_ONLY.fullmatch(text)
    key = Key(Op(found[2]), _index(found[1]), _index(found[3])) if found else None
    if key is None or str(key) != text:  # 02F0 is not canonical
        raise PentadError(f"instruction is {text!r}: expected STAGE OP MICROBATCH as in '2F0'")
    return key


def instructions_of(stream: tuple[Action, ...]) -> Iterator[Instruction]:
    """The instructions of a stream in order; an overlapped pair gives two."""
    for action in stream:
        yield from action.parts


def _parse_one(text: str) -> Instruction:
    found = _INSTRUCTION.fullmatch(text)
    if found:
        stage, op, microbatch, peer, group, slot, after = found.groups()
        waits = tuple(parse_key(key) for key in after.split(",")) if after else ()
        parsed = Instruction(Op(op), _index(stage), _index(microbatch), _index(peer), group or "", _index(slot), waits)
        if str(parsed) == text:  # 2SEND_F0<3 is not canonical
            return parsed
    raise PentadError(f"instruction is {text!r}: expected STAGE OP MICROBATCH as in '2F0' or '2SEND_F0>3'")


def _index(text: str | None) -> int:
    return int(text) if text else -1


def _number(value: int) -> str:
    return "" if value == -1 else str(value)
