"""The file of a user's schedule is run anew each time and left alone; what fails in it is told with its line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pentad.schedules.generators.custom import F, load, program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.schedule_spec import ScheduleSpec

Write = Callable[[str], str]  # the code of a file -> the text that names its `plan`
HEAD = "from pentad.schedules.generators.custom import BW, B, F, W\n"
PLAN = "def plan(rank, ranks, microbatches):\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(code: str) -> str:
        (tmp_path / "my.py").write_text(HEAD + code)
        return f"{tmp_path}/my.py:plan"

    return written


def plan(*lines: str) -> str:
    return PLAN + "".join(f"    {line}\n" for line in lines)


def told(text: str) -> str:
    with pytest.raises(PentadError) as error:
        program(text, ScheduleSpec(2, 4))
    said = str(error.value)
    assert said.startswith(f"schedule {text}: ") and "\n" not in said and len(said) < 600
    return said


def test_the_file_runs_anew_each_time_and_leaves_nothing_beside_it(write: Write, tmp_path: Path) -> None:
    assert len(program(write(plan("yield F(0, 0)")), ScheduleSpec(1, 1)).streams[0]) == 1
    assert len(program(write(plan("yield F(0, 1)")), ScheduleSpec(1, 1)).streams[0]) == 1
    assert program(write(plan("yield F(0, 2)")), ScheduleSpec(1, 1)).streams[0] == (F(0, 2),)
    assert [path.name for path in tmp_path.iterdir()] == ["my.py"]
    assert str(tmp_path) not in sys.path


def test_a_file_knows_where_it_is(write: Write) -> None:
    text = write("from pathlib import Path\nassert Path(__file__).read_text()\n" + plan("yield F(rank, 0)"))
    assert program(text, ScheduleSpec(2, 4)).ranks == 2


def test_a_file_may_hold_dataclasses_and_its_future_is_its_own(write: Write, tmp_path: Path) -> None:
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n" + HEAD
    code += "@dataclass\nclass Phase:\n    count: int\n" + plan(
        "yield from (F(rank, mb) for mb in range(Phase(2).count))"
    )
    (tmp_path / "my.py").write_text(code)
    assert len(load(f"{tmp_path}/my.py:plan")(ScheduleSpec(1, 2))[0]) == 2


def test_what_the_file_prints_is_not_on_stdout(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    program(write("print('loaded')\n" + plan("print('asked')", "yield F(rank, 0)")), ScheduleSpec(1, 1))
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == "loaded\nasked\n"


NO_FUNCTION = {
    "no file": ("nowhere.py:plan", ["nowhere.py", "No such file"]),
    "a folder": ("folder.py:plan", ["folder.py", "directory"]),
    "no Python file": ("my.txt:plan", ["my.txt", ".py file"]),
    "no file at all": (":plan", ["''", ".py file"]),
    "no function": ("my.py:other", ["my.py has no 'other'", "(rank, ranks, microbatches)"]),
    "almost its name": ("my.py:plam", ["did you mean 'plan'"]),
    "no name": ("my.py:", ["my.py has no ''"]),
    "a zero byte": ("my\0.py:plan", ["null byte"]),
}


@pytest.mark.parametrize(("text", "words"), NO_FUNCTION.values(), ids=NO_FUNCTION)
def test_a_name_without_a_function_is_told(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str]
) -> None:
    write(PLAN + "    yield F(rank, 0)\n")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    said = told(text)
    for word in words:
        assert word in said


IMPORTS = {
    "a syntax error": ("x = (\n", ["SyntaxError in line 2"]),
    "a name": ("\nthere = nowhere\n", ["NameError in line 3", "'nowhere'"]),
    "a module": ("import nowhere_to_be_found\n", ["ModuleNotFoundError in line 2", "nowhere_to_be_found"]),
    "deeper": ("def f():\n    return 1 / 0\nf()\n", ["ZeroDivisionError in line 3"]),
    "in a library": ("import json\njson.loads('{')\n", ["JSONDecodeError in line 3"]),
    "an exit": ("import sys\nsys.exit(3)\n", ["SystemExit in line 3 (3)"]),
    "several lines": ("raise ValueError('a\\nb\\n' + 'c' * 10_000)\n", ["ValueError in line 2 (a b ccc"]),
}


@pytest.mark.parametrize(("code", "words"), IMPORTS.values(), ids=IMPORTS)
def test_a_file_that_fails_is_told_with_its_line(write: Write, code: str, words: list[str]) -> None:
    modules = set(sys.modules)
    said = told(write(code))
    for word in ["my.py cannot be imported", *words]:
        assert word in said
    assert not any("my_py" in name for name in set(sys.modules) - modules)


def test_ctrl_c_is_not_the_file_s_mistake(write: Write) -> None:
    with pytest.raises(KeyboardInterrupt):
        program(write("raise KeyboardInterrupt\n"), ScheduleSpec(1, 1))
