"""A run that learns from packed rows: its weights are those of rectangular rows, and it resumes bit for bit."""
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm.runs import loop


def tiny(steps, packed_rows, **changes):
    c = tiny_config.get_config()
    c.steps, c.learner.packed_rows, c.eval.every, c.checkpoint.every, c.samples_every = steps, packed_rows, steps, 2, steps
    c.learner.epochs, c.learner.minibatches, c.objective = 2, 2, "+ kl(0.1)"
    c.update_from_flattened_dict(changes)
    return c


@pytest.mark.slow
def test_a_run_is_that_of_rectangular_rows_and_resumes_bit_for_bit(tmp_path):
    """A micro-batch is one row of two completions, less than a group of four."""
    sgd = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.05}
    for name, size in (("packed", 1), ("plain", 0)):
        loop.train(tiny(3, size, **sgd), tmp_path / name)
    weights = [run_files.saved(tmp_path / name, tiny(3, size, **sgd)) for name, size in (("packed", 1), ("plain", 0))]
    for name in weights[1]:
        np.testing.assert_allclose(weights[0][name], weights[1][name], atol=1e-5, rtol=1e-5, err_msg=name)
    for result, measured in zip(*(run_files.lines(tmp_path / name) for name in ("packed", "plain")), strict=True):
        result, measured = run_files.repeatable(result), run_files.repeatable(measured)
        assert result.keys() == measured.keys()
        for name in measured:
            assert result[name] == pytest.approx(measured[name], rel=1e-3, abs=1e-5), name
    loop.train(tiny(4, 1), tmp_path / "straight")
    loop.train(tiny(2, 1), tmp_path / "broken")
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 4"):
        loop.train(tiny(4, 1), tmp_path / "broken", resume=True)
    run_files.assert_same(*(run_files.saved(tmp_path / name, tiny(4, 1)) for name in ("broken", "straight")))
