"""The weights of the best evaluation: which are kept, also in a run that continues from an earlier step."""
import json
import warnings

import numpy as np
import pytest

from jaxrl_llm.store.best import Best
from jaxrl_llm.store.checkpoints import Checkpoints


def see(folder, values, start=0):
    """Evaluations of a run that continues from `start`; their lines are in metrics.jsonl, as in a real run."""
    file = folder / "metrics.jsonl"
    lines = [line for line in (file.read_text().splitlines() if file.is_file() else []) if json.loads(line)["step"] <= start]
    file.write_text("".join(line + "\n" for line in lines))
    with Best(folder, "eval/score", start) as best:
        for step, value in values.items():
            best.see(step, {"eval/score": value}, {"w": np.full(2, step, np.float32)}, None)
            with open(file, "a") as out:
                out.write(json.dumps({"step": step, "eval/score": value}) + "\n")
    with Checkpoints(folder / "best", read_only=True) as store:
        result = store.restore({"params": {"w": np.zeros(2, np.float32)}})
        assert store.steps() == [result.step]
    assert result.state["params"]["w"].tolist() == [result.step] * 2
    return result.step, result.host["value"]


def test_the_first_of_the_largest_is_kept(tmp_path):
    assert see(tmp_path, {0: 0.1, 2: 0.5, 4: 0.5, 6: 0.2}) == (2, 0.5)
    assert see(tmp_path, {8: 0.4}, start=6) == (2, 0.5)  # earlier evaluations count
    assert see(tmp_path, {10: 0.6}, start=8) == (10, 0.6)


def test_a_run_that_continues_before_its_best_step_forgets_it(tmp_path):
    see(tmp_path, {0: 0.1, 2: 0.3, 4: 0.9})
    with pytest.warns(RuntimeWarning, match="on a new branch: checkpoints .4. of the old one are now in"):
        assert see(tmp_path, {3: 0.2}, start=2) == (3, 0.2)


def test_a_larger_value_whose_weights_were_never_published_does_not_count(tmp_path):
    """A kill between the line of step 2 and the end of its save: the weights are those of step 0."""
    see(tmp_path, {0: 0.1})
    with open(tmp_path / "metrics.jsonl", "a") as out:
        out.write(json.dumps({"step": 2, "eval/score": 0.5}) + "\n")
    assert see(tmp_path, {4: 0.45}, start=2) == (4, 0.45)


def test_the_smallest_is_kept_of_a_metric_with_a_sign(tmp_path):
    with Best(tmp_path, "-eval/loss", 0) as best:
        for step, value in {0: 2.0, 2: 1.5, 4: 1.75}.items():
            best.see(step, {"eval/loss": value}, {"w": np.zeros(1)}, None)
        best.store.wait()
        assert best.store.steps() == [2] and best.largest == -1.5


def test_without_a_metric_nothing_is_kept(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Best(tmp_path, "", 0) as best:
            best.see(0, {}, {}, None)
    assert not list(tmp_path.iterdir())


def test_a_metric_that_an_evaluation_lacks_is_waited_for_after_the_first(tmp_path):
    with Best(tmp_path, "eval/hard/score", 0) as best:
        with pytest.raises(ValueError, match="Did you mean 'eval/hard/solved'"):
            best.see(0, {"eval/hard/solved": 1.0}, {"w": np.zeros(1)}, None)
        best.see(1, {"eval/score": 1.0}, {"w": np.zeros(1)}, None)
        assert best.store.steps() == []
