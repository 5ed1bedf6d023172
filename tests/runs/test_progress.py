"""Progress in logs and on terminals: it also appears while nothing happens, and never ends a run."""

import contextlib
import io
import os
import pty
import threading

import pytest

from jaxrl_llm.runs.progress import ENDLESS, Progress, format_seconds


class Pipe(io.StringIO):
    """A log file that can be waited for."""

    def __init__(self, awaited):
        super().__init__()
        self.awaited, self.seen = awaited, threading.Event()

    def write(self, text):
        count = super().write(text)
        if self.awaited in self.getvalue():
            self.seen.set()
        return count


def test_log_lines_are_few_and_complete():
    stream = io.StringIO()
    with Progress(100, 40, interval=3600, stream=stream) as progress:
        for step in range(41, 101):
            progress.phase("compiling rollout" if step == 41 else "rollout")
            progress.phase("update")
            progress.step(
                step, {"reward/mean": 0.5, "completion/length": 81.6, "speed/tokens_per_second": 12345.6, "loss": 1.0}
            )
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["step 40/100  compiling rollout...", "step 40/100  update..."]
    assert lines[2] == "step 41/100  reward 0.500  length 82  tok/s 12,346"
    assert lines[3] == "step 41/100  rollout..."
    assert lines[4].startswith("step 100/100  reward 0.500  length 82  tok/s 12,346  ") and lines[4].endswith(
        "0 s left"
    )
    assert lines[5:] == ["done at step 100/100"]


def test_interval_zero_prints_every_step_and_evaluations_stay_visible():
    stream = io.StringIO()
    progress = Progress(3, interval=0.0, stream=stream)
    progress.step(1, {"eval/score": 0.25, "eval/solved": 0.5})
    progress.step(2, {"reward/mean": 1})
    assert [line.split("  ")[:4] for line in stream.getvalue().splitlines()] == [
        ["step 1/3", "score 25.0%", "solved 50.0%"],
        ["step 2/3", "reward 1.000", "score 25.0%", "solved 50.0%"],
    ]


def test_a_run_that_was_restored_has_no_numbers_yet():
    stream = io.StringIO()
    Progress(3, 2, stream=stream).step(2, {})
    assert stream.getvalue() == "step 2/3\n"


def test_notes_are_lines_of_their_own():
    stream = io.StringIO()
    with Progress(3, 2, interval=3600, stream=stream) as progress:
        progress.note("lost [one]")
    assert stream.getvalue().splitlines() == ["lost [one]", "done at step 2/3"]


def test_silence_is_broken_by_a_sign_of_life():
    stream = Pipe("step 2/9  still compiling update (")
    with Progress(9, 2, interval=0.01, stream=stream) as progress:
        progress.phase("compiling update")
        assert stream.seen.wait(30)


def test_a_run_that_a_budget_ends_says_no_number_of_steps():
    stream = io.StringIO()
    with Progress(ENDLESS, interval=0.0, stream=stream) as progress:
        for step in (1, 2):
            progress.step(step, {"reward/mean": 0.5})
    lines = stream.getvalue().splitlines()
    assert lines[-1] == "done at step 2" and not any("left" in line or "1000000" in line for line in lines)


def test_quick_steps_speak_for_themselves(monkeypatch):
    """After the interval the next line is that of a step, with its numbers, not of the phase that has just begun."""
    stream, clock = io.StringIO(), [0.0]
    monkeypatch.setattr("jaxrl_llm.runs.progress.time.monotonic", lambda: clock[0])
    progress = Progress(9, interval=30.0, stream=stream)
    progress.step(1, {"reward/mean": 0.5})
    clock[0] = 31.0
    progress.phase("learning")
    progress._phase_start, progress._last_line = 30.5, 0.0
    ticks = iter((31.0, 32.0, 200.0))
    monkeypatch.setattr(progress._finished, "wait", lambda seconds: clock.__setitem__(0, next(ticks)) or clock[0] > 100)
    progress._beat()
    assert "still" not in stream.getvalue()
    progress.step(2, {"reward/mean": 0.75})
    assert stream.getvalue().splitlines()[-1].startswith("step 2/9  reward 0.750")


def test_errors_pass_through_and_are_named():
    stream = io.StringIO()
    with pytest.raises(KeyError), Progress(9, 2, stream=stream):
        raise KeyError("x")
    assert stream.getvalue().splitlines()[-1] == "stopped by KeyError at step 2/9"
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_closed_and_full_streams_do_not_end_the_run(tmp_path):
    stream = open(tmp_path / "log", "w")
    with Progress(2, stream=stream) as progress:
        stream.close()
        progress.step(1, {})
    reader, writer = os.pipe()
    os.close(reader)
    broken = os.fdopen(writer, "w")
    with Progress(2, stream=broken) as progress:
        progress.step(1, {})
    with pytest.raises(BrokenPipeError):
        broken.close()


def test_terminal_shows_bar_metrics_and_phase():
    leader, follower = pty.openpty()
    shown = []

    def read():
        with contextlib.suppress(OSError):  # the error of a terminal that is gone
            while data := os.read(leader, 65536):
                shown.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(follower, "w") as stream, Progress(20, 5, stream=stream) as progress:
        progress.phase("compiling [update]")
        progress.step(6, {"reward/mean": 0.125})
        progress.note("lost [one]")
    reader.join(30)
    os.close(leader)
    text = b"".join(shown).decode()
    assert "6/20" in text and "reward 0.125" in text and "compiling [update]" in text
    assert "done at step 6/20" in text and "lost [one]\r\n" in text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
        (4 * 86400 + 3 * 3600, "4 d 03 h"),
        (-5, "0 s"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_a_phase_with_parts_has_the_bar_until_the_next():
    progress = Progress(100, stream=io.StringIO())
    progress.phase("supervised warm-up 20/60", 20, 60)
    assert progress._count() == (20, 60)
    progress.phase("evaluating")
    assert progress._count() == (0, 100)
