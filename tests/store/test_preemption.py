"""A signal before a kill ends the run between two steps, with its own exit code, after all open files are closed."""
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxrl_llm.store import preemption

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", preemption.SIGNALS)
def test_a_signal_is_kept_for_the_next_check(number, capfd):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped, preemption.watch():
        preemption.check()
        for _ in range(3):  # schedulers repeat themselves
            os.kill(os.getpid(), number)
        reached = True
        preemption.check()
    assert reached and stopped.value.code == 75
    assert signal.getsignal(number) is before
    preemption.check()  # nothing is left over
    assert capfd.readouterr().err.count(signal.Signals(number).name) == 1


def test_a_closed_stderr_changes_nothing(monkeypatch):
    """`train.py 2>&1 | tee log` under a scheduler that signals the whole group: tee is gone first."""
    class Gone:
        def write(self, text):
            raise BrokenPipeError

    with preemption.watch(), monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Gone())
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(preemption.Preempted):
            preemption.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_is_raised_at_the_next_check():
    """An exception in a callback of the garbage collector is printed and forgotten, and JAX has such a callback."""
    def callback(phase, info):
        if phase == "start" and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    sent, given = [], signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores interrupts
    try:
        with pytest.raises(KeyboardInterrupt), preemption.watch():
            gc.callbacks.append(callback)
            try:
                gc.collect()
            finally:
                gc.callbacks.remove(callback)
            reached = True
            preemption.check()
        assert sent and reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, given)
    preemption.check()  # nothing is left over


def test_without_a_signal_nothing_happens_and_handlers_come_back():
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    with preemption.watch():
        preemption.check()
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == before
    with pytest.raises(ZeroDivisionError), preemption.watch():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == before


def test_other_threads_are_left_alone():
    result = []

    def work():
        with preemption.watch():
            result.append(signal.getsignal(signal.SIGTERM))
            preemption.check()

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert result == [before]


def test_a_process_saves_on_its_way_out_and_returns_its_code():
    """Like `runs.loop`: at any end of the steps the state is saved, and the exception continues."""
    body = """if True:
        import os, signal, sys
        from jaxrl_llm.store import preemption
        def steps():
            try:
                for step in range(5):
                    if step == 2:
                        os.kill(os.getpid(), signal.SIGTERM)
                    print("step", step)
                    preemption.check()
            except BaseException as error:
                print("saved after", type(error).__name__)
                raise
        with preemption.watch():
            steps()
    """
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 75
    assert done.stdout.splitlines() == ["step 0", "step 1", "step 2", "saved after Preempted"]
    assert done.stderr.startswith("SIGTERM: the run saves and stops after this step") and "Traceback" not in done.stderr
