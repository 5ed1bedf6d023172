"""Worker processes: late ones are killed and replaced in any state; faults reach the caller by name."""

import os
import pathlib
import sys
import threading

import numpy as np
import pytest
import reward_faults

from jaxrl_llm import rewards
from jaxrl_llm.rewards import RewardError, combine
from jaxrl_llm.rewards.isolated import Isolated
from jaxrl_llm.rewards.pool import WorkerPool
from jaxrl_llm.rewards.worker import as_reward
from jaxrl_llm.tasks import Problem

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # workers must be able to import reward_faults


def calls(*completions):
    return [(completion, "a", None) for completion in completions]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool("reward_faults:fault", workers=1, deadline=1.0)
    yield pool
    pool.close()


@pytest.mark.slow
def test_every_fault_is_reported_and_the_next_call_is_served(pool):
    outcomes = pool.map(calls("a", "sleep", "a", "power", "a", "exit", "a", "raise", "text", "memory", "print", "b"))
    assert [outcome.status for outcome in outcomes] == [
        "ok", "timeout", "ok", "timeout", "ok", "crash", "ok", "error", "ok", "error", "ok", "ok"]
    assert [outcomes[i].value for i in (0, 2, 4, 6, 8, 10, 11)] == [1.0, 1.0, 1.0, 1.0, "one", 0.5, 0.0]
    assert outcomes[1].message == "no result within 1 s; the process was killed"
    assert outcomes[5].message == "the worker process ended with code 3"
    assert outcomes[7].message == "KeyError: 'on purpose'" and outcomes[9].message.startswith("MemoryError")


def test_a_late_process_is_really_gone(pool):
    before, again, late, after = (outcome.value for outcome in pool.map(calls("pid", "pid", "sleep", "pid")))
    assert before == again != after and late is None
    assert not alive(before) and alive(after)


def test_close_ends_the_processes_and_the_pool_can_be_used_again(pool):
    (first,) = pool.map(calls("pid"))
    pool.close()
    assert not alive(first.value)
    assert pool.map(calls("a"))[0].value == 1.0


def test_many_threads_share_the_workers(pool):
    results = {}

    def ask(name):
        results[name] = [outcome.value for outcome in pool.map(calls("a", "b", "a"))]

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [1.0, 0.0, 1.0] for name in range(6)}


def test_arguments_that_cannot_be_sent(pool):
    (outcome,) = pool.map([("a", "a", threading.Lock())])
    assert outcome.status == "error" and "cannot be sent" in outcome.message
    assert pool.map([]) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["no_such_module:f", "reward_faults:no_such_function"])
def test_a_worker_that_cannot_start_stops_the_run(target):
    reward = rewards.make("isolated", target=target, workers=1)
    with pytest.raises(RewardError, match=f"a worker process for '{target}' did not start.*no_such"):
        combine([reward], on_error="zero")(["a"], ["a"])


@pytest.mark.slow
def test_isolated_reward_names_or_counts_each_fault():
    reward = rewards.make("isolated", target="reward_faults:fault", workers=1, deadline=1.0)
    completions = ["a", "sleep", "exit", "raise", "text", "numpy", "none"]
    scores = combine(["exact", reward], on_error="zero")(completions, ["a"] * 7)
    np.testing.assert_equal(scores.components[:, 1], [1, 0, 0, 0, 0, 0.25, np.nan])
    name = "reward_faults:fault"
    assert scores.failures == {f"{name}/timeout": 1, f"{name}/crash": 1, f"{name}/error": 2}
    with pytest.raises(RewardError, match=f"reward '{name}' failed on completion 1 'sleep' .*TimeoutError: no result"):
        combine([reward])(completions, ["a"] * 7)
    reward.fn.close()


@pytest.mark.slow
def test_calls_that_fail_score_the_given_number_and_are_counted():
    reward = Isolated("reward_faults:fault", workers=1, deadline=1.0, failed=-1.0)
    output = reward(["a", "raise", "text", "exit", "sleep", "b"], ["a"] * 6, [None] * 6, fail_fast=True)
    assert output.scores.tolist() == [1, -1, -1, -1, -1, 0] and not output.errors
    assert output.counts == {"error": 2, "crash": 1, "timeout": 1}
    reward.close()


@pytest.mark.parametrize("function", (reward_faults.compute_score, reward_faults.open_ended))
def test_a_function_with_the_arguments_of_verl_gets_them_by_name(function):
    problem = Problem("1+1=", "2", 0, extra={"data_source": "openai/gsm8k", "extra_info": {"index": 7}})
    score = as_reward(function)
    assert score("2", "2", problem) == 1.0 and score("3", "2", problem) < 1
    assert as_reward(reward_faults.fault) is reward_faults.fault and as_reward(max) is max
    assert score("2", "2", None) < 1 or function is reward_faults.open_ended


def test_verls_function_in_a_process():
    problem = Problem("1+1=", "2", 0, extra={"data_source": "openai/gsm8k", "extra_info": {"index": 7}})
    reward = rewards.make("isolated", target="reward_faults:compute_score", workers=1)
    assert combine([reward])(["2", "3"], ["2", "2"], [problem, problem]).total.tolist() == [1.0, 0.0]
    reward.fn.close()
