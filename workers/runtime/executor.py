"""Runs the instruction stream of one rank: a loop over instructions with one `match`."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

from pentad.schedules.ir.instruction import COMPUTE, RECEIVES, SENDS, Action, Instruction, Key, Op
from pentad.schedules.passes.post_validation import NORM
from pentad.workers.data.batch_loader import Batch, Tokens
from pentad.workers.evaluation.loss_totals import LossTotals
from pentad.workers.lanes.progress_file import ProgressFile
from pentad.workers.lanes.step_graphs import REPEATED, StepGraphs
from pentad.workers.lanes.streams import Check, HostStreams, Lanes
from pentad.workers.linear.fp8_gradients import KeptGradients, PendingSums
from pentad.workers.linear.fp8_sample import GradientSums
from pentad.workers.linear.fp8_samples import PendingSamples
from pentad.workers.model.base_stage import BaseStage, StageInputs
from pentad.workers.parallel.async_ops import Task, host_waits, interleave, on_yield, run_to_completion
from pentad.workers.parallel.process_groups import ProcessGroups
from pentad.workers.params.router_bias import PendingLoad, reports_load
from pentad.workers.runtime.activation_offload import ActivationOffload
from pentad.workers.runtime.optimizer_step import OptimizerStep
from pentad.workers.runtime.rank_program import IssuedStep, RankProgram
from pentad.workers.runtime.results import total_load
from pentad.workers.runtime.zero import Collectives, ZeroShards
from pentad.workers.transport.p2p import P2PTransport
from pentad.workers.transport.p2p_ipc import IpcTransport

RunAction = Callable[[Action], None]
OF_MICROBATCH = {*COMPUTE, *SENDS, *RECEIVES, Op.RECOMPUTE, Op.OFFLOAD, Op.RELOAD}
# What a rehearsal of a step leaves out.
ENDS = frozenset({Op.LOSS, Op.NORM, Op.STEP, Op.VALIDATE, Op.ROLLBACK})


@dataclass(eq=False)
class Executor:
    """Runs programs with the stages, process groups and lanes of one rank.

    `issued` holds the steps whose results have not been read; `host_seconds[step]` is how long the host took to issue
    one. Before every instruction, and while it waits, the host calls `check`, which raises Aborted once the generation
    is over. With `graphs`, steps that repeat are launched as CUDA graphs.
    """

    stages: dict[int, BaseStage]
    groups: ProcessGroups
    transport: P2PTransport | IpcTransport
    lanes: Lanes
    progress: ProgressFile
    optimizer_step: OptimizerStep
    losses: LossTotals
    shards: ZeroShards
    collectives: Collectives
    activations: ActivationOffload
    check: Check
    graphs: StepGraphs | None = None

    def __post_init__(self) -> None:
        log = self.progress if isinstance(self.lanes, HostStreams) else self.lanes.progress
        host_waits.log = None if self.groups.layers.pool else log  # groups of a pool do not wait equally often
        self.progress.counts_waits = host_waits.log is self.progress
        self.running: RankProgram | None = None
        self.results: dict[Key, Any] = {}
        self.sent: dict[Key, Any] = {}  # by SEND, which may still be reading it
        self.step, self.round, self.host_seconds = 0, 0, dict[int, float]()
        self.valid, self.restart, self.target_tokens = True, False, 0
        self.empty: frozenset[int] = frozenset()  # microbatches of the step that are skipped
        self.issued = dict[int, IssuedStep]()
        self.fp8_samples = dict[int, list[PendingSamples]]()  # by step, one for each stage
        self.expert_loads = dict[int, list[PendingLoad]]()  # likewise
        self.rehearses = False
        self.kept: KeptGradients | None = None
        self.gradient_sums = dict[int, PendingSums]()  # by step compared

    def run(
        self, program: RankProgram, step: int, batch: Batch, marked: Callable[[RunAction], RunAction] | None = None
    ) -> None:
        """Issues one step; `marked` wraps the function that runs each action. Raises Aborted if the generation ends."""
        run_action = self._run_action if marked is None else marked(self._run_action)
        self.issued[step] = IssuedStep(program, batch.row_sources, batch.rows_by_slot)
        compares = self.optimizer_step.compares(step)
        if compares:
            self.validate()
        self._begin(program, step, batch.tokens, batch.empty)
        self.shards.begin(program.number)
        self.activations.begin(program.number)
        self.target_tokens = batch.target_tokens
        self.optimizer_step.totals.begin(batch.counts)
        for stage in self.stages.values():
            stage.begin(step, program.microbatches, self.target_tokens)
        started = time.monotonic()
        if compares:
            self._rehearse(program)
        if self.graphs is not None:
            self.graphs.begin(self._repeated(program, batch))
        counter = 0
        while counter < len(program.stream):
            self.progress.write(step, counter, program.number)
            run_action(program.stream[counter])
            counter += 1
            if self.restart:
                self._restart_step(program)
                counter = 0
        self._finish_sends()
        if self.graphs is not None:
            self.graphs.end()
        self.host_seconds[step] = time.monotonic() - started
        self.progress.write(step, -1, program.number)

    def evaluate(self, program: RankProgram, step: int, number: int, data_set: int, tokens: dict[int, Tokens]) -> None:
        """Issues round `number` of an evaluation of the weights after `step` steps, on sequences of one data set.

        Raises Aborted if the generation ends.
        """
        self._begin(program, step, tokens)
        self.round = number
        if self.graphs is not None:
            self.graphs.begin(None)
        self.losses.begin(data_set)
        for stage in self.stages.values():
            stage.begin_evaluation()
        for counter, action in enumerate(program.stream, number * len(program.stream)):
            self.progress.write(step, counter, program.number)
            self._run_action(action)
        self._finish_sends()

    def close(self) -> None:
        self.graphs = None  # frees their memory, too
        ends = self.activations, self.optimizer_step, self.collectives, *self.groups.layers.rows, self.transport
        for each in ends:
            each.close()

    def validate(self) -> bool:
        """VALIDATE: commits the previous step. False if that has changed the compute weights."""
        valid = self.optimizer_step.validate(self.check)
        if not valid:
            self.collectives.after_update()
        return valid

    def _begin(
        self, program: RankProgram, step: int, tokens: dict[int, Tokens], empty: frozenset[int] = frozenset()
    ) -> None:
        self.running, self.step, self.tokens, self.empty = program, step, tokens, empty
        self.shards.refresh(self.collectives)
        self.lanes.begin_step()
        self._begin_exchanges(program)

    def _begin_exchanges(self, program: RankProgram) -> None:
        self.transport.begin_step(program.number)
        for rows in self.groups.layers.rows:
            rows.begin_step()

    def _repeated(self, program: RankProgram, batch: Batch) -> Hashable:
        """The key that this step shares with all steps that look the same to the GPU; None if it has to be issued."""
        constants = tuple(stage.constants for stage in self.stages.values())
        uneven = any(tokens.share is not None or any(tokens.document_starts) for tokens in batch.tokens.values())
        return None if uneven or None in constants else (program.number, *constants)

    def _run_action(self, action: Action) -> None:
        self.check()
        self.lanes.throttle(self.check)
        # The program infers from its transfers which SENDs have ended; empty microbatches are not transferred.
        for key in () if self.empty else self._running.ended_sends.get(action.key, ()):
            self.sent.pop(key, None)
        if any(part.op in (Op.W, Op.BW) for part in action.parts):
            self.lanes.wait_previous_step(self.check)  # that step may still need its gradients (BarrierStep.commit)
            self.optimizer_step.forget()
        graphs = self.graphs if action.parts[0].op in REPEATED else None
        if graphs is not None and graphs.mode != "issue":
            self._repeat(action, graphs)
        else:
            with nullcontext() if graphs is None else graphs.memory.allocating():
                interleave(*map(self._issue, _as_begun(action)))
        self.lanes.end_action(action)

    def _repeat(self, action: Action, graphs: StepGraphs) -> None:
        """Captures an action and launches it, or only launches it if an earlier step has captured it."""
        parts, is_captured = _as_begun(action), graphs.mode == "launch"
        with ExitStack() as issued:
            for part in parts:
                issued.enter_context(self.lanes.issue(part))
                if is_captured:
                    self._input(part)
                    self.results[part.key] = None  # its readers are captured too, or are SENDs
            graphs.run(action.key, lambda: interleave(*map(self._execute, parts)))
        for key in self._running.sent.intersection(part.key for part in parts):
            found = graphs.made(("sent", key), partial(graphs.memory.address, self.results[key]))
            if is_captured:
                self.results[key] = found

    def _issue(self, part: Instruction) -> Task[None]:
        with self.lanes.issue(part):
            if part.lane == "compute":
                self.activations.release(part.waits)
            if part.microbatch in self.empty and part.op in OF_MICROBATCH:
                self._leave_out(part)
            else:
                yield from self._execute(part)

    def _leave_out(self, part: Instruction) -> None:
        """Runs an instruction of a microbatch in which this pipeline's ranks have no tokens: later instructions find
        what they wait for, and gradients without contributions are zero."""
        match part.op:
            case Op.W | Op.BW:
                self._run_weight_grad(part)
            case Op.OFFLOAD:
                self.activations.offload((part.stage, part.microbatch), [])
            case Op.RELOAD:
                self.activations.reload((part.stage, part.microbatch))
            case Op.SEND_F | Op.SEND_B:
                self.transport.leave_out(part)

    def _execute(self, part: Instruction) -> Task[None]:
        index = part.microbatch
        match part.op:
            case op if self.rehearses and op in ENDS:
                pass
            case Op.F:
                yield from self._forward(part)
            case Op.B | Op.BW:
                yield from self._backward(part)
            case Op.W:
                self._run_weight_grad(part)
            case Op.RECOMPUTE:
                self.stages[part.stage].recompute(index)
            case Op.OFFLOAD:
                storages = self.stages[part.stage].offloadable(index)
                self.activations.offload((part.stage, index), storages, self.tokens.get(index))
            case Op.RELOAD:
                self.activations.reload((part.stage, index))
            case Op.SEND_F | Op.SEND_B:
                self.sent[part.key] = self._input(part)
                self.transport.send(part, self.sent[part.key])
            case Op.RECV_F | Op.RECV_B:
                self.results[part.key], work = self.transport.receive(part, self._rows(part))
                if work is not None:
                    self.lanes.end_with(part, [work])
            case Op.ALL_REDUCE | Op.REDUCE_SCATTER:
                self._reduce(part)
            case Op.ALL_GATHER:
                self.lanes.end_with(part, self.shards.gather(part, self.collectives, self._running.number))
            case Op.FREE:
                self.shards.free(part)
            case Op.LOSS:
                self.losses.reduce()
            case Op.NORM:
                for index, stage in self.stages.items():
                    self._complete_gradients(part, index)
                    if stage.casts is not None and (samples := stage.casts.take_samples()) is not None:
                        self.fp8_samples.setdefault(self.step, []).append(samples)
                    if (
                        stage.expert_load is not None
                        and self.optimizer_step.totals.at.tp == 0
                        and reports_load(self.step)
                    ):
                        self.expert_loads.setdefault(self.step, []).append(stage.expert_load.copy())
                self.shards.sum_replicas()
                self.optimizer_step.reduce_norm(self.step, self.check)
                if self.kept is not None:
                    self.gradient_sums[self.step], self.kept = self.kept.compared(), None
            case Op.STEP:
                self._update()
            case Op.VALIDATE:
                self.valid = self.validate()
            case Op.ROLLBACK:
                self.restart = not self.valid
            case _:
                assert_never(part.op)

    def _update(self) -> None:
        """STEP, once this rank's NORM is done; with post-validation, NORM waits for no other rank."""
        self.lanes.join(NORM)
        self.optimizer_step.step(self.step, self.check)
        self.shards.updated(self.collectives)

    def _rehearse(self, program: RankProgram) -> None:
        """Runs a step in the compute dtype up to its gradients, keeps these for a comparison, and undoes the step."""
        self.rehearses = True
        if self.graphs is not None:
            self.graphs.begin(None)
        for stage in self.stages.values():
            stage.use_8_bits(False)
        for counter, action in enumerate(program.stream):
            self.progress.write(self.step, counter, program.number)
            self._run_action(action)
        self.lanes.finish(self.check)
        self.shards.sum_replicas()
        for stage in self.stages.values():
            stage.complete_gradients()
        self.kept = self.optimizer_step.kept_gradients()
        for stage in self.stages.values():
            stage.use_8_bits(True)
        self.rehearses = False
        self._restart_step(program)

    def take_gradient_sums(self, step: int) -> tuple[GradientSums, ...]:
        """The gradient comparison of a step whose results are being read, as in StepResult; forgets it."""
        found = self.gradient_sums.pop(step, None)
        return () if found is None else found.read()

    def take_expert_load(self, step: int) -> dict[int, tuple[int, ...]]:
        """The expert load of a step whose results are being read, as in StepResult; forgets it."""
        return total_load(each.read() for each in self.expert_loads.pop(step, ()))

    def _forward(self, part: Instruction) -> Task[None]:
        stage, tokens = self.stages[part.stage], self.tokens.get(part.microbatch)
        inputs = StageInputs(self._input(part))
        if tokens is not None and part.stage == 0:
            inputs = inputs._replace(tokens=tokens.inputs)
        if tokens is not None and stage.last:
            mtp = tokens.mtp_targets, tokens.mtp_inputs
            inputs = inputs._replace(targets=tokens.targets, mtp_targets=mtp[0], mtp_inputs=mtp[1])
        if tokens is not None:
            mask = tokens.document_starts, tokens.positions, tokens.share
            inputs = inputs._replace(document_starts=mask[0], positions=mask[1], share=mask[2])
        if self._running.forward_only:
            task = stage.evaluate(part.microbatch, inputs)
            if inputs.targets is not None:
                self.losses.count(part.microbatch // self.losses.slices, inputs.targets)
        else:
            task = stage.forward(part.microbatch, inputs)
        self.results[part.key] = yield from task

    def _backward(self, part: Instruction) -> Task[None]:
        stage = self.stages[part.stage]
        task = stage.backward_input(part.microbatch, self._input(part))
        if part.op is Op.BW:  # W of a layer runs while B of the layer below communicates
            task = on_yield(task, partial(self._run_weight_grad, part))
        # Without communication there is nothing to overlap: yielding would only delay the other half of a pair.
        self.results[part.key] = run_to_completion(task) if stage.is_local else (yield from task)

    def _run_weight_grad(self, part: Instruction) -> None:
        """W, of the layers that B has passed."""
        self.stages[part.stage].backward_weight(part.microbatch)

    def _complete_gradients(self, part: Instruction, stage: int) -> None:
        """Zeroes the gradients that no W has written. With graphs the stage's list of them is that of the captured
        step: in a launched one, the stage runs no W itself."""
        take_all = self.stages[stage].unwritten.take_all
        left = take_all() if self.graphs is None else self.graphs.made((part.key, stage), take_all)
        for gradient in left:
            gradient.zero_()

    def _finish_sends(self) -> None:
        self.transport.finish_sends()
        self.lanes.join_sends()
        self.sent.clear()

    def _reduce(self, part: Instruction) -> None:
        """Adds up a stage's gradients over its holders."""
        self._complete_gradients(part, part.stage)
        if part.op is Op.REDUCE_SCATTER:
            works = self.shards.scatter(part, self.collectives, is_last=part.key in self._running.last_reductions)
        else:
            works = self.shards.all_reduce(part, self.groups)
        self.lanes.end_with(part, works)

    def _rows(self, part: Instruction) -> int | None:
        """The rows of the residual stream that a transfer brings; None if their number is fixed."""
        tokens = self.tokens.get(part.microbatch)
        if tokens is None or not self.optimizer_step.plan.batch.capacity:
            return None
        return len(tokens.inputs) // self.groups.layers.tp.size

    def _input(self, part: Instruction) -> Any:
        source = self._running.sources.get(part.key)
        return None if source is None else self.results.pop(source)

    @property
    def _running(self) -> RankProgram:
        assert self.running is not None
        return self.running

    def _restart_step(self, program: RankProgram) -> None:
        """ROLLBACK: discards what the step has computed; the peers of its transfers do the same."""
        self._finish_sends()
        self.lanes.discard_step(self.check)
        self._begin_exchanges(program)
        self.results.clear()
        self.activations.discard()
        self.shards.unsummed.clear()
        for stage in self.stages.values():
            stage.saved.clear()
            stage.begin(self.step, program.microbatches, self.target_tokens)
        self.restart = False


def _as_begun(action: Action) -> Sequence[Instruction]:
    """The parts of an action in the order in which they begin. The backward of an overlapped pair goes first, as it
    communicates before it computes, and waits for what both halves need, so that neither half's time includes a
    wait."""
    if isinstance(action, Instruction):
        return action.parts
    return action.backward._replace(waits=action.waits), action.forward._replace(waits=())
