"""The notice that a rank's process is about to end: its state is handed over first, so that no step is lost."""

from __future__ import annotations

import os
import signal
import threading

TERM_SECONDS = 30.0  # from SIGTERM to the end, as Kubernetes gives it, whatever the driver does


class Notice:
    """`text` says what has been announced, '' nothing. To be made in the main thread, as it handles SIGTERM: the first
    one is a notice, and the process ends later; a second one ends it."""

    def __init__(self) -> None:
        self.text = ""
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: object) -> None:
        if self.text:
            os.kill(os.getpid(), signal.SIGKILL)
        self.text = "received SIGTERM"
        end = threading.Timer(TERM_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
        end.daemon = True
        end.start()
