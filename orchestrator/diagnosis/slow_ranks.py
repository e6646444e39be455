"""Reports ranks and links that are slower than their peers on the terminal, in the status and in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import RankView, RunView, Watcher
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.diagnosis.slow_ranks import SlowRank, SlowRanks
from pentad.workers.runtime.telemetry import GpuState

LOWER = 0.97  # share of the other GPUs' median clock below which a GPU's clock counts as evidence


class SlowRankWatch(Watcher):
    """Compares the ranks of a generation with each other after every step (elastic.slow_rank)."""

    def __init__(self, bus: EventBus) -> None:
        self.bus = bus
        self.ranks = self._of_plan()

    def on_ranks_placed(self, view: RunView) -> None:
        self.ranks, self.bus.slow_ranks, self.bus.lasting_slow_ranks = self._of_plan(), "", ()

    def on_rank_times(self, times: tuple[RankTime, ...]) -> None:
        changes = self.ranks.add(times)
        self.bus.lasting_slow_ranks = tuple(self.ranks.lasting())
        for change in changes:
            found = sentence(change, self.bus.view.ranks, self.bus.gpus)
            self.bus.display.note(f"step {change.step}: {found}")
            event = "slow rank over" if change.over else "slow rank"
            facts = {"kind": change.kind, "ranks": change.ranks, "since": change.since, "excess": change.excess}
            self.bus.record(event, generation=self.bus.view.generation, step=change.step, **facts, sentence=found)
        if changes:
            named = self.ranks.named.values()
            self.bus.slow_ranks = "; ".join(sentence(each, self.bus.view.ranks, self.bus.gpus) for each in named)

    def _of_plan(self) -> SlowRanks:
        return SlowRanks(self.bus.folder.plan.program, self.bus.folder.plan.mesh)


def sentence(change: SlowRank, views: tuple[RankView, ...], gpus: Mapping[int, GpuState]) -> str:
    """The change in words, such as
    'rank 3 (dp1 pp1, GPU 3 of 10.0.0.4) computes 15 % longer than its peers since step 12: BW of stage 1 +16 %'."""
    names = [_name(rank, views) for rank in change.ranks]
    share = f"{100 * change.excess:.0f} %"  # medians of few steps are no more precise
    if change.over and change.kind == "link":
        return f"transfers from {names[0]} to {names[1]} are no longer slow"
    if change.over and change.kind == "starved":
        return f"the host of {names[0]} is no longer busy with other processes"
    if change.over:
        return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} no longer slow"
    since = f"since step {change.since}"
    match change.kind:
        case "link":
            return (
                f"transfers from {names[0]} to {names[1]} take {share} of a step's compute longer than others {since}"
            )
        case "data":
            return f"{names[0]} waits for its loader {share} of a step's compute longer than others {since}"
        case "starved":
            longer = f"waits for a core {share} of a step's compute longer than others {since}"
            return f"{names[0]} is ready to run, and {longer}: its host is busy with other processes"
        case "host":
            return f"the host of {names[0]} issues late, by {share} of a step's compute, {since}"
    evidence = [f"{op} of stage {stage} {100 * excess:+.0f} %" for op, stage, excess in change.evidence]
    evidence += _clock(change.ranks[0], gpus)
    subject = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    return f"{subject} computes {share} longer than its peers {since}" + (
        f": {', '.join(evidence)}" if evidence else ""
    )


def _name(rank: int, views: tuple[RankView, ...]) -> str:
    view = next((view for view in views if view.rank == rank), None)
    if view is None:
        return f"rank {rank}"
    return f"rank {rank} ({view.coordinates}, {f'GPU {view.gpu} of ' if view.gpu >= 0 else ''}{view.node})"


def _clock(rank: int, gpus: Mapping[int, GpuState]) -> list[str]:
    """Evidence from NVML: throttling, a lower clock than other GPUs, ECC errors and XIDs of the rank's GPU."""
    own = gpus.get(rank)
    clocks = [state.clock for other, state in gpus.items() if other != rank and state.clock]
    if own is None:
        return []
    found = [f"throttled ({', '.join(own.throttles)})"] if own.throttles else []
    if own.clock and clocks and own.clock < LOWER * (usual := median(clocks)):
        found.append(f"its clock is {own.clock / 1e6:.0f} MHz, that of others {usual / 1e6:.0f} MHz")
    if own.ecc_errors:
        found.append(f"{own.ecc_errors} uncorrected ECC errors")
    found += [f"XID {xid}" for xid in dict.fromkeys(own.xids or ())]
    return found
