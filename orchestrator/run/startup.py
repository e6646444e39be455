"""What a run is doing until its first step: a spinner on a terminal, one line per phase elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Startup:
    """`began` is the monotonic second of the command, from which seconds are counted. Use it in a `with`."""

    def __init__(self, console: Console, began: float | None = None) -> None:
        self.console, self.began = console, time.monotonic() if began is None else began
        self.text = ""
        self.spinner: Status | None = None

    def phase(self, text: str) -> None:
        """Shows that `text` is under way from now on."""
        self.text = text
        if not self.console.is_terminal or self.console.is_dumb_terminal:
            self.console.print(self.__rich__(), soft_wrap=True)
        elif self.spinner is None:
            self.spinner = self.console.status("")
            self.spinner.update(self)
            self.spinner.start()

    def close(self) -> None:
        """Removes the spinner; a later phase brings it back."""
        if self.spinner is not None:
            self.spinner.stop()
            self.spinner = None

    def __rich__(self) -> Text:
        return Text(f" {time.monotonic() - self.began:5.1f} s  {self.text}")

    def __enter__(self) -> Startup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
