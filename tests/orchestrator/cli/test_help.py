"""The help of all commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from pentad.orchestrator.cli.cli import app


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words of every command, and the command."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_no_command_has_gone_unnoticed() -> None:
    assert len(COMMANDS) > 25 and ("data", "build") in COMMANDS and ("train",) in COMMANDS


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_paragraph_of_help_is_one_line_which_the_terminal_wraps(words: tuple[str, ...]) -> None:
    help_text = COMMANDS[words].help
    assert help_text.endswith(".")
    assert all(paragraph == " ".join(paragraph.split()) for paragraph in help_text.split("\n\n"))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_arguments_are_named_as_in_errors_and_all_parameters_are_explained(words: tuple[str, ...]) -> None:
    for parameter in COMMANDS[words].params:
        if parameter.name != "help":
            assert parameter.help.endswith("."), parameter.name
        if parameter.param_type_name == "argument":
            assert parameter.metavar.isupper() or "a.b=value" in parameter.metavar
