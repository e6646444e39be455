"""Time that a thread waits for a core is counted, and time that it sleeps is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from pentad.workers.run_delay import run_delay

pytestmark = pytest.mark.timeout(60)
SECONDS = 0.5


def test_a_thread_without_a_core_is_delayed_and_one_that_sleeps_is_not() -> None:
    own = os.sched_getaffinity(0)
    busy = "import sys; print(flush=True)\nwhile True: pass"
    rival = subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE)
    try:
        assert rival.stdout is not None
        rival.stdout.readline()
        os.sched_setaffinity(0, {min(own)})
        os.sched_setaffinity(rival.pid, {min(own)})
        os.setpriority(os.PRIO_PROCESS, rival.pid, os.getpriority(os.PRIO_PROCESS, 0))
        began, before, ran = time.monotonic(), run_delay(), time.thread_time()
        while time.monotonic() - began < SECONDS:
            pass
        wall, delayed = time.monotonic() - began, run_delay() - before
        assert delayed > 0.1 * SECONDS
        assert delayed + time.thread_time() - ran == pytest.approx(wall, rel=0.25)  # interrupts count for neither
        os.sched_setaffinity(0, own)
        rival.kill()
        rival.wait()
        before, began = run_delay(), time.monotonic()
        time.sleep(SECONDS)
        assert run_delay() - before < (time.monotonic() - began) / 2
    finally:
        os.sched_setaffinity(0, own)
        rival.kill()
        rival.wait()
