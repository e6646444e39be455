"""The notice that a rank's process or its node is about to end, so that the state is handed over first and no step is
lost."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from pathlib import Path

TERM_SECONDS = 30.0  # from SIGTERM to the end, as in Kubernetes, whatever the driver does
POLL_SECONDS, ANSWER_SECONDS = 1.0, 1.0


class Notice:
    """`text` says that the process is about to end, `of_node` that its node is; '' without a notice. Must be created in
    the main thread, because it handles SIGTERM: the first one is a notice, and the process ends TERM_SECONDS later; a
    second one ends it at once."""

    def __init__(self) -> None:
        self.text = self.of_node = ""
        self._watched: str | None = None
        signal.signal(signal.SIGTERM, self._receive)

    def watch(self, where: str | None) -> None:
        """Watches for a notice of the node's end: the file `where` exists, or the URL `where` answers with 200."""
        if where is not None and self._watched is None:
            self._watched = where
            threading.Thread(target=self._watch, args=(where,), daemon=True).start()

    def _watch(self, where: str) -> None:
        while not is_announced(where):
            time.sleep(POLL_SECONDS)
        self.of_node = f"{where} announces the end of its node"

    def _receive(self, *_: object) -> None:
        if self.text:
            os.kill(os.getpid(), signal.SIGKILL)
        self.text = "received SIGTERM"
        end = threading.Timer(TERM_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
        end.daemon = True
        end.start()


def is_announced(where: str) -> bool:
    """Whether the file `where` exists, or the URL `where` answers with 200; False if it cannot be reached."""
    if "://" not in where:
        return Path(where).exists()
    try:
        with urllib.request.urlopen(where, timeout=ANSWER_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False
