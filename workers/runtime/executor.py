"""Runs one rank's stream: a loop over instructions with one `match`."""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist

from pentad.schedules.ir.instruction import REDUCTIONS, Instruction, Key, Op, units_of
from pentad.schedules.ir.program import Stream
from pentad.workers.data.batch_loader import Tokens
from pentad.workers.model.stage_protocol import StageProtocol
from pentad.workers.parallel.async_ops import Turns, interleave, on_yield, run_to_completion
from pentad.workers.parallel.groups import Groups
from pentad.workers.runtime.abort import Aborted
from pentad.workers.runtime.activation_offload import ActivationOffload
from pentad.workers.runtime.optimizer_step import Barrier, PostValidated
from pentad.workers.runtime.progress_file import ProgressFile
from pentad.workers.runtime.streams import Lanes
from pentad.workers.runtime.zero import ZeroShards
from pentad.workers.transport.p2p import Transport
from pentad.workers.transport.p2p_ipc import IpcTransport


class Executor:
    """A rank's stages, communicators and lanes; `run` takes them through one step.

    `end` is what becomes of the gradients, and `host_seconds[step]` what issuing the stream took. Another thread may
    end the generation: it sets `fenced`, which the host sees before the next instruction.
    """

    def __init__(
        self,
        stream: Stream,
        stages: dict[int, StageProtocol],
        groups: Groups,
        transport: Transport | IpcTransport,
        lanes: Lanes,
        board: ProgressFile,
        end: Barrier | PostValidated,
        shards: ZeroShards,
    ) -> None:
        self.stream, self.stages, self.end, self.shards = stream, stages, end, shards
        self.groups, self.transport, self.lanes, self.board = groups, transport, lanes, board
        self.fenced = self.again = False
        self.valid = True
        self.away = ActivationOffload(lanes)
        # by the last W of a stage whose gradients are reduced in several parts
        self.reductions: dict[Key, list[Instruction]] = {}
        for part in units_of(stream):
            if part.op in REDUCTIONS and part.microbatch >= 0:
                self.reductions.setdefault(part.waits[0], []).append(part)
        self.results: dict[Key, torch.Tensor | None] = {}
        self.step, self.host_seconds = 0, dict[int, float]()

    def run(self, step: int, tokens: dict[int, Tokens]) -> None:
        """`tokens[piece]` are inputs and targets [T] of the pieces that this rank embeds or ends."""
        self.step, self.tokens = step, tokens
        self.lanes.begin()
        self.transport.begin()
        for stage in self.stages.values():
            stage.begin(step)
        started = time.monotonic()
        counter = 0
        while counter < len(self.stream):
            self.board.write(step, counter)
            self.refuse_if_fenced()
            self.lanes.near(self.refuse_if_fenced)
            # A backward has operations to start before it computes anything, so of a pair it is the first.
            interleave(*map(self._execute, reversed(self.stream[counter].parts)))
            counter += 1
            if self.again:
                self._start_again()
                counter = 0
        self.transport.settle()
        self.host_seconds[step] = time.monotonic() - started
        self.board.write(step, -1)

    def _execute(self, part: Instruction) -> Turns[None]:
        with self.lanes.on(part):
            yield  # a pair begins when both have what they wait for
            yield from self._turns(part)

    def _turns(self, part: Instruction) -> Turns[None]:
        _, stage, mb, *_ = part
        match part.op:
            case Op.F:
                received = self._input(part, Op.RECV_F, (Op.F,), stage - 1)
                found = self.tokens.get(mb)
                inputs = found.inputs if found and stage == 0 else None
                ends = found and self.stages[stage].last
                targets, further = (found.targets, found.further) if found and ends else (None, None)
                starts = found.documents if found else ()
                turns = self.stages[stage].forward(mb, received, inputs, targets, further, starts)
                self.results[part.key] = yield from turns
            case Op.B | Op.BW:
                dy = self._input(part, Op.RECV_B, (Op.B, Op.BW), stage + 1)
                turns = self.stages[stage].backward_input(mb, dy)
                if part.op is Op.BW:  # W of a layer runs while operations of the one before it do
                    turns = on_yield(turns, partial(self._weigh, part))
                # with no one to wait for, the other of a pair would only delay it
                self.results[part.key] = run_to_completion(turns) if self.stages[stage].is_alone else (yield from turns)
            case Op.W:
                self._weigh(part)
            case Op.RECOMPUTE:
                self.stages[stage].recompute(mb)
            case Op.OFFLOAD:
                self.away.send(part.key[1:], self.stages[stage].movable(mb))
            case Op.RELOAD:
                self.away.bring_back(part.key[1:])
            case Op.SEND_F | Op.SEND_B:
                result = self.results.pop(part.waits[0])
                assert result is not None
                self.transport.send(part, result)
            case Op.RECV_F | Op.RECV_B:
                self.results[part.key], work = self.transport.receive(part)
                if work is not None:
                    self.lanes.finish_with(part, [work])
            case Op.ALL_REDUCE:
                self.lanes.finish_with(part, self._reduce(part))
            case Op.ALL_GATHER:
                self.lanes.finish_with(part, self.shards.gather(part, self.groups))
            case Op.FREE:
                self.shards.free(part)
            case Op.REDUCE_SCATTER:
                self.lanes.finish_with(part, self.shards.scatter(part, self.groups))
            case Op.NORM:
                self.end.reduce(self.step, self.refuse_if_fenced)
            case Op.STEP:
                self.end.take(self.step)
            case Op.VALIDATE:
                self.valid = self.end.validate(self.refuse_if_fenced)
            case Op.ROLLBACK:
                self.again = not self.valid
            case _:
                raise AssertionError(f"no worker runs {part.op}")

    def _reduce(self, part: Instruction) -> list[dist.Work]:
        running, number = [], max(0, part.microbatch)
        for bank, group in zip(self.stages[part.stage].banks, self.groups.holders[part.stage], strict=True):
            assert bank.whole is not None
            bucket = bank.whole[bank.buckets[number].span]
            if group is not None and bucket.numel():
                running.append(dist.all_reduce(bucket, group=group, async_op=True))
        return running

    def _weigh(self, part: Instruction) -> None:
        """W, of as much as B has got to. What of the stage's gradients is whole now may be reduced meanwhile."""
        stage = self.stages[part.stage]
        self.lanes.past(self.refuse_if_fenced)  # gradients of a step that may yet be taken stay (Barrier.advance)
        stage.backward_weight(part.microbatch)
        for reduction in self.reductions.get(part.key, ()):
            if all(bank.buckets[reduction.microbatch].layer >= stage.reached for bank in stage.banks):
                self.lanes.leave(part, reduction)

    def _input(self, part: Instruction, receive: Op, ops: tuple[Op, ...], stage: int) -> torch.Tensor | None:
        """What F or B reads: from a slot, or this rank's own result of the neighbouring stage; none at the ends."""
        mb = part.microbatch
        keys = (Key(receive, part.stage, mb), *(Key(op, stage, mb) for op in ops))
        return next((self.results.pop(key) for key in keys if key in self.results), None)

    def _start_again(self) -> None:
        """Forgets what the step has computed so far; the ranks at the other ends of its transfers do the same."""
        self.transport.settle()
        self.lanes.drop(self.refuse_if_fenced)
        self.transport.begin()
        self.results.clear()
        self.away.forget()
        for stage in self.stages.values():
            stage.kept.clear()
            stage.begin(self.step)
        self.again = False

    def refuse_if_fenced(self) -> None:
        if self.fenced:
            raise Aborted
