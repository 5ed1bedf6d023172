"""Worker processes under attack: deadlines hold, an error ends the rest, and no process is left behind."""

import os
import pathlib
import resource
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import worker_attacks
from processes import eventually, marked

from jaxrl_llm import rewards
from jaxrl_llm.rewards import Reward, RewardError, combine
from jaxrl_llm.rewards.pool import WorkerPool

FOLDER = pathlib.Path(__file__).parent
TARGET = "worker_attacks:attack"
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="processes are found in /proc")


def calls(*completions):
    return [(completion, "a", None) for completion in completions]


@pytest.fixture
def pool():
    pool = WorkerPool(TARGET, workers=1, deadline=1.0, scores=True)
    yield pool
    pool.close()


@pytest.mark.slow
@linux
@pytest.mark.parametrize("attack", ["child", "forty", "setsid", "chain"])
def test_what_a_reward_starts_ends_with_its_worker(pool, mark, attack):
    assert [outcome.value for outcome in pool.map(calls(attack, "a", "b"))] == [0.25, 1.0, 0.0]
    assert attack == "chain" or eventually(lambda: len(marked(mark)) > 2)  # the worker, its keeper and what was started
    pool.close()
    assert [marked(mark) for _ in range(3)] == [[]] * 3


@pytest.mark.slow
@linux
def test_a_late_call_takes_what_it_started_with_it(pool, mark):
    outcomes = pool.map(calls("forty", "setsid", "sleep", "a"))
    assert [outcome.status for outcome in outcomes] == ["ok", "ok", "timeout", "ok"]
    assert eventually(lambda: len(marked(mark)) <= 5)  # a worker, a spare one, their keepers, their template
    pool.close()
    assert marked(mark) == []


@pytest.mark.slow
def test_a_call_is_not_blamed_for_leftovers_of_earlier_calls():
    pool = WorkerPool(TARGET, workers=2, deadline=5.0, scores=True)
    assert [outcome.value for outcome in pool.map(calls("poison", "poison", "poison", "poison"))] == [0.25] * 4
    time.sleep(1.5)  # every process has ended by then
    assert [outcome.status for outcome in pool.map(calls("a"))] == ["ok"]
    pool.close()


@pytest.mark.slow
def test_a_module_with_threads_is_imported_by_every_worker():
    pool = WorkerPool("threaded_reward:length", workers=2, deadline=5.0, scores=True)
    assert [outcome.value for outcome in pool.map(calls("a", "ab", "abc"))] == [1.0, 2.0, 3.0]
    pool.close()


@pytest.mark.slow
@linux
def test_the_template_may_die(mark):
    pool = WorkerPool(TARGET, workers=1, deadline=2.0, scores=True)
    assert pool.map(calls("a"))[0].value == 1.0
    os.kill(pool._template._process.pid, signal.SIGKILL)
    assert eventually(lambda: not marked(mark))  # its workers end with it
    assert [outcome.value for outcome in pool.map(calls("a", "sleep", "b"))] == [1.0, None, 0.0]
    pool.close()
    assert marked(mark) == []


@linux
def test_a_worker_without_its_keeper_dies(pool, mark):
    outcomes = pool.map(calls("keeper", "a"))
    assert [outcome.status for outcome in outcomes] == ["crash", "ok"]
    pool.close()
    assert eventually(lambda: not marked(mark))


@pytest.mark.slow
@pytest.mark.parametrize(("attack", "status", "message"), [
    ("close", "crash", "ended with code"),
    ("write", "crash", "no reply"), ("nested", "crash", "no reply"),
    ("giant", "error", "more than 1048576 bytes"),
    ("fork and return", "ok", ""), ("exit", "error", "SystemExit: 0"),
    ("interrupt", "crash", "code -15"), ("input", "ok", ""), ("mute", "error", "Mute"),
    ("text", "error", "ValueError: xxx"), ("stop", "timeout", "no result within 1 s")])
def test_an_attack_is_one_outcome_and_the_next_call_is_served(pool, attack, status, message):
    first, second = pool.map(calls(attack, "a"))
    assert (first.status, second.status, second.value) == (status, "ok", 1.0) and message in first.message
    assert len(first.message) <= 2000


@linux
def test_a_machine_without_room_for_processes_stops_the_run():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reward = rewards.make("isolated", target=TARGET, workers=1)
    free = os.dup(0)
    os.close(free)  # the lowest number that is free: closed files leave gaps
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        with pytest.raises(RewardError, match="no worker process for .* could be started: .*Too many open files"):
            score(reward, ["a"], on_error="zero")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_a_long_value_is_refused():
    pool = WorkerPool("worker_attacks:value", workers=1, deadline=20.0)
    outcomes = pool.map(calls("long", "deep", "float"))
    assert [outcome.status for outcome in outcomes] == ["error", "error", "ok"]
    assert "more than 1048576 bytes" in outcomes[0].message and "RecursionError" in outcomes[1].message
    pool.close()


def score(reward, completions, **options):
    return combine([reward], **options)(completions, ["a"] * len(completions))


@pytest.fixture(scope="module")
def both():
    """The same function in this process and in one of its own."""
    apart = rewards.make("isolated", target="worker_attacks:value", workers=1, deadline=20.0)
    yield Reward("worker_attacks:value", worker_attacks.value), apart
    apart.fn.close()


@pytest.mark.parametrize(("kind", "expected"), [
    ("bool", 1.0), ("int", 2.0), ("float", 0.5), ("float32", 0.25), ("int8", 3.0), ("numpy bool", 1.0), ("0-d", 0.5),
    ("fraction", 0.25), ("decimal", 0.25), ("jax", 0.75), ("jax bfloat16", 0.5), ("jax bool", 1.0)])
def test_both_ways_of_running_a_reward_accept_the_same(both, kind, expected):
    assert [score(reward, [kind]).total.tolist() for reward in both] == [[expected]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "message"), [
    ("text", "returned '1.0', which is not a number"),
    ("bytes", "returned b'1', which is not a number"), ("list", "returned [1.0], which is not a number"),
    ("complex", "returned 1j, which is not a number"), ("1-d", "returned shape (1,), expected ()"),
    ("jax 1-d", "returned shape (2,), expected ()"), ("nan", "returned nan, not a finite number"),
    ("inf", "returned -inf, not a finite number"), ("large", "returned 1e+300, not a finite number"),
    ("10**400", "returned 1000000000"), ("10**5000", "returned int that has no text, not a finite number"),
    ("numpy text", "returned array('1', dtype='<U1'), which is not a number"),
    ("object", "returned array(None, dtype=object), which is not a number"),
    ("date", "returned np.datetime64('2020-01-01'), which is not a number"),
    ("deep", "returned list that has no text, which is not a number")])
def test_both_ways_of_running_a_reward_refuse_the_same_with_the_same_message(both, kind, message):
    messages = []
    for reward in both:
        assert score(reward, ["float", kind, "int"], on_error="zero").total.tolist() == [0.5, 0.0, 2.0]
        with pytest.raises(RewardError) as caught:
            score(reward, ["float", kind, "int"])
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and f"completion 1 '{kind}' (answer 'a'): ValueError: {message}" in messages[0]


def test_one_impossible_number_of_a_batch_reward_is_one_failure():
    reward = Reward("mine", lambda completions, answers, problems: [1.0, 10 ** 400, 0.5], per="batch")
    scores = score(reward, ["a", "b", "c"], on_error="zero")
    assert scores.total.tolist() == [1.0, 0.0, 0.5] and scores.failures == {"mine/error": 1}


@pytest.mark.slow
@pytest.mark.parametrize("completion", ["\ud800", "\udfff a", "a\0b", "\0", "\U000e0041", "a" * 5_000_000])
def test_any_text_is_a_completion(both, completion):
    pool = WorkerPool(TARGET, workers=1, deadline=20.0, scores=True)
    assert [outcome.value for outcome in pool.map([(completion, completion, None), (completion, "b", None)])] == [1.0, 0.0]
    pool.close()


@pytest.mark.slow
def test_a_batch_that_is_late_scores_the_rest_zero_and_counts_it():
    reward = rewards.make("isolated", target=TARGET, workers=2, deadline=4.0)
    completions = ["a"] * 3 + ["sleep"] * 12 + ["a"]
    scores = score(reward, completions, on_error="zero", deadline=10.0)
    late = scores.failures[f"{TARGET}/late"]
    assert scores.total.tolist() == [1.0] * 3 + [0.0] * 12 + [1.0]  # slow calls do not take the time of quick ones
    assert late >= 8 and late + scores.failures.get(f"{TARGET}/timeout", 0) == 12
    assert score(reward, ["a", "b"]).total.tolist() == [1.0, 0.0]  # the pool serves the next batch
    reward.fn.close()


@pytest.mark.slow
def test_a_call_that_is_put_off_gets_its_whole_deadline():
    pool = WorkerPool(TARGET, workers=1, deadline=3.0, scores=True)
    outcomes = pool.map(calls("second", *["a"] * 20), until=time.monotonic() + 8)  # a share is less than half a second
    assert [outcome.value for outcome in outcomes] == [0.25] + [1.0] * 20
    pool.close()


@pytest.mark.slow
def test_a_batch_that_is_late_does_not_end_the_run_where_errors_do():
    reward = rewards.make("isolated", target=TARGET, workers=1, deadline=60.0)
    assert score(reward, ["a"], deadline=60.0).total.tolist() == [1.0]  # the worker has started
    scores = score(reward, ["a", "sleep", "a"], on_error="raise", deadline=6.0)
    assert scores.total.tolist() == [1.0, 0.0, 0.0] and scores.failures == {f"{TARGET}/late": 2}
    reward.fn.close()


def test_a_pool_that_is_busy_is_not_waited_for_beyond_the_deadline(pool):
    with pool._lock:
        assert [outcome.status for outcome in pool.map(calls("a", "a"), until=time.monotonic() + 0.1)] == ["late", "late"]


@pytest.mark.slow
def test_timeouts_do_not_wait_for_a_new_process():
    pool = WorkerPool(TARGET, workers=2, deadline=0.5, scores=True)
    assert [o.value for o in pool.map(calls("a", "a"))] == [1.0, 1.0]
    start = time.monotonic()
    outcomes = pool.map(calls(*["sleep"] * 8), until=start + 60)
    assert [outcome.status for outcome in outcomes] == ["timeout"] * 8 and time.monotonic() - start < 10  # four rounds
    pool.close()


@pytest.mark.slow
@linux
def test_the_first_error_ends_the_batch_and_the_processes(mark):
    reward = rewards.make("isolated", target=TARGET, workers=2, deadline=20.0)
    start = time.monotonic()
    with pytest.raises(RewardError, match="completion 1 'exit' .*SystemExit: 0"):
        score(reward, ["sleep", "exit"] + ["sleep"] * 20)
    assert time.monotonic() - start < 15 and marked(mark) == []  # not 200 s


def program(text, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(text), *arguments], env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


BUSY = """
    import os, sys
    from jaxrl_llm import rewards
    reward = rewards.make("isolated", target="worker_attacks:attack", workers=2, deadline=300.0)
    combined = rewards.combine([reward], on_error="zero")
    combined(["setsid", "child"], ["", ""])
    if "holder" in sys.argv and os.fork() == 0:  # another child of the run, which holds its pipes open
        os.setsid()
        os.closerange(0, 3)
        import time
        time.sleep(40)
        os._exit(0)
    print("ready", flush=True)
    combined(["sleep"] * 4, [""] * 4)
"""


@pytest.mark.slow
@linux
@pytest.mark.parametrize("arguments", [(), ("holder",)])
def test_workers_end_with_a_parent_that_is_killed(mark, arguments):
    parent = program(BUSY, *arguments)
    assert parent.stdout.readline() == "ready\n"
    time.sleep(0.5)  # in the middle of a call
    assert len(marked(mark)) >= 7
    parent.kill()
    parent.communicate()
    eventually(lambda: len(marked(mark)) <= len(arguments))
    left = marked(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) == len(arguments)


@pytest.mark.slow
@linux
def test_an_interrupt_ends_a_run_and_its_workers_at_once(mark):
    parent = program("import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + textwrap.dedent(BUSY))
    assert parent.stdout.readline() == "ready\n"
    time.sleep(0.5)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors and eventually(lambda: not marked(mark))


@pytest.mark.slow
def test_a_reward_that_hangs_does_not_keep_the_interpreter():
    parent = program("""
        import time
        from jaxrl_llm import rewards
        hanging = rewards.Reward("mine", lambda *_: time.sleep(600))
        rewards.combine([hanging], deadline=0.5)(["a"], ["a"])
    """)
    _, errors = parent.communicate(timeout=40)
    assert parent.returncode == 1 and "'mine' did not score 1 completions within 0.5 s" in errors


@pytest.mark.slow
@linux
def test_no_process_or_descriptor_is_left_after_many_batches(mark):
    reward = rewards.make("isolated", target=TARGET, workers=2, deadline=0.5)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        score(reward, ["sleep", "a", "exit", "child"], on_error="zero")
    reward.fn.close()
    assert marked(mark) == [] and len(os.listdir("/proc/self/fd")) == before


def test_a_reward_says_how_it_is_called():
    with pytest.raises(ValueError, match="'batch' rewards alone can be timed"):
        Reward("mine", len, timed=True)
    with pytest.raises(ValueError, match="timed ones alone can fail fast"):
        Reward("mine", len, per="batch", fail_fast=True)
    seen = []

    def timed(completions, answers, problems, until):
        seen.append(until)
        return np.ones(len(completions))

    reward = Reward("mine", timed, per="batch", timed=True)
    score(reward, ["a"])
    score(reward, ["a"], deadline=100.0)
    assert seen[0] is None and 0 < seen[1] - time.monotonic() <= 100
