"""A few long-lived rank processes that run many plans."""

from __future__ import annotations

import faulthandler
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from bf16_sums import Reduced, recorded_reductions
from gpus import gpu_of
from host_copies import copy_on_cpus
from plans import TILE
from pool import Pool, send

from pentad.kernels.optimizer.param_remainders import SplitFloat32
from pentad.orchestrator.activations.offloaded_tensors import with_slots
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.zero_layout import replicas
from pentad.workers.runtime.results import Evaluation

# First step, number of steps, whether more calls follow; or an evaluation after this many steps.
Call = tuple[int, int] | tuple[int, int, bool] | tuple[int]


@dataclass
class Outcome:
    """One rank's results, its gradients of every step before clipping, its final state, its manifest entries, the bytes
    of its buffers by kind, its evaluations, its reductions if they are in bfloat16, and how often it restarted a step.
    Tensors are by global name; a ZeRO rank holds parts of them (see `assemble`)."""

    results: list
    gradients: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]
    shards: list[dict]
    bytes: dict[str, int]
    evaluations: list[Evaluation]
    reductions: list[Reduced]
    restarts: int


def tensors_by_name(parameters, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a flat buffer; parts of tensors are flat and named 'NAME@RANGES@FIRST ELEMENT'."""
    return dict(_named("", *part) for part in parameters.shard_parts(flat))


def state_by_name(parameters) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, likewise; names begin with the kind."""
    return dict(_named(f"{kind}.", *part) for kind, *part in parameters.state_parts())


def _named(prefix: str, local, span: slice, values: torch.Tensor) -> tuple[str, torch.Tensor]:
    from pentad.workers.params.sharded_state import stored_name

    value = values.cpu().clone()
    if local.is_full and values.numel() == torch.Size(local.shape).numel():
        return prefix + local.name, value.view(local.shape)
    ranges = stored_name(local).partition("@")[2]
    return f"{prefix}{local.name}@{ranges}@{span.start}", value


def assemble(parts: list[dict[str, torch.Tensor]], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Full tensors, in the shapes of `like`, from the parts of all ranks. Copies of a part must be bit-identical."""
    from pentad.workers.params.sharded_state import TensorAssembly

    found: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for part in parts:
        for key, value in part.items():
            name, ranges, first = (key + "@@0" if "@" not in key else key).split("@")
            shards = found.setdefault(name, {}).setdefault(ranges, {})
            assert torch.equal(shards.setdefault(int(first), value), value), key
    full = {}
    for name, by_ranges in found.items():
        assembly = TensorAssembly(tuple(like[name].shape))
        for ranges, shards in by_ranges.items():
            flat = torch.cat([value.flatten() for _, value in sorted(shards.items())])
            assembly.add(flat, f"{name}@{ranges}" if ranges else name)
        assert not assembly.missing, name
        full[name] = assembly.tensor
    return full


def losses_of(outcomes: list[Outcome], step: int = 0) -> dict[int, float]:
    """Sums of token losses of a step, by microbatch."""
    return {microbatch: loss for outcome in outcomes for microbatch, loss in outcome.results[step].losses.items()}


class BadGradient(NamedTuple):
    """Sets the first element of a rank's gradients at the end of a step."""

    rank: int
    step: int
    value: float


class Fleet:
    """`size` processes; `run` gives each a rank of a plan."""

    def __init__(self, size: int) -> None:
        self.pool = Pool(size, _serve)

    def run(
        self,
        plan: Plan,
        calls: list[Call],
        restore: str | None = None,
        save: str | None = None,
        bad_gradient: BadGradient | None = None,
        optimizer: bool = True,
    ) -> list[Outcome]:
        """Runs the calls in a new generation. Fails with the traceback of the first rank that fails. `optimizer`:
        restores its state too."""
        plan, ranks = with_slots(plan), range(plan.mesh.size)
        faults = [bad_gradient if bad_gradient and bad_gradient.rank == rank else None for rank in ranks]
        self.pool.send([(plan, rank, calls, restore, save, faults[rank], optimizer) for rank in ranks])
        address = self.pool.receive(0)
        assert "\n" not in address, f"rank 0: {address}"
        for end in self.pool.ends[: plan.mesh.size]:
            end.send(address)
        return self.pool.answers(plan.mesh.size, Outcome)

    def stop(self) -> None:
        self.pool.stop()


def _serve(end: Connection, *_: object) -> None:
    from pentad.schedules.spec import row_slots
    from pentad.workers.params import host_state, muon

    torch.set_num_threads(1)
    faulthandler.enable()
    row_slots.TILE_TOKENS = TILE
    muon.ROUND_ELEMENTS = 512  # so that small models have several rounds
    while True:
        try:
            order = end.recv()
        except EOFError:
            return
        if isinstance(order, str):  # the address, sent after this rank has failed
            continue
        try:
            if order[0].device == "cpu":
                host_state.PIECE_ELEMENTS = 512  # and several pieces
                if order[0].transport == "peer":
                    copy_on_cpus()
            faulthandler.dump_traceback_later(80)
            send(end, _run(end, *order))
            faulthandler.cancel_dump_traceback_later()
        except BaseException:
            end.send(traceback.format_exc())


def _run(
    end: Connection,
    plan: Plan,
    rank: int,
    calls: list[Call],
    restore: str | None,
    save: str | None,
    bad_gradient: BadGradient | None,
    optimizer_state: bool,
) -> Outcome:
    from recorded_graphs import record_graphs

    from pentad.workers.params import optimizer
    from pentad.workers.runtime.runner import Runner

    gradients: list[dict[str, torch.Tensor]] = []
    real_step, real_sum = optimizer.step, optimizer.square_sum
    sums = 0  # calls of square_sum so far
    sums_per_step = sum(replicas(plan, share, rank)[0] == rank for share in plan.param_shards_of(rank))

    def recording_step(parameters, spec, number, scale, directions=None):
        while len(gradients) <= number - calls[0][0]:
            gradients.append({})
        gradients[number - calls[0][0]] |= tensors_by_name(parameters, parameters.gradient)
        real_step(parameters, spec, number, scale, directions)

    def faulty_sum(parameters, counted):
        nonlocal sums
        if bad_gradient is not None and sums == bad_gradient.step * sums_per_step:
            parameters.gradient[0] = bad_gradient.value
        sums += 1
        return real_sum(parameters, counted)

    optimizer.step, optimizer.square_sum = recording_step, faulty_sum
    with tempfile.TemporaryDirectory() as folder, recorded_reductions(plan) as reductions, restarted() as restarts:
        runner = Runner(plan, rank, Path(folder, "progress"), gpu=gpu_of(rank))
        try:
            if rank == 0:
                end.send(runner.serve("127.0.0.1", 60))
            runner.connect(end.recv(), 60)
            record_graphs(runner)
            runner.restore(restore, optimizer=optimizer_state)
            torch.distributed.barrier()  # as with a driver, no step begins before all ranks have their state
            results, evaluations = [], []
            for call in calls:
                if len(call) == 1:
                    evaluations.append(runner.evaluate(*call))
                else:
                    results += runner.run(*call)
            shards = runner.save(save, sum(calls[-1][:2])) if save else []
            state: dict[str, torch.Tensor] = {}
            for parameters in runner.state.parameters.values():
                state |= state_by_name(parameters)
            sizes = buffer_bytes(runner.state.parameters, runner.shards, runner.state.frozen)
        finally:
            optimizer.step, optimizer.square_sum = real_step, real_sum
        runner.close()  # not after a failure: it would wait for ranks that wait for this one
    return Outcome(results, gradients, state, shards, sizes, evaluations, reductions, len(restarts))


@contextmanager
def restarted() -> Iterator[list[int]]:
    """The steps that this process restarts within the block."""
    from pentad.workers.runtime.executor import Executor

    steps, restart = list[int](), Executor._restart_step

    def recording_restart(executor, program):
        steps.append(executor.step)
        restart(executor, program)

    with patch.object(Executor, "_restart_step", recording_restart):
        yield steps


def buffer_bytes(parameters, shards, frozen) -> dict[str, int]:
    """Bytes of a rank's weights, gradients and optimizer state; every storage counts once."""
    kinds: dict[str, list[torch.Tensor]] = {
        "parameters": [],
        "gradients": [],
        "optimizer": [],
        "master": [],
        "host_optimizer": [],
    }
    for each in parameters.values():
        kinds["parameters"] += [each.compute] if each.full_weights is None else [each.full_weights]
        kinds["parameters"] += [] if each.in_8_bits is None else [each.in_8_bits.values]
        kinds["gradients"] += [each.gradient] if each.full_gradients is None else [each.full_gradients]
        kinds["optimizer" if each.host is None else "host_optimizer"] += [each.m, each.v]
        kinds["master" if each.host is None else "host_optimizer"] += [
            each.master.low if isinstance(each.master, SplitFloat32) else each.master,
            *([] if each.in_8_bits is None else [each.in_8_bits.master]),
        ]
    kinds["parameters"] += shards.weights
    kinds["parameters"] += [each.compute for each in frozen.values()]
    kinds["gradients"] += shards.gradients
    seen: set[int] = set()
    found = {}
    for kind, tensors in kinds.items():
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        found[kind] = sum(size for address, size in storages.items() if address not in seen)
        seen |= storages.keys()
    return found
