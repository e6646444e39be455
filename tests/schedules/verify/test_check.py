"""`check` accepts what an independent proof accepts, and refuses every damaged program, naming a culprit."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import Mutant, mutants, with_stream
from reachability_proof import prove, stuck
from schedule_sizes import TYPICAL, allows

from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import RECEIVES, SENDS, Instruction, Key, Op, Overlap, parse
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.verify.check import check

compiled = cache(compile_program)

many = settings(max_examples=8 * settings().max_examples)  # there are many kinds of damage


def refusal(program: Program) -> ScheduleError | None:
    """Why `check` refuses a program of two replicas, if it does."""
    try:
        check(program, replicas=2)
    except ScheduleError as error:
        return error
    return None


def allowed(name: str, ranks: int) -> list[int]:
    """Counts of microbatches that the schedule allows: fewer than ranks, as many, and more, both odd and even."""
    tried = {1, max(1, ranks - 1), ranks, ranks + 1, 2 * ranks, 2 * ranks + 2, 2 * ranks + 3, 4 * ranks}
    return [microbatches for microbatches in sorted(tried) if allows(name, ranks, microbatches)]


SLOW = pytest.mark.slow


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("gated", [False, True], ids=["posted", "gated"])
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=SLOW), 2])
@pytest.mark.parametrize("most", [3, pytest.param(8, marks=SLOW)])
def test_every_program_that_compiles_is_right(name: str, gated: bool, replicas: int, most: int) -> None:
    for ranks in (1, 2, 3) if most == 3 else (4, 8):
        for microbatches in allowed(name, ranks):
            program = compile_program(name, ranks, microbatches, gated=gated, replicas=replicas)
            check(program, replicas=replicas)
            prove(program, replicas)


def names_a_culprit(error: ScheduleError, mutant: Mutant) -> bool:
    """Whether the error points at a culprit, or its first line has a culprit's key as a word."""
    pointed = mutant.program.streams[error.rank][error.index].parts
    if any((error.rank, part.key) in mutant.culprits for part in pointed):
        return True
    words = set(re.findall(r"\w+", str(error).splitlines()[0]))
    return any(str(key) in words for _, key in mutant.culprits)


OFTEN = {*((name, 2, True) for name in TYPICAL), ("1f1b", 2, False), ("dualpipe", 2, False)}
DAMAGED = [
    pytest.param(name, ranks, 2 * ranks, gated, marks=[SLOW] * ((name, ranks, gated) not in OFTEN))
    for name in CATALOGUE
    for ranks in (2, 4)
    for gated in (False, True)
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "ranks", "microbatches", "gated"), DAMAGED)
def test_every_mutant_is_refused_and_its_culprit_named(name: str, ranks: int, microbatches: int, gated: bool) -> None:
    program = compiled(name, ranks, microbatches, gated=gated, replicas=2)
    kinds: Counter[str] = Counter()
    for mutant in mutants(program, gated=gated):
        error = refusal(mutant.program)
        if error:
            assert names_a_culprit(error, mutant), (mutant.kind, mutant.where, str(error))
            kinds[mutant.kind] += 1
        else:
            assert not mutant.fatal, (mutant.kind, mutant.where)
            prove(mutant.program, 2)
    assert kinds["dropped"] == sum(map(len, program.streams))


KEYS = st.builds(Key, st.sampled_from(Op), st.integers(-1, 4), st.integers(-1, 4))
ANYTHING = st.builds(
    Instruction,
    st.sampled_from(Op),
    st.integers(-1, 4),
    st.integers(-1, 4),
    st.integers(-1, 4),
    st.sampled_from(["", "pp", "stage0", "stage1", "none"]),
    st.integers(-1, 2),
    st.lists(KEYS, max_size=2).map(tuple),
)
PLACEMENTS = st.lists(st.lists(st.integers(-1, 4), max_size=2).map(tuple), max_size=4).map(tuple)
SMALL_CHANGES = ["move", "move", "wait", "wait", "slot"]
LARGE_CHANGES = ["insert", "overlap", "replace", "placement", "microbatches", "empty"]


def edit(draw: st.DrawFn, program: Program, kind: str) -> Program:
    """The program with one random change of this kind."""
    streams = [list(stream) for stream in program.streams]
    stream = draw(st.sampled_from(streams or [[]]))
    index = draw(st.integers(0, max(len(stream) - 1, 0)))
    action = stream[index] if stream else Instruction(Op.F)
    match kind:
        case "move":
            stream.insert(max(0, index + draw(st.integers(-6, 6))), stream.pop(index) if stream else action)
        case "wait" if isinstance(action, Instruction) and index:
            stream[index] = action._replace(waits=(*action.waits, draw(st.sampled_from(stream[:index])).key))
        case "slot" if isinstance(action, Instruction) and action.slot >= 0:
            stream[index] = action._replace(slot=draw(st.integers(0, 2)))
        case "insert":
            stream.insert(index, draw(ANYTHING))
        case "overlap":
            stream.insert(index, draw(st.builds(Overlap, ANYTHING, st.just(action.parts[0]) | ANYTHING)))
        case "replace" if stream:
            stream[index] = draw(ANYTHING)
        case "empty":
            stream.clear()
    microbatches = draw(st.integers(-1, 9)) if kind == "microbatches" else program.microbatches
    placement = draw(PLACEMENTS) if kind == "placement" else program.placement
    return Program(program.name, tuple(map(tuple, streams)), placement, microbatches)


@st.composite
def damaged(draw: st.DrawFn) -> Program:
    """A correct program with a few random changes, half the time only small ones."""
    name = draw(st.sampled_from(["1f1b", "zb-h1", "zb-h2", "dualpipe"]))
    ranks = draw(st.sampled_from([1, 2, 4] if name != "dualpipe" else [2, 4]))
    program = compiled(name, ranks, 2 * ranks, gated=draw(st.booleans()), replicas=2)
    for kind in draw(
        st.lists(
            st.sampled_from(draw(st.sampled_from([SMALL_CHANGES, SMALL_CHANGES + LARGE_CHANGES]))),
            min_size=1,
            max_size=4,
        )
    ):
        program = edit(draw, program, kind)
    return program


@many
@given(damaged())
def test_check_refuses_or_proves_whatever_it_is_given(program: Program) -> None:
    error = refusal(program)
    if error is None:
        prove(program, 2)
        timeline = simulate(program, Costs.uniform(program.stages, transfer=0.5))
        assert len(timeline.spans) == sum(len(action.parts) for stream in program.streams for action in stream)
        return
    assert -1 <= error.rank < program.ranks
    assert error.rank < 0 or -1 <= error.index < len(program.streams[error.rank])
    if "deadlock" in str(error):
        assert stuck(program)


@st.composite
def with_extra_waits(draw: st.DrawFn) -> Program:
    """A correct program whose receives also wait for earlier sends of their rank: the only possible fault is a
    deadlock."""
    name, ranks = draw(st.sampled_from([("1f1b", 2), ("zb-h2", 2), ("zb-h1", 4), ("dualpipe", 2)]))
    program = compiled(name, ranks, 2 * ranks, gated=draw(st.booleans()), replicas=2)
    streams = [list(stream) for stream in program.streams]
    for _ in range(draw(st.integers(1, 16))):
        stream = draw(st.sampled_from(streams))
        index = draw(st.sampled_from([k for k, action in enumerate(stream) if action.parts[0].op in RECEIVES]))
        sent = [action.key for action in stream[:index] if action.parts[0].op in SENDS]
        (part,) = stream[index].parts
        stream[index] = part._replace(waits=(*part.waits, *sent[-draw(st.integers(1, 3)) :][:1]))
    return program.with_streams(tuple(map(tuple, streams)))


@many
@given(with_extra_waits())
def test_exactly_the_programs_that_would_hang_are_refused_as_deadlocks(program: Program) -> None:
    error = refusal(program)
    assert bool(error) == bool(stuck(program))
    assert error is None or "refused: deadlock: " in str(error)


def two_ranks(*streams: str) -> Program:
    return Program("by hand", tuple(tuple(map(parse, text.split(" | "))) for text in streams), ((0,), (1,)), 2)


def test_a_send_that_a_waiting_host_would_never_issue_is_refused() -> None:
    """Lanes alone would not hang, but a host that waits at 0BW0 for its gradient never reaches the send after it."""
    first = "0F0 | 0RECV_B0<1@0 | 0BW0 after 0RECV_B0 | 0SEND_F0>1 after 0F0 | 0ALL_REDUCE#stage0 after 0BW0"
    second = "1RECV_F0<0@0 | 1F0 after 1RECV_F0 | 1BW0 | 1SEND_B0>0 after 1BW0 | 1ALL_REDUCE#stage1 after 1BW0"
    first += " | NORM#pp after 0BW0,0ALL_REDUCE | STEP after NORM"
    second += " | NORM#pp after 1BW0,1ALL_REDUCE | STEP after NORM"
    program = Program("by hand", two_ranks(first, second).streams, ((0,), (1,)), 1)
    assert "deadlock: " in str(refusal(program))


def test_a_reduction_without_a_partner_is_refused() -> None:
    program = compiled("1f1b", 2, 4, gated=False, replicas=2)
    with pytest.raises(ScheduleError, match=r"0ALL_REDUCE reduces the gradients of stage 0, which no other rank holds"):
        check(program, replicas=1)


def test_a_deadlock_that_buffering_would_hide_is_refused_and_its_cycle_spelled_out() -> None:
    first = (
        "0F0 | 0SEND_F0>1 after 0F0 | 0F1 | 0SEND_F1>1 after 0F1 | 0RECV_B0<1@0 after 0SEND_F1 | 0BW0 after 0RECV_B0"
        " | 0RECV_B1<1@1 | 0BW1 after 0RECV_B1 | NORM#pp after 0BW1 | STEP after NORM"
    )
    second = (
        "1RECV_F0<0@0 | 1F0 after 1RECV_F0 | 1BW0 | 1SEND_B0>0 after 1BW0 | 1RECV_F1<0@1 after 1SEND_B0"
        " | 1F1 after 1RECV_F1 | 1BW1 | 1SEND_B1>0 after 1BW1 | NORM#pp after 1BW1 | STEP after NORM"
    )
    program = two_ranks(first, second)
    assert not stuck(program, buffered=True)
    assert stuck(program)
    with pytest.raises(ScheduleError) as caught:
        check(program)
    transfers = ["0SEND_F1 (rank 0) with 1RECV_F1 (rank 1)", "0RECV_B0 (rank 0) with 1SEND_B0 (rank 1)"]
    spelled = str(caught.value).splitlines()[0]
    assert all(words in spelled for transfer in transfers for words in transfer.split(" with "))
    assert spelled.count("waits for") == 2
    assert f">{program.streams[caught.value.rank][caught.value.index].key}<" in str(caught.value)
    check(two_ranks(first.replace(" after 0SEND_F1", ""), second))
    check(two_ranks(first, second.replace(" after 1SEND_B0", "")))


def inserted(program: Program, rank: int, index: int, text: str) -> Program:
    stream = program.streams[rank]
    return with_stream(program, rank, (*stream[:index], parse(text), *stream[index:]))


def reordered_reductions(program: Program) -> Program:
    """The program with rank 0's reductions right before NORM, in reverse order."""
    *actions, norm, step = program.streams[0]
    reductions = [action for action in actions if action.key.op is Op.ALL_REDUCE]
    return with_stream(program, 0, (*(u for u in actions if u not in reductions), *reductions[::-1], norm, step))


def early_recomputation(program: Program) -> Program:
    stream = program.streams[0]
    action = next(action for action in stream if action.key == Key(Op.RECOMPUTE, 0, 0))
    return with_stream(program, 0, (action, *(other for other in stream if other != action)))


RULES = [
    (
        inserted(compiled("dualpipe", 2, 8, replicas=2), 1, 3, "0RECOMPUTE0"),
        "1: 0RECOMPUTE0 is not between 0F0 and 0BW0",
    ),
    (reordered_reductions(compiled("dualpipe", 2, 8, replicas=2)), "collective 0 of ranks (0, 1) is "),
    (
        inserted(compiled("1f1b", 2, 4, replicas=2), 0, -2, "0ALL_REDUCE5#stage0"),
        "0ALL_REDUCE5 cannot run: gradients are reduced once a step, or with ZeRO once a microbatch",
    ),
    (inserted(compiled("1f1b", 2, 4, replicas=2), 1, 0, "1RECV_B0<0@0"), "nothing reads what 1RECV_B0 receives"),
    (Program("by hand", ((parse("0F0"),), (parse("0BW0"),)), ((0,), (0,)), 1), "microbatch 0 runs on several ranks"),
    (
        inserted(compiled("1f1b", 2, 4, replicas=2, memory_options=MemoryOptions(3)), 0, 0, "0FREE7"),
        "0FREE7 frees what is not gathered",
    ),
    (
        early_recomputation(compiled("1f1b", 2, 4, replicas=2, memory_options=MemoryOptions(recompute=frozenset({0})))),
        "0RECOMPUTE0 is not between 0F0 and 0BW0",
    ),
]


@pytest.mark.parametrize(("program", "text"), RULES, ids=[text for _, text in RULES])
def test_rules_that_no_single_damage_breaks(program: Program, text: str) -> None:
    assert text in str(refusal(program))
