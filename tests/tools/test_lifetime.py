"""Commands that are started by another one end with it."""
import signal
import subprocess
import sys

CHILD = """
import signal, sys, time
from jaxrl_llm.tools import lifetime
lifetime.end_with_parent()
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), sys.exit()))
print("up", flush=True)
time.sleep(60)
"""
PARENT = f"""
import sys, time
from jaxrl_llm.tools import lifetime
lifetime.start([sys.executable, "-c", {CHILD!r}])
time.sleep(60)
"""


def test_a_command_is_asked_to_end_when_the_one_that_started_it_is_killed():
    """Both write into one pipe, which ends when both have ended."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "up\n"
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == "asked to end\n"


def test_a_command_that_was_started_by_hand_outlives_its_parent():
    alone = CHILD.replace("time.sleep(60)", "import threading; print([one.name for one in threading.enumerate()])")
    assert subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True).stdout == "up\n['MainThread']\n"
