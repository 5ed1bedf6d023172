"""The first M of N environments: the order of received results, losses, and the readiness of batches."""
import threading

import doors as hall
import numpy as np
import pytest

from jaxrl_llm.environments.pool_times import pool_times
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.environments.threads import Threads


def say(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def doors():
    hall.DOORS.update({name: threading.Event() for name in "abcd"})
    yield hall.DOORS
    for door in hall.DOORS.values():
        door.set()
    hall.DOORS.clear()


def make(count, **settings):
    runner = Runner("doors:behind_doors", seed=0, kind="threads", workers=8, limit=1.0, **settings)
    runner.reset({uid: runner.environment.task.train[uid] for uid in range(count)})
    return runner


def test_the_first_of_many_are_received_in_the_order_in_which_they_ended(doors):
    runner = make(4)
    runner.send({0: say("a"), 1: say("b"), 2: say("c")})
    doors["c"].set()
    assert list(runner.recv(1)) == [2], "without those that wait"
    runner.send({2: say("at once"), 3: say("d")})
    assert runner.recv()[2].messages[0]["content"] == "at once"
    with pytest.raises(ValueError, match="last step of trajectory 0 was sent and not received"):
        runner.send({0: say("x")})
    with pytest.raises(ValueError, match="last step of trajectory 0 was sent and not received"):
        runner.step({0: say("x")})
    doors["d"].set()
    assert list(runner.recv(1)) == [3]
    doors["b"].set()
    assert list(runner.recv(1)) == [1]
    doors["a"].set()
    assert list(runner.recv(5)) == [0], "as many as there are"
    assert runner.recv(3) == {}
    runner.send({0: say("x")})
    assert runner.reset({9: runner.environment.task.train[9]})[9].messages and list(runner.recv()) == [0], "others may begin"
    assert [message["content"] for message in runner.recording(2).said] == ["c", "at once"]
    assert [turn.messages[0]["content"] for turn in runner.replay(2)] == ["Go.", "c", "at once"]
    runner.send({1: say("last b")})
    assert runner.recv(1)[1].done
    with pytest.raises(ValueError, match="trajectory 1 is not running"):
        runner.send({1: say("more")})


def test_what_is_ended_is_not_waited_for(doors):
    runner = make(2)
    runner.send({0: say("a"), 1: say("b")})
    runner.end([0])
    doors["a"].set()
    doors["b"].set()
    assert list(runner.recv(2)) == [1]


def test_a_batch_that_is_dropped_answers_no_later_one(doors):
    """Also a step that waits for a thread, and the step of another trajectory with the same uid."""
    runner = make(3)
    runner._pool._workers = 1
    runner.send({0: say("a"), 1: say("b"), 2: say("c")})
    runner.drop()
    runner.forget()
    doors["b"].set()
    assert not runner._running and runner.recv(1) == {} and not runner._states._kept
    runner.reset({uid: runner.environment.task.train[uid] for uid in (0, 1)})
    doors["a"].set()
    runner.send({0: say("last"), 1: say("d")})
    assert [turn.messages[0]["content"] for turn in runner.recv(1).values()] == ["last"]
    assert runner.counts == {} and runner._opened == 2


def finish(earlier):
    """Waits for all threads of environments but `earlier` ones, of other tests."""
    for thread in set(threading.enumerate()) - earlier:
        if thread.name == "environment":
            thread.join(60)


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 1])
def test_a_step_that_ends_after_its_trajectory_was_lost_leaves_no_state(doors, retries):
    earlier = set(threading.enumerate())
    runner = make(2, deadline=1.0, retries=retries)
    assert runner.step({0: say("a"), 1: say("at once")}).keys() == {1} and runner.invalid[0].kind == "timeout"
    doors["a"].set()
    finish(earlier)
    assert [key for _, _, key, _ in runner._states._kept] == [runner.recording(1).key]
    assert not runner._states._steps


@pytest.mark.parametrize("end", [lambda runner: runner.end([0]), Runner.close])
def test_a_step_that_ends_after_its_trajectory_leaves_no_state(doors, end):
    earlier = set(threading.enumerate())
    runner = make(1)
    runner.send({0: say("a")})
    end(runner)
    doors["a"].set()
    finish(earlier)
    assert not runner._states._kept and not runner._states._steps


def test_closed_threads_give_all_states_up():
    runner = make(3)
    assert len(runner._states._kept) == 3
    runner.close()
    assert not runner._states._kept
    assert runner.step({1: say("again")})[1].messages[0]["content"] == "again", "played again"


def test_sent_steps_that_fail_are_tried_again_and_then_lost(tmp_path):
    runner = Runner("faulty_environments:obedient", {"folder": str(tmp_path)}, seed=0, kind="threads", limit=1.0, retries=1)
    runner.reset({uid: runner.environment.task.train[uid] for uid in range(3)})
    runner.send({0: say("raise"), 1: say("once"), 2: say("bye")})
    turns = runner.recv(3)
    assert turns.keys() == {1, 2} and runner.invalid[0].kind == "error" and runner.counts == {"obedient/error": 1}
    assert turns[1].messages[0]["content"].split()[1:] == ["once"], "the state that the failed try left is not used"


@pytest.mark.parametrize("kind, target", [("processes", "guess_number"), ("compiled", "counting_game:counting")])
def test_batches_of_one_program_are_not_sent(kind, target):
    with pytest.raises(ValueError, match="use kind='threads', or step"):
        Runner(target, seed=0, kind=kind).send({})


def test_a_late_result_is_dropped_and_not_received_twice():
    door = threading.Event()
    threads = Threads(lambda name: door.wait(60) and name, 1, 0.2)
    threads.submit(7, ("slow",))
    (name, outcome), = threads.ready(1)
    assert (name, outcome.status) == (7, "timeout") and len(threads) == 0
    door.set()
    threads.submit(7, ("quick",))
    (name, outcome), = threads.ready(1)
    assert (name, outcome.status, outcome.value) == (7, "ok", "quick")
    threads.submit(8, ("never had",))
    threads.close()
    assert threads.ready(1) == []


# --- when batches are ready -----------------------------------------------------------------------------------------------


def latency(row, step):
    return (1.0, 2.0, 4.0, 1.0)[row]


@pytest.mark.parametrize("batch, count, batches, seconds, rate", [
    (4, 2, [[0, 3, 1, 2], [0, 3, 1, 2]], 9.0, 0.8889), (2, 4, [[0, 3], [1, 0], [3, 0], [2, 1]], 5.5, 1.4545)])
def test_a_worked_example(batch, count, batches, seconds, rate):
    times = pool_times(latency, 4, batch=batch, workers=4, policy=0.5, batches=count)
    assert times.batches == batches and times.seconds == seconds and round(times.rate, 4) == rate


def test_quick_environments_are_read_more_often_in_small_batches():
    """Latencies vary from step to step: small batches are quicker and equally even. A slow environment appears rarely."""
    drawn = np.exp(0.8 * np.random.default_rng(0).normal(size=(8, 4000)))
    rates = {batch: pool_times(lambda i, k: drawn[i, k], 8, batch=batch, workers=8, policy=0.05, batches=4000 // batch)
             for batch in (8, 4, 2)}
    assert rates[8].rate < rates[4].rate < rates[2].rate and rates[8].steps == [500] * 8
    assert max(rates[2].steps) < 1.2 * min(rates[2].steps)
    uneven = pool_times(latency, 4, batch=2, workers=4, policy=0.5, batches=400)
    assert uneven.steps[0] > 2 * uneven.steps[2]
    assert pool_times(latency, 4, batch=4, workers=4, policy=0.5, batches=3).steps == [3] * 4


def test_fewer_workers_take_turns():
    times = pool_times(latency, 4, batch=4, workers=1, policy=0.0, batches=1)
    assert (times.batches, times.seconds) == ([[0, 1, 2, 3]], 8.0)
    for wrong in ({"batch": 5}, {"batch": 0}, {"workers": 0}, {"batches": 0}):
        with pytest.raises(ValueError, match="allowed are batches of 1 to all environments"):
            pool_times(latency, 4, **{"batch": 2, "workers": 1, "policy": 0.0, "batches": 1, **wrong})
