"""Loads the function that a text such as 'path/my.py:my_schedule' names, and describes what fails in the user's file.

The file is read once per run: workers execute the source in their plan.
"""

from __future__ import annotations

import difflib
import re
import reprlib
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import MOST_JSON, regular_file


class FunctionKind(NamedTuple):
    """What error messages call a function, its parameters, and an example of its name."""

    word: str
    parameters: str
    example: str


SCHEDULE = FunctionKind("schedule", "(rank, ranks, microbatches)", "my.py:my_schedule")


def load_function(text: str, kind: FunctionKind = SCHEDULE, source: str | None = None) -> Callable[..., Any]:
    """Executes the file, or its `source` if given, and returns the function. What the file prints goes to stderr.

    Raises PentadError when there is no such file or function, or when the file fails.
    """
    file, _, name = text.rpartition(":")
    source = read_source(text, kind) if source is None else source
    module = _execute(text, Path(file), source, kind)
    if name not in module.__dict__:
        own = [key for key, value in module.__dict__.items() if getattr(value, "__module__", "") == module.__name__]
        near = difflib.get_close_matches(name, own, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise user_error(text, f"{file} has no {name!r}{hint}: expected a function {kind.parameters}", kind)
    function = module.__dict__[name]
    if not callable(function):
        raise user_error(text, f"{name} is {reprlib.repr(function)}: expected a function {kind.parameters}", kind)
    return function


def read_source(text: str, kind: FunctionKind = SCHEDULE) -> str:
    """The content of the file. Raises PentadError when it cannot be read."""
    file = text.rpartition(":")[0]
    if not file.endswith(".py"):
        raise user_error(text, f"the file is {file!r}: expected a .py file and a function, as in {kind.example}", kind)
    regular_file(Path(file), MOST_JSON)
    try:
        return decode_source(Path(file).read_bytes())
    except (OSError, ValueError, SyntaxError) as error:  # ValueError: a null byte in the path, or not text
        reason = getattr(error, "strerror", None) or error
        found = f"the file {file!r} cannot be read ({reason})"
        raise user_error(text, f"{found}: expected a .py file with the function", kind) from None


def describe_error(text: str, error: BaseException) -> str:
    """'ZeroDivisionError in line 7 (division by zero)', where the line is the last one in the user's file."""
    file = str(Path(text.rpartition(":")[0]))
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    message = str(error)
    if isinstance(error, SyntaxError) and error.filename == file:
        lines, message = [error.lineno or 0], error.msg
    if not lines and error.__cause__:  # a StopIteration inside a generator
        return describe_error(text, error.__cause__)
    where = f" in line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{where}" + (f" ({' '.join(message.split())[:200]})" if message else "")


def user_error(text: str, message: str, kind: FunctionKind = SCHEDULE) -> PentadError:
    return PentadError(f"{kind.word} {text}: {message}")


class _SourceLoader(SourceLoader):
    """Loads a module from source text, so that edits always take effect and no cache file is left next to it."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_data(self, path: str) -> bytes:
        return self.source.encode()


def _execute(text: str, path: Path, source: str, kind: FunctionKind) -> ModuleType:
    name = re.sub(r"\W", "_", str(path.resolve()))
    loader = _SourceLoader(path, source)
    module = module_from_spec(ModuleSpec(name, loader))
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        with redirect_stdout(sys.stderr):
            loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        found = f"{path} cannot be imported: {describe_error(text, error)}"
        raise user_error(text, f"{found}: expected a file that runs", kind) from None
    return module
