"""In place of a trial's process: one that starts another in a session of its own, and then stops, which no request to
end gets it out of."""

import os
import signal
import subprocess
import sys
from pathlib import Path

child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=subprocess.DEVNULL)
Path(sys.argv[1]).with_suffix(".child").write_text(str(child.pid))
os.kill(os.getpid(), signal.SIGSTOP)
