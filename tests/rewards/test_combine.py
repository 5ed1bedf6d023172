"""The sum of rewards, and the effect of one that misbehaves."""

import threading
import time

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import Reward, RewardError, combine


def test_total_components_names():
    scores = combine([("last_number", 2.0), ("exact", 0.5)])(["is 12", "12", "13"], ["12", "12", "12"])
    np.testing.assert_array_equal(scores.components, [[1, 0], [1, 1], [0, 0]])
    np.testing.assert_array_equal(scores.total, [2.0, 2.5, 0.0])
    assert scores.components.dtype == scores.total.dtype == np.float32
    assert scores.names == ("last_number", "exact") and scores.failures == {}


def test_no_completions_give_empty_arrays():
    scores = combine(["exact", rewards.make("boxed")])([], [])
    assert scores.total.shape == (0,) and scores.components.shape == (0, 2)


def misbehave(completion, answer, problem):
    return {"raise": lambda: 1 / 0, "nan": lambda: float("nan"), "text": lambda: "one",
            "array": lambda: np.zeros(2), "inf": lambda: -np.inf,
            "huge": lambda: 1e300, "fine": lambda: np.float64(1)}[completion]()


@pytest.mark.parametrize(("completion", "message"), [
    ("raise", "ZeroDivisionError"), ("nan", "returned nan, not a finite number"),
    ("text", "'one', which is not a number"), ("inf", "returned -inf"), ("huge", "returned 1e\\+300"),
    ("array", r"returned shape \(2,\), expected \(\)"),
])
def test_a_bad_completion_reward_is_named_or_counted(completion, message):
    reward = Reward("mine", misbehave)
    expected = f"reward 'mine' failed on completion 1 '{completion}' .*{message}.*on_error='zero'"
    with pytest.raises(RewardError, match=expected):
        combine([reward])(["fine", completion], ["", ""])
    scores = combine([reward, "exact"], on_error="zero")(["fine", completion], ["", completion])
    assert scores.components.tolist() == [[1, 0], [0, 1]] and scores.failures == {"mine/error": 1}


@pytest.mark.parametrize(("output", "message", "expected", "failed"), [
    ([1.0, 2.0, 3.0], r"a batch of 2 completions: ValueError: returned shape \(3,\), expected \(2,\)", [0, 0], 2),
    (1.0, r"returned shape \(\), expected \(2,\)", [0, 0], 2),
    ([[1.0], [1.0]], r"returned shape \(2, 1\)", [0, 0], 2),
    ([1.0, float("nan")], "completion 1 'b' .*returned nan", [1, 0], 1),
    ([float("nan"), None], "completion 0 'a' .*returned nan", [0, 0], 1),
    ("ab", "not numbers", [0, 0], 2),
])
def test_a_bad_batch_reward_is_named_or_counted(output, message, expected, failed):
    reward = Reward("mine", lambda completions, answers, problems: output, per="batch")
    with pytest.raises(RewardError, match=f"reward 'mine' failed on .*{message}"):
        combine([reward])(["a", "b"], ["", ""])
    scores = combine([reward], on_error="zero")(["a", "b"], ["", ""])
    assert scores.total.tolist() == expected and scores.failures == {"mine/error": failed}


def test_none_abstains_and_the_other_rewards_count():
    def only_numbers(completion, answer, problem):
        return float(completion == answer) if completion.isdigit() else None

    def in_batches(completions, answers, problems):
        return [None if text == "b" else 0.5 for text in completions]

    reward = combine(["exact", (Reward("numbers", only_numbers), 2.0), Reward("batch", in_batches, per="batch")])
    scores = reward(["7", "b", "8"], ["7", "b", "7"])
    assert scores.total.tolist() == [3.5, 1.0, 0.5] and scores.failures == {}
    np.testing.assert_equal(scores.components, [[1, 1, 0.5], [1, np.nan, np.nan], [0, 0, 0.5]])
    first = combine([Reward("numbers", only_numbers), "exact"])(["b", "7"], ["b", "7"])
    assert first.total.tolist() == [1, 2] and first.components[:, 0].tolist() == [0, 1]  # the evaluated score is a number


def test_rewards_that_abstain_everywhere_score_0_and_warn():
    forgotten = combine([Reward("mine", lambda *_: None)])
    with pytest.warns(UserWarning, match=r"all rewards \(mine\) return None for all 2 .* without a return statement"):
        assert forgotten(["a", "b"], ["a", "b"]).total.tolist() == [0, 0]


def test_a_reference_the_verifier_cannot_read_is_an_error():
    with pytest.raises(RewardError, match="last_number needs a number as reference answer, got 'Paris'; use 'exact'"):
        combine(["last_number"])(["5"], ["Paris"])


def test_a_useless_checker_stops_the_run_under_any_policy():
    def broken(completion, answer, problem):
        raise RewardError("canary failed")

    with pytest.raises(RewardError, match="canary failed"):
        combine([Reward("mine", broken)], on_error="zero")(["a"], ["a"])


def test_long_completions_are_shortened_in_messages():
    with pytest.raises(RewardError) as caught:
        combine(["last_number"])(["x" * 10_000], ["Paris"])
    assert len(str(caught.value)) < 700


def test_calls_that_make_no_sense():
    with pytest.raises(ValueError, match="1 answers for 2 completions"):
        combine(["exact"])(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="3 lengths for 1 completions"):
        combine(["exact"])(["a"], ["a"], lengths=[1, 2, 3])
    with pytest.raises(ValueError, match="needs the number of tokens of each completion: pass lengths="):
        combine([rewards.make("soft_overlong", max_length=5, cache=1)])(["a"], ["a"])
    with pytest.raises(ValueError, match=r"different names, got \['exact', 'exact'\]"):
        combine(["exact", ("exact", 2.0)])
    with pytest.raises(ValueError, match="one or more rewards"):
        combine([])
    with pytest.raises(ValueError, match="Unknown on_error 'ignore'"):
        combine(["exact"], on_error="ignore")
    with pytest.raises(ValueError, match="per='row'"):
        Reward("mine", misbehave, per="row")


def test_a_reward_that_hangs_ends_in_an_error_at_the_deadline():
    released = threading.Event()
    hanging = Reward("slow", lambda *_: released.wait(60) and 1.0)
    with pytest.raises(RewardError, match="'slow' did not score 2 completions within 0.2 s"):
        combine([hanging], deadline=0.2)(["a", "b"], ["a", "b"])
    released.set()


def test_what_earlier_parts_of_a_batch_took_counts_towards_its_deadline():
    seen = []

    def timed(completions, answers, problems, until):
        seen.append(until)
        return np.ones(len(completions))

    both = combine([Reward("timed", timed, per="batch", timed=True), "exact"], deadline=1000)
    first = both(["a"], ["a"])
    both(["a"], ["a"], spent=np.array([600.0, 0.0]))
    assert first.seconds.shape == (2,) and (first.seconds >= 0).all()
    assert seen[0] - seen[1] > 500 and seen[1] > time.monotonic() + 300
    both.part(0.25)(["a"], ["a"], spent=np.array([600.0, 0.0]))  # of the 400 seconds that are left
    assert time.monotonic() + 50 < seen[2] < time.monotonic() + 101
    with pytest.raises(RewardError, match="'exact' did not score 1 completions"):
        combine([Reward("exact", lambda *_: time.sleep(5) or 1.0)], deadline=1000)(["a"], ["a"], spent=np.array([1000.0]))


def test_a_deadline_changes_neither_scores_nor_errors():
    quick = combine(["exact"], deadline=60)
    np.testing.assert_array_equal(quick(["a", "b"], ["a", "c"]).total, [1, 0])

    def broken(*_):
        raise KeyError("lost")

    with pytest.raises(RewardError, match="KeyError"):
        combine([Reward("broken", broken)], deadline=60)(["a"], ["a"])
