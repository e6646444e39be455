"""A few long-lived rank processes that run many plans: importing torch once is the cost of a rank."""

from __future__ import annotations

import faulthandler
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from early import watch
from gpus import gpu_of
from plans import TILE
from pool import Pool

from pentad.schedules.spec.plan import Plan


@dataclass
class Outcome:
    """One rank's results, and its gradients before clipping and last state, by global parameter name, of which a shard
    may hold a part (see `assembled`). `bytes` is what its buffers take."""

    results: list
    gradients: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]
    shards: list[dict]
    bytes: dict[str, int]


def named(parameters, flat: torch.Tensor, kind: str = "") -> dict[str, torch.Tensor]:
    """Tensors of a flat buffer by name; parts of tensors as 'NAME@RANGES@FIRST', flat."""
    from pentad.workers.params.sharded_state import stored

    found = {}
    for local, span, values in parameters.pieces(flat):
        value = values.cpu().clone()
        if local.is_whole and values.numel() == torch.Size(local.shape).numel():
            found[kind + local.name] = value.view(local.shape)
        else:
            ranges = stored(local).partition("@")[2]
            found[f"{kind}{local.name}@{ranges}@{span.start}"] = value
    return found


def assembled(parts: list[dict[str, torch.Tensor]], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors, shaped `like` others, from what ranks hold of them; what several hold must have the same bits."""
    from pentad.workers.params.sharded_state import Assembly

    found: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for part in parts:
        for key, value in part.items():
            name, ranges, first = (key + "@@0" if "@" not in key else key).split("@")
            shards = found.setdefault(name, {}).setdefault(ranges, {})
            assert torch.equal(shards.setdefault(int(first), value), value), key
    whole = {}
    for name, by_ranges in found.items():
        made = Assembly(tuple(like[name].shape))
        for ranges, shards in by_ranges.items():
            flat = torch.cat([value.flatten() for _, value in sorted(shards.items())])
            made.put(flat, f"{name}@{ranges}" if ranges else name)
        assert not made.missing, name
        whole[name] = made.whole
    return whole


def losses_of(outcomes: list[Outcome], step: int = 0) -> dict[int, float]:
    """Summed losses of the pieces of a step; ranks that share a piece say the same."""
    return {piece: loss for outcome in outcomes for piece, loss in outcome.results[step].losses.items()}


class Poison(NamedTuple):
    """What the first element of a rank's gradients is, at the end of a step."""

    rank: int
    step: int
    value: float


class Fleet:
    """`size` processes; `run` gives each a rank of the plan."""

    def __init__(self, size: int) -> None:
        self.pool = Pool(size, _serve)

    def run(
        self,
        plan: Plan,
        calls: list[tuple[int, int] | tuple[int, int, bool]],
        restore: str | None = None,
        save: str | None = None,
        poison: Poison | None = None,
    ) -> list[Outcome]:
        """`calls` are (first step, count, whether more follow); raises with a rank's traceback when one fails."""
        ranks = range(plan.mesh.size)
        poisons = [poison if poison and poison.rank == rank else None for rank in ranks]
        self.pool.order([(plan, rank, calls, restore, save, poisons[rank]) for rank in ranks])
        address = self.pool.heard(0)
        assert "\n" not in address, f"rank 0: {address}"
        for end in self.pool.ends[: plan.mesh.size]:
            end.send(address)
        return self.pool.answers(plan.mesh.size, Outcome)

    def stop(self) -> None:
        self.pool.stop()


def _serve(end: Connection, *_: object) -> None:
    from pentad.schedules.spec import plan

    torch.set_num_threads(1)
    faulthandler.enable()
    plan.TILE = TILE
    while True:
        try:
            order = end.recv()
        except EOFError:
            return
        if isinstance(order, str):  # where to meet, after this rank has failed
            continue
        try:
            faulthandler.dump_traceback_later(80)
            end.send(_run(end, *order))
            faulthandler.cancel_dump_traceback_later()
        except BaseException:
            end.send(traceback.format_exc())


def _run(
    end: Connection,
    plan: Plan,
    rank: int,
    calls: list[tuple[int, int] | tuple[int, int, bool]],
    restore: str | None,
    save: str | None,
    poison: Poison | None,
) -> Outcome:
    from pentad.workers.params import optimizer
    from pentad.workers.runtime.runner import Runner

    gradients: list[dict[str, torch.Tensor]] = []
    real_step, real_sum = optimizer.step, optimizer.square_sum
    sums = 0  # of a stage's squares
    owned = sum(plan.shards(share) > 1 or plan.owner(share) == rank for share in plan.shares_of(rank))

    def seen(parameters, shape, number, scale):
        while len(gradients) <= number - calls[0][0]:
            gradients.append({})
        gradients[number - calls[0][0]] |= named(parameters, parameters.gradient)
        real_step(parameters, shape, number, scale)

    def poisoned(parameters, counted):
        nonlocal sums
        if poison is not None and sums == poison.step * owned:
            parameters.gradient[0, 0] = poison.value
        sums += 1
        return real_sum(parameters, counted)

    optimizer.step, optimizer.square_sum = seen, poisoned
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(plan, rank, Path(folder, "board"), gpu=gpu_of(rank))
        try:
            if rank == 0:
                end.send(runner.serve("127.0.0.1", 60))
            runner.connect(end.recv(), 60)
            if plan.device == "cpu":
                assert runner.executor is not None
                watch(runner.executor)
            runner.restore(restore)
            results = [result for call in calls for result in runner.run(*call)]
            shards = runner.save(save, sum(calls[-1][:2])) if save else []
            state: dict[str, torch.Tensor] = {}
            for held in runner.parameters.values():
                for kind, flat in held.state().items():
                    state |= named(held, flat, f"{kind}.")
            held_bytes = buffers(runner.parameters, runner.shards)
        finally:
            optimizer.step, optimizer.square_sum = real_step, real_sum
            runner.close()
    return Outcome(results, gradients, state, shards, held_bytes)


def buffers(parameters, shards) -> dict[str, int]:
    """Bytes of a rank's weights, gradients and optimizer state, every storage counted once."""
    kinds: dict[str, list[torch.Tensor]] = {"parameters": [], "gradients": [], "optimizer": [], "master": []}
    for held in parameters.values():
        kinds["parameters"] += [held.compute] if held.weights is None else [held.weights]
        kinds["gradients"] += [held.gradient] if held.gradients is None else [held.gradients]
        kinds["optimizer"] += [held.m, held.v]
        kinds["master"].append(held.master)
    kinds["parameters"] += shards.weights.values()
    kinds["gradients"] += shards.gradients.values()
    seen: set[int] = set()
    found = {}
    for kind, tensors in kinds.items():
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        found[kind] = sum(size for at, size in storages.items() if at not in seen)
        seen |= storages.keys()
    return found
