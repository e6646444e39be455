"""A value of a wrong type costs one sentence: the argument's name, the value and what was expected."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import pentad

VALID = {"name": "1f1b", "ranks": 2, "microbatches": 2, "source": "x", "run": "x"}
METHODS = {
    pentad.Run: ("status", "timeline", "compare", "explain"),
    pentad.Schedule: ("facts", "html"),
    pentad.Comparison: ("write_trace",),
}


class Wrong:
    def __repr__(self) -> str:
        return "WRONG"


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in pentad.__all__:
        found = getattr(pentad, name)
        if inspect.isfunction(found):
            yield name, found
    yield "Run", pentad.Run
    for kind, methods in METHODS.items():
        yield from ((f"{kind.__name__}.{each}", partial(getattr(kind, each), None)) for each in methods)


FUNCTIONS = dict(public_functions())
ARGUMENTS = [
    (function, name)
    for function, found in FUNCTIONS.items()
    for name, each in inspect.signature(found).parameters.items()
    if each.kind is not each.VAR_KEYWORD
]


@pytest.mark.parametrize(("function", "name"), ARGUMENTS)
def test_a_value_of_a_wrong_type_is_named_with_what_was_expected(function: str, name: str) -> None:
    parameters = inspect.signature(FUNCTIONS[function]).parameters
    given = {other: VALID[other] for other, each in parameters.items() if each.default is each.empty and other in VALID}
    is_variable = parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
    call = (
        partial(FUNCTIONS[function], Wrong())
        if is_variable
        else partial(FUNCTIONS[function], **{**given, name: Wrong()})
    )
    with pytest.raises(pentad.PentadError, match=rf"^{name} is WRONG: expected \w") as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: pentad.train(3), "config is 3: expected a RunConfig, a mapping, text, a path or None"),  # type: ignore[arg-type]
        (lambda: pentad.schedule("x", "4", 8), "ranks is '4': expected a whole number"),  # type: ignore[arg-type]
        (lambda: pentad.schedule("1f1b", True, 8), "ranks is True: expected a whole number"),
        (lambda: pentad.schedule("1f1b", 4, 8, chunks=1.5), "chunks is 1.5: expected a whole number or None"),  # type: ignore[arg-type]
        (
            lambda: pentad.schedule("1f1b", 4, 8, costs=("a", 1, 1)),  # type: ignore[arg-type]
            "costs is ('a', 1, 1): expected a list of numbers",
        ),
        (
            lambda: pentad.schedule("1f1b", 4, 8, recompute=3),  # type: ignore[arg-type]
            "recompute is 3: expected text, a list of whole numbers or None",
        ),
        (lambda: pentad.plan(device="tpu"), "device is 'tpu': expected one of cpu, cuda or None"),  # type: ignore[arg-type]
        (lambda: pentad.plan(device_gib=-3), "device_gib is -3: expected a finite number greater than 0"),
        (lambda: pentad.plan(device_gib=float("nan")), "device_gib is nan: expected a finite number greater than 0"),
        (lambda: pentad.load_config("a\0"), r"config is 'a\x00': expected a path without control characters"),
        (lambda: pentad.train(mesh=3, quiet=True), "mesh is 3: expected a mapping with keys such as mesh.dp"),
        (lambda: pentad.evaluate("x", data=[3]), "data is [3]: expected text or a list of text"),  # type: ignore[list-item]
    ],
)
def test_the_sentence(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(pentad.PentadError) as caught:
        call()
    assert str(caught.value) == sentence


def test_values_that_act_as_numbers_and_lists_are_taken() -> None:
    np = pytest.importorskip("numpy")
    costs: Any = [np.float32(1), 2, 1]
    found = pentad.schedule("1f1b", np.int64(2), np.int32(4), costs=costs, recompute=iter([0]))
    assert found.program.microbatches == 4


def test_what_python_says_of_missing_and_unknown_arguments_stays() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'ranks'"):
        pentad.schedule("1f1b")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk'"):
        pentad.schedule("1f1b", 2, 2, chunk=2)  # type: ignore[call-arg]
