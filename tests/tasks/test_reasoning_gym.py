"""reasoning_gym data sets as tasks, with their own scorer."""
import re
import subprocess
import sys

import pytest

from jaxrl_llm import rewards, tasks

reasoning_gym = pytest.importorskip("reasoning_gym")


def test_sides_are_disjoint_and_reproducible():
    options = {"dataset": "chain_sum", "train_size": 60, "heldout_size": 20, "seed": 7}
    task, again = (tasks.make("reasoning_gym", **options) for _ in "ab")
    train, heldout = ({tasks.text_of(p) for p in side} for side in (task.train, task.heldout))
    assert len(task.train) == 60 and not train & heldout
    assert [p.prompt for p in task.train] == [p.prompt for p in again.train]
    assert [p.id for p in task.heldout] == list(range(60, 60 + len(task.heldout)))


def test_heldout_drops_what_training_has():
    # One-digit sums of two: 81 questions, so 200 + 100 draws must collide.
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = tasks.make("reasoning_gym", dataset="chain_sum", train_size=60, heldout_size=100, config=config)
    train, heldout = ({tasks.text_of(p) for p in side} for side in (task.train, task.heldout))
    assert 0 < len(task.heldout) < 100 and not train & heldout


@pytest.mark.slow
def test_own_scorer():
    task = tasks.make("reasoning_gym", dataset="countdown", train_size=4, heldout_size=2)
    problem = task.train[0]
    score = rewards.combine([task.reward])
    right = problem.extra["entry"]["metadata"]["expression"]
    completions = [f"I think 1+1. <answer>1+1</answer> no: <answer> {right} </answer>", right, "<answer>1+1</answer>"]
    total = score(completions, [problem.answer] * 3, [problem] * 3).total
    assert total[0] == total[1] == 1.0 and total[2] < 0.1


@pytest.mark.slow
def test_text_that_a_scorer_evaluates_cannot_act(tmp_path):
    # The countdown scorer evaluates the answer: in an unrestricted process each of these leaves the marker.
    task, marker = tasks.make("reasoning_gym", dataset="countdown", train_size=1, heldout_size=1), tmp_path / "marker"
    problem = task.train[0]
    attacks = [f"__import__('pathlib').Path({str(marker)!r}).write_text('x')",
               f"__import__('os').system('touch {marker}')",
               f"__import__('subprocess').run(['touch', {str(marker)!r}])"]
    for attack in attacks:
        eval(attack)
        assert marker.exists()
        marker.unlink()
    scores = rewards.combine(["reasoning_gym"])(attacks, [problem.answer] * 3, [problem] * 3)
    assert scores.total.max() < 0.1 and not marker.exists()


def test_errors():
    with pytest.raises(ValueError, match="data set 'leg_countin'. Near: leg_counting, .* lists all") as caught:
        tasks.make("reasoning_gym", dataset="leg_countin")
    assert str(caught.value).split("Near: ")[1].split(". ")[0].count(",") < 5  # at most five
    everything = re.search("`python -c '(.*)'`", str(caught.value))[1]
    assert subprocess.run([sys.executable, "-c", everything], capture_output=True, text=True).stdout.split() == sorted(
        reasoning_gym.factory.DATASETS)
    with pytest.raises(ValueError, match="refused the configuration {'min_animal': 1}.*min_animal"):
        tasks.make("reasoning_gym", dataset="leg_counting", config={"min_animal": 1})
    with pytest.raises(rewards.RewardError, match="needs problems of the reasoning_gym task"):
        rewards.combine(["reasoning_gym"])(["5"], ["5"])


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"this task needs the package reasoning-gym, .*pip install 'jaxrl_llm\[tasks\]'"):
        tasks.make("reasoning_gym", dataset="chain_sum")
