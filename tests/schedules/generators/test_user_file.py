"""A user's file is executed anew each time and not modified; its failures are reported with the line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import custom_schedules
import pytest
from custom_schedules import DEF, HEAD, body, refusal

from pentad.schedules.generators.custom import F, program

Write = Callable[[str], str]  # code of a file -> text that names its `plan`


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return partial(custom_schedules.write, tmp_path)


def test_the_file_is_executed_anew_each_time_and_no_cache_is_left(write: Write, tmp_path: Path) -> None:
    assert len(program(write(body("yield F(0, 0)")), 1, 1).streams[0]) == 1
    assert len(program(write(body("yield F(0, 1)")), 1, 1).streams[0]) == 1
    assert program(write(body("yield F(0, 2)")), 1, 1).streams[0] == (F(0, 2),)
    assert [path.name for path in tmp_path.iterdir()] == ["my.py"]
    assert str(tmp_path) not in sys.path


def test_a_file_has_its_path(write: Write) -> None:
    text = write("from pathlib import Path\nassert Path(__file__).read_text()\n" + body("yield F(rank, 0)"))
    assert program(text, 2, 4).ranks == 2


def test_a_file_may_define_dataclasses_and_its_future_imports_apply(write: Write, tmp_path: Path) -> None:
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n" + HEAD
    code += "@dataclass\nclass Phase:\n    count: int\n" + body(
        "yield from (F(rank, mb) for mb in range(Phase(2).count))"
    )
    (tmp_path / "my.py").write_text(code)
    assert len(program(f"{tmp_path}/my.py:plan", 1, 2).streams[0]) == 2


def test_output_of_the_file_goes_to_stderr(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    program(write("print('loaded')\n" + body("print('asked')", "yield F(rank, 0)")), 1, 1)
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
def test_a_name_without_a_function_is_refused(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str]
) -> None:
    write(DEF + "    yield F(rank, 0)\n")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    sentence = refusal(text)
    for word in words:
        assert word in sentence


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
def test_a_failing_file_is_reported_with_the_line(write: Write, code: str, words: list[str]) -> None:
    modules = set(sys.modules)
    sentence = refusal(write(code))
    for word in ["my.py cannot be imported", *words]:
        assert word in sentence
    assert not any("my_py" in name for name in set(sys.modules) - modules)


def test_ctrl_c_is_not_reported_as_an_error_of_the_file(write: Write) -> None:
    with pytest.raises(KeyboardInterrupt):
        program(write("raise KeyboardInterrupt\n"), 1, 1)
