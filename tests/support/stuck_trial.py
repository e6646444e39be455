"""Replaces a trial's process: starts another one in its own session, and then stops, so that no request can end it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=subprocess.DEVNULL)
Path(sys.argv[1]).with_suffix(".child").write_text(str(child.pid))
os.kill(os.getpid(), signal.SIGSTOP)
