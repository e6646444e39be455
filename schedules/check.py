"""Proves, before anything runs, that a program is complete, ordered, matched and free of deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pentad.schedules.check_memory import check_memory
from pentad.schedules.check_validation import check_validation
from pentad.schedules.graph import Node, build, cycle, meetings
from pentad.schedules.grid import order_grid
from pentad.schedules.instruction import COLLECTIVES, COMPUTE, RECEIVES, SENDS, Instruction, Key, Op, Unit, units_of
from pentad.schedules.memory import changes_of
from pentad.schedules.order import ScheduleError, backward_ops, inputs_of
from pentad.schedules.program import Program, Stream
from pentad.schedules.validation import VALIDATE

WHOLE = frozenset({Op.NORM, Op.STEP, Op.VALIDATE, Op.ROLLBACK})  # of a rank, not of a stage
OF_STAGE = frozenset({Op.ALL_REDUCE, Op.REDUCE_SCATTER})  # not of a microbatch


def check(program: Program, *, replicas: int = 1) -> None:
    """Raises ScheduleError naming the culprit, with the grid of instructions around it. `replicas` is the mesh's dp.

    Proven, in this order: every stage is held; no instruction twice, each on a rank that holds its stage, with the peer
    or group that its op has; waits name earlier instructions; every microbatch has F, then B and W or BW, on one rank,
    weight gradients in microbatch order, slices of a microbatch on one rank and theirs from the last to the first;
    every result is there, or received, before it is used, and nothing else is received; slots are refilled only after
    their last reader; gradients are reduced after their last W and before NORM, NORM before STEP; the k-th send of a
    communicator meets the k-th receive of the same tensor; collectives of a group meet in the same order on every
    member; no cycle through lanes, waits, rendezvous and a host that waits at every compute unit.
    """
    with _drawn(program):
        _check_order(program)
        for rank, stream in enumerate(program.streams):
            _check_waits(rank, stream, program.positions[rank])
        _check_data(program)
        for rank, stream in enumerate(program.streams):
            _check_slots(rank, stream, program.positions[rank])
            _check_ending(rank, stream, program, replicas)
        check_memory(program)
        check_validation(program)
        _check_meetings(program)
        _check_cycle(program)


def check_order(program: Program) -> None:
    """The part of `check` that a compute order must pass before transfers can be placed."""
    with _drawn(program):
        _check_order(program)


@contextmanager
def _drawn(program: Program) -> Iterator[None]:
    """Puts the grid under what is said of a program."""
    try:
        yield
    except ScheduleError as error:
        grid = order_grid(program, mark=(error.rank, error.index))
        raise ScheduleError(f"program {program.name} is refused: {error}\n{grid}", error.rank, error.index) from None


def _check_order(program: Program) -> None:
    _check_placement(program)
    for rank, stream in enumerate(program.streams):
        _check_unique(rank, stream)
        _check_form(program, rank, stream)
    _check_complete(program)


def peak_activations(program: Program) -> list[float]:
    """Most activations each rank keeps at once, in microbatches of a whole rank; B frees half of one, W the rest.

    Nothing is kept of what is recomputed, from F to RECOMPUTE, or away on the host.
    """
    peaks = []
    for stream in program.streams:
        held = peak = 0.0
        for _, share in changes_of(stream):
            held += share
            peak = max(peak, held)
        peaks.append(peak / (program.chunks * program.slices))
    return peaks


def _check_placement(program: Program) -> None:
    held = {stage for stages in program.placement for stage in stages}
    whole = held == set(range(len(held))) and bool(held) and all(program.placement)
    if not whole or len(program.placement) != program.ranks:
        text = f"placement {program.placement} does not spread every stage from 0 over {program.ranks} ranks"
        raise ScheduleError(text)
    if program.microbatches < 1 or program.slices < 1:
        text = f"{program.microbatches} microbatches of {program.slices} slices"
        raise ScheduleError(f"there are {text}, but at least 1 is needed")


def _check_unique(rank: int, stream: Stream) -> None:
    seen: set[Key] = set()
    for index, unit in enumerate(stream):
        for part in unit.parts:
            if part.key in seen:
                raise ScheduleError(f"rank {rank} runs {part.key} twice", rank, index)
            seen.add(part.key)


def _check_form(program: Program, rank: int, stream: Stream) -> None:
    for index, unit in enumerate(stream):
        ops = tuple(part.op for part in unit.parts)
        if len(ops) == 2 and ops not in ((Op.F, Op.B), (Op.F, Op.BW)):
            raise ScheduleError(f"rank {rank}: {unit} is no pair of a forward and a backward", rank, index)
        for part in unit.parts:
            fault = _fault(program, rank, part)
            if fault:
                raise ScheduleError(f"rank {rank} runs {part.key}, but {fault}", rank, index)


def _fault(program: Program, rank: int, part: Instruction) -> str:
    """What is wrong with the fields of an instruction by themselves; empty if nothing is."""
    if part.op in WHOLE:
        if (part.stage, part.microbatch) != (-1, -1):
            return f"{part.op} has no stage and no microbatch"
    elif part.stage not in program.placement[rank]:
        return f"holds stages {program.placement[rank]}"
    elif part.op in (Op.ALL_GATHER, Op.FREE):
        return "" if part.microbatch >= 0 else "it has no number"
    elif part.op in OF_STAGE and part.microbatch != -1:
        return f"{part.op} has no microbatch"
    elif part.op not in OF_STAGE and not 0 <= part.microbatch < program.pieces:
        slices = f" of {program.slices} slices" if program.slices > 1 else ""
        return f"there are {program.microbatches} microbatches{slices}"
    if part.op is Op.NORM and part.group == "":  # of a step that is validated later
        return "" if part.peer == rank - 1 else f"its peer is {part.peer}, wanted {rank - 1}"
    if part.op is Op.VALIDATE and part.peer != program.ranks - 1:
        return f"its peer is {part.peer}, wanted {program.ranks - 1}"
    moves = part.op in SENDS or part.op in RECEIVES
    if moves and (part.peer == rank or not 0 <= part.peer < program.ranks):
        return f"its peer is {part.peer}, wanted another of the {program.ranks} ranks"
    group = "" if part.op not in COLLECTIVES else "pp" if part.op is Op.NORM else f"stage{part.stage}"
    if part.group != group:
        return f"its group is {part.group!r}, wanted {group!r}"
    return ""


def _check_waits(rank: int, stream: Stream, position: dict[Key, int]) -> None:
    for index, unit in enumerate(stream):
        for key in unit.waits:
            if key not in position:
                raise ScheduleError(f"rank {rank}: {unit.key} waits for {key}, which is not in its stream", rank, index)
            if position[key] >= index:
                raise ScheduleError(f"rank {rank}: {unit.key} waits for {key}, which comes after it", rank, index)


def _check_complete(program: Program) -> None:
    runs: dict[tuple[int, int], dict[Op, tuple[int, int]]] = {}
    for rank, stream in enumerate(program.streams):
        latest: dict[int, Key] = {}  # stage -> its weight gradient so far
        for index, unit in enumerate(stream):
            for part in unit.parts:
                if part.op not in COMPUTE:
                    continue
                ops = runs.setdefault((part.stage, part.microbatch), {})
                if part.op in ops:
                    raise ScheduleError(f"rank {rank} runs {part.key}, and so does rank {ops[part.op][0]}", rank, index)
                ops[part.op] = (rank, index)
                if part.op in (Op.W, Op.BW):
                    before = latest.get(part.stage, part.key)
                    if _turn(program, part.microbatch) < _turn(program, before.microbatch):
                        text = f"{part.key} comes after {before}, but gradients accumulate in microbatch order"
                        text += ", the slices of one from the last to the first" * (program.slices > 1)
                        raise ScheduleError(f"rank {rank}: {text}", rank, index)
                    latest[part.stage] = part.key
    for stage in range(program.stages):
        for mb in range(program.pieces):
            _check_microbatch(program, stage, mb, runs.get((stage, mb), {}))
            former = mb - 1 if mb % program.slices else mb
            (rank, index), (other, _) = (min(runs[stage, piece].values()) for piece in (mb, former))
            if rank != other:
                text = f"stage {stage}: slices {former} and {mb} of one microbatch run on ranks {other} and {rank}"
                raise ScheduleError(text, rank, index)


def _turn(program: Program, piece: int) -> tuple[int, int]:
    """Place of a piece in the order in which gradients accumulate."""
    return piece // program.slices, -(piece % program.slices)


def _check_microbatch(program: Program, stage: int, mb: int, runs: dict[Op, tuple[int, int]]) -> None:
    kinds = sorted(runs)
    if kinds not in (sorted([Op.F, Op.BW]), sorted([Op.F, Op.B, Op.W])):
        rank, index = next(iter(runs.values()), (program.holders(stage)[0], -1))
        f, b, w, bw = (Key(op, stage, mb) for op in (Op.F, Op.B, Op.W, Op.BW))
        have = ", ".join(str(Key(op, stage, mb)) for op in runs) or "nothing"
        want = f"{f} with {bw} or with {b} and {w}"
        raise ScheduleError(f"stage {stage}, microbatch {mb}: found {have}, wanted {want}", rank, index)
    if len({rank for rank, _ in runs.values()}) > 1:
        rank, index = runs[kinds[0]]
        raise ScheduleError(f"stage {stage}, microbatch {mb} runs on several ranks: {runs}", rank, index)


def _check_data(program: Program) -> None:
    """Every result that an instruction reads was made on this rank before, or is waited for as a receive; every
    receive is of such a result."""
    backward = backward_ops(program)
    where = {p.key: r for r, s in enumerate(program.streams) for p in units_of(s) if p.op in COMPUTE}
    for rank, stream in enumerate(program.streams):
        position = program.positions[rank]
        read: set[Key] = set()
        for index, unit in enumerate(stream):
            for part in unit.parts:
                if part.op in SENDS:
                    _check_send(part, rank, index)
                for made in inputs_of(part, program, backward):
                    if where[made] != rank:
                        read.add(_check_receive(part, made, where[made], stream, position, rank, index))
                    elif position[made] >= index:
                        text = f"rank {rank}: {part.key} reads {made}, which does not come before it"
                        raise ScheduleError(text, rank, index)
        for key, index in position.items():
            if key.op in RECEIVES and key not in read:
                raise ScheduleError(f"rank {rank}: nothing reads what {key} receives", rank, index)


def _check_send(part: Instruction, rank: int, index: int) -> None:
    ops = (Op.F,) if part.op is Op.SEND_F else (Op.B, Op.BW)
    if part.waits[:1] not in [(Key(op, part.stage, part.microbatch),) for op in ops]:
        raise ScheduleError(f"rank {rank}: {part.key} does not wait first for the result it sends", rank, index)


def _check_receive(
    part: Instruction, made: Key, source: int, stream: Stream, position: dict[Key, int], rank: int, index: int
) -> Key:
    """Key of the receive that brings `made`, which runs on rank `source`, to `part`."""
    wanted = Key(Op.RECV_F if made.op is Op.F else Op.RECV_B, part.stage, part.microbatch)
    if wanted not in part.waits:
        text = f"rank {rank}: {part.key} reads {made} of rank {source} but does not wait for {wanted}"
        raise ScheduleError(text, rank, index)
    receive = stream[position[wanted]].parts[0]
    if receive.peer != source:
        text = f"rank {rank}: {wanted} receives from rank {receive.peer}, but {made} runs on rank {source}"
        raise ScheduleError(text, rank, position[wanted])
    return wanted


def _check_slots(rank: int, stream: Stream, position: dict[Key, int]) -> None:
    """A slot is granted again only behind the last reader of what it held: B of an activation, W of a gradient."""
    held: dict[tuple[Op, int], Instruction] = {}
    for index, unit in enumerate(stream):
        part = unit.parts[0]
        if part.op not in RECEIVES:
            continue
        if part.slot < 0:
            raise ScheduleError(f"rank {rank}: {part.key} has no slot", rank, index)
        before = held.get((part.op, part.slot))
        if before is not None:
            ends = (Op.B, Op.BW) if part.op is Op.RECV_F else (Op.W, Op.BW)
            keys = [Key(op, before.stage, before.microbatch) for op in ends]
            reader = next(key for key in keys if key in position)
            if not _behind(part.waits, reader, position):
                text = f"rank {rank}: {part.key} refills slot {part.slot}, which {reader} still reads"
                raise ScheduleError(text, rank, index)
        held[part.op, part.slot] = part


def _behind(waits: tuple[Key, ...], last: Key, position: dict[Key, int]) -> bool:
    """Whether compute is waited for up to `last`, which ends an overlapped pair if it is of one: the forward of a pair
    may end before its backward does."""
    return any(key == last or (key.op in COMPUTE and position[key] > position[last]) for key in waits)


def _check_ending(rank: int, stream: Stream, program: Program, replicas: int) -> None:
    """Lowered programs only: ALL_REDUCE of every shared stage, NORM behind them and behind all compute, then STEP."""
    position = program.positions[rank]
    norm, step = Key(Op.NORM, -1, -1), Key(Op.STEP, -1, -1)
    if norm not in position or step not in position:
        missing = "NORM" if norm not in position else "STEP"
        raise ScheduleError(f"rank {rank} has no {missing}", rank, len(stream) - 1)
    parts: dict[Key, Unit] = {part.key: part for part in units_of(stream)}
    ahead = not parts[norm].parts[0].group
    if not ahead and norm not in parts[step].waits:
        raise ScheduleError(f"rank {rank}: STEP does not wait for NORM", rank, position[step])
    if ahead != (VALIDATE in position):
        raise ScheduleError(
            f"rank {rank}: NORM is {parts[norm]}, but its VALIDATE says otherwise", rank, position[norm]
        )
    last = next((key for key in reversed(parts) if key.op in COMPUTE), None)
    if last and position[step] < position[last]:
        raise ScheduleError(f"rank {rank}: STEP comes before {last}", rank, position[step])
    if last and not _behind(parts[norm].waits, last, position):
        raise ScheduleError(f"rank {rank}: NORM does not wait for {last}", rank, position[norm])
    for stage in program.placement[rank]:
        scattered = Key(Op.REDUCE_SCATTER, stage, -1)
        reduce = scattered if scattered in position else Key(Op.ALL_REDUCE, stage, -1)
        if replicas == 1 and len(program.holders(stage)) == 1:
            if reduce in position:
                text = f"rank {rank} reduces the gradients of stage {stage}, which no other rank holds"
                raise ScheduleError(text, rank, position[reduce])
            continue
        if reduce not in position:
            raise ScheduleError(f"rank {rank} never reduces the gradients of stage {stage}", rank, len(stream) - 1)
        final = next((key for key in reversed(parts) if key.op in (Op.W, Op.BW) and key.stage == stage), None)
        if final and not _behind(parts[reduce].waits, final, position):
            raise ScheduleError(f"rank {rank}: {reduce} does not wait for {final}", rank, position[reduce])
        for key in (norm, step) if ahead else (norm,):
            if reduce not in parts[key].waits:
                raise ScheduleError(f"rank {rank}: {key} does not wait for {reduce}", rank, position[key])


def _check_meetings(program: Program) -> None:
    for where, sides in meetings(program).items():
        if where[0] in SENDS:
            kind, source, target = where
            _check_channel(program, kind, source, target, sides.get(source, []), sides.get(target, []))
        else:
            _check_collectives(program, where[1], sides)


def _check_collectives(program: Program, ranks: tuple[int, ...], sides: dict[int, list[Node]]) -> None:
    first = _keys(program, sides.get(ranks[0], []))
    for rank in ranks[1:]:
        keys = _keys(program, sides.get(rank, []))
        if keys != first:
            same = (k for k, (mine, other) in enumerate(zip(keys, first, strict=False)) if mine != other)
            k = next(same, min(len(keys), len(first)))
            at = sides[rank][k].at if k < len(keys) else len(program.streams[rank]) - 1
            text = f"{_named(first, k)} on rank {ranks[0]} and {_named(keys, k)} on rank {rank}"
            raise ScheduleError(f"collective {k} of ranks {ranks} is {text}", rank, at)


def _check_channel(
    program: Program, kind: Op, source: int, target: int, sends: list[Node], receives: list[Node]
) -> None:
    sent, received = _keys(program, sends), _keys(program, receives)
    shift = 1 if kind is Op.SEND_F else -1
    for k in range(max(len(sent), len(received))):
        wanted = Key(SENDS[kind], sent[k].stage + shift, sent[k].microbatch) if k < len(sent) else None
        if k < len(received) and received[k] == wanted:
            continue
        node = receives[k] if k < len(receives) else sends[k]
        text = f"sends {_named(sent, k)} and receives {_named(received, k)}"
        raise ScheduleError(f"transfer {k} ({kind} from rank {source} to rank {target}) {text}", node.rank, node.at)


def _check_cycle(program: Program) -> None:
    graph = build(program, issued=True)
    events = cycle(graph)
    if events:
        members = [graph.members[event][:2] for event in events]  # a transfer has two, a collective is known by two
        named = [[f"{program.streams[n.rank][n.at].key} (rank {n.rank})" for n in nodes] for nodes in members]
        names = [" with ".join(pair) for pair in named]
        first = members[0][0]
        raise ScheduleError("deadlock: " + " waits for ".join([*names, names[0]]), first.rank, first.at)


def _keys(program: Program, nodes: list[Node]) -> list[Key]:
    return [program.streams[node.rank][node.at].key for node in nodes]


def _named(keys: list[Key], k: int) -> str:
    return str(keys[k]) if k < len(keys) else "nothing"
