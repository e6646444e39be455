"""A rank process that sleeps for the number of seconds it is sent and echoes it, or exits if the number is negative."""

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
