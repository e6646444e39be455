"""How long things take: the one input of simulation and planning."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Op

WIDEST = 1e6  # beyond, sums of costs lose the small ones


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of one microbatch on each stage, and of what moves between ranks.

    `forward`, `backward` (input gradient only) and `weight` have an entry a stage; `transfer` is one hop of an
    activation or gradient (of a slice, where microbatches are cut: all slices count alike, though under a causal mask
    the later ones attend to more); `reduce` the gradient all-reduce of a stage, in however many parts; `norm`, `step`
    the end of a step; `launch` is added to every compute instruction. `recompute` is by stage (empty: as a forward),
    and so are the seconds that `offload` takes one way, and RELOAD the other (empty: none).

    `slow` is a factor by pipeline rank on every compute instruction, its launch included (empty: 1); `links[source]
    [target]` are the seconds of one hop between two pipeline ranks (empty: `transfer` between all). Where a transfer or
    collective of a rank runs, its compute advances 1 / (1 + `overlap`) as fast as alone.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: float = 0.0
    reduce: float = 0.0
    norm: float = 0.0
    step: float = 0.0
    launch: float = 0.0
    slow: tuple[float, ...] = ()
    overlap: float = 0.0
    links: tuple[tuple[float, ...], ...] = ()
    recompute: tuple[float, ...] = ()
    offload: tuple[float, ...] = ()

    @staticmethod
    def uniform(
        stages: int,
        forward: float = 1.0,
        backward: float = 1.0,
        weight: float = 1.0,
        *,
        chunks: int = 1,
        slices: int = 1,
        transfer: float = 0.0,
    ) -> Costs:
        """The same for every stage; `forward`, `backward`, `weight` are of a whole rank, a chunk costs 1/chunks.

        A slice has an even share, 1/slices, of these and of the `transfer`.
        """
        for name, value in {"F": forward, "B": backward, "W": weight}.items():
            if not 0 < value < inf:
                raise PentadError(f"--costs: {name} is {value}, but a cost must be finite and greater than 0")
        if (ratio := max(forward, backward, weight) / min(forward, backward, weight)) > WIDEST:
            raise PentadError(
                f"--costs: the largest is {ratio:g} times the smallest, but at most {WIDEST:g} times is told"
            )
        if not 0 <= transfer < inf:
            raise PentadError(f"--comm is {transfer}, but a transfer must be finite and cannot take less than 0")
        each = [(value / (chunks * slices),) * stages for value in (forward, backward, weight)]
        return Costs(each[0], each[1], each[2], transfer / slices)

    def of(self, instruction: Instruction) -> float:
        """Seconds of one instruction by itself, waiting not included."""
        stage = instruction.stage
        match instruction.op:
            case Op.F:
                return self.forward[stage] + self.launch
            case Op.B:
                return self.backward[stage] + self.launch
            case Op.W:
                return self.weight[stage] + self.launch
            case Op.BW:
                return self.backward[stage] + self.weight[stage] + self.launch
            case Op.SEND_F | Op.RECV_F | Op.SEND_B | Op.RECV_B:
                return self.transfer
            case Op.RECOMPUTE:
                return (self.recompute or self.forward)[stage] + self.launch
            case Op.OFFLOAD | Op.RELOAD:
                return self.offload[stage] if self.offload else 0.0
            case Op.ALL_REDUCE:
                return self.reduce
            case Op.REDUCE_SCATTER | Op.ALL_GATHER:
                return self.reduce / 2  # an all-reduce is the one and then the other
            case Op.NORM:
                return self.norm
            case Op.STEP:
                return self.step
            case _:
                return 0.0

    def on(self, rank: int, instruction: Instruction) -> float:
        """Seconds of one instruction by itself on a pipeline rank: `of`, with that rank's speed and links."""
        op = instruction.op
        if op in SENDS:
            return self.hop(rank, instruction.peer)
        if op in RECEIVES:
            return self.hop(instruction.peer, rank)
        return (
            self.of(instruction) * self.slow[rank]
            if self.slow and (op in COMPUTE or op is Op.RECOMPUTE)
            else self.of(instruction)
        )

    def hop(self, source: int, target: int) -> float:
        """Seconds of a transfer from one pipeline rank to another; 0 to itself."""
        if source == target:
            return 0.0
        return self.links[source][target] if self.links else self.transfer

    def require(self, ranks: int) -> None:
        """Raises PentadError where `slow`, `overlap` or `links` are no costs of `ranks` pipeline ranks."""
        if len(self.slow) not in (0, ranks):
            raise PentadError(f"costs.slow has {len(self.slow)} factors, but there are {ranks} ranks")
        for rank, factor in enumerate(self.slow):
            if not 0 < factor < inf:
                raise PentadError(f"costs.slow of rank {rank} is {factor}, but it must be finite and greater than 0")
        if not 0 <= self.overlap < inf:
            raise PentadError(f"costs.overlap is {self.overlap}, but it must be finite and at least 0")
        if len(self.links) not in (0, ranks) or any(len(row) != ranks for row in self.links):
            rows = [len(row) for row in self.links]
            raise PentadError(f"costs.links has rows of {rows} entries, but there are {ranks} rows of {ranks} expected")
        for source, row in enumerate(self.links):
            for target, seconds in enumerate(row):
                if not 0 <= seconds < inf:
                    text = f"costs.links from rank {source} to rank {target} is {seconds}"
                    raise PentadError(f"{text}, but it must be finite and at least 0")
