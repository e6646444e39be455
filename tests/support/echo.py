"""A rank process that answers with what it was sent, after as many seconds, or dies."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection


def serve(end: Connection, rank: int, *_: object) -> None:
    while True:
        try:
            seconds = end.recv()
        except EOFError:
            return
        if seconds < 0:
            os._exit(1)
        time.sleep(seconds)
        end.send((rank, seconds))
