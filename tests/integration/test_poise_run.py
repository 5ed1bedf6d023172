"""POISE in the training loop: resume bit for bit, metrics and figures, parts of a batch, refusals."""

import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm.learning.optimizers import adam_noise
from jaxrl_llm.runs import loop
from jaxrl_llm.runs.value_plots import plot_history
from jaxrl_llm.setup import setup

ESTIMATOR = "bootstrap=1, first_fit=1, capacity=24, alpha=1.0"


def config(**changes):
    c = tiny_config.get_config()
    c.method, c.estimator, c.prompts.per_step, c.sampling.group = "poise", ESTIMATOR, 8, 2
    c.samples_every, c.eval.every, c.checkpoint.every, c.steps = 0, 2, 2, 4
    c.update_from_flattened_dict(changes)
    return c


def lines(workdir):
    return [run_files.repeatable(line) for line in run_files.lines(workdir)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("poise")
    loop.train(config(), workdir)
    return workdir


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(straight, tmp_path):
    loop.train(config(steps=2), tmp_path)
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 4"):
        loop.train(config(), tmp_path, resume=True)
    result, wanted = (run_files.saved(workdir, config()) for workdir in (tmp_path, straight))
    assert any("buffer" in name for name in result)
    run_files.assert_same(result, wanted)
    assert lines(tmp_path) == lines(straight)


@pytest.mark.slow
def test_the_diagnostics_are_logged_and_drawn(straight):
    result = lines(straight)
    assert result[1]["value/mae"] == "NaN" and result[1]["value/rows"] == 0  # no probe yet
    for line in result[2:]:
        values = [line[f"value/{name}"] for name in ("mae", "rmse", "bias", "pearson", "brier_skill", "pair_accuracy")]
        assert np.isfinite(values).all() and 0 <= values[0] <= values[1] <= 1
        assert line["value/rows"] == min(16 * (line["step"] - 1), 24)
        assert line["adam_noise"] > 0 and abs(line["max/ratio"] - 1) < 1e-4
    assert (straight / "values.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_in_parts_the_run_is_the_same_but_for_rounding(straight, tmp_path):
    loop.train(config(**{"sampling.micro_batches": 4, "learner.micro_batches": 2, "steps": 2}), tmp_path)
    for result, wanted in zip(lines(tmp_path)[1:], lines(straight)[1:]):
        assert result["reward/mean"] == wanted["reward/mean"]
        assert [result[name] for name in ("grad_norm", "value/variance_reduction", "loss")] == pytest.approx(
            [wanted[name] for name in ("grad_norm", "value/variance_reduction", "loss")], rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_several_updates_of_a_batch_share_its_advantages(tmp_path):
    loop.train(config(**{"learner.minibatches": 2, "steps": 1, "eval.every": 1}), tmp_path)
    result = lines(tmp_path)[1]
    assert result["grad_norm"] > 0 and result["max/ratio"] > 1 + 1e-4 and np.isfinite(result["value/variance_reduction"])


def test_adams_noise_on_the_papers_numbers():
    import optax
    state = optax.adamw(1e-3).init({"w": np.zeros(2, np.float32)})
    moments = state[0]._replace(count=np.int32(1), mu={"w": np.array([.1, .2], np.float32)},
                                nu={"w": np.array([.01, .04], np.float32)})
    assert adam_noise((moments, *state[1:]), 0.9, 0.999) == pytest.approx((10 - 1) + (40 - 4), rel=1e-4)


def test_nothing_is_drawn_before_there_is_a_prediction(tmp_path):
    none = np.zeros(4, bool)
    assert plot_history(np.zeros(4), np.zeros(4), np.arange(4), none, tmp_path / "values.png") is None
    assert not (tmp_path / "values.png").exists()
    same = plot_history(np.full(4, .5), np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1]), ~none, tmp_path / "values.png")
    assert same.stat().st_size > 1000


def test_impossible_settings_are_refused():
    for changes, words in (({"probe.layer": "7"}, "layer=7 of a model with 2 layers"),
                           ({"probe.layer": "half"}, "config.probe.layer='half'"),
                           ({"sampling.micro_batches": 3}, "sampling.micro_batches=3; choose one of \\[1, 2, 4, 8\\]"),
                           ({"sampling.group": 1}, "compares the completions of a prompt, but sampling.group is 1; give 2"),
                           ({"probe.pool": 0}, "config.probe.pool is 0"),
                           ({"estimator": "feature_size=4"}, "feature_size=4")):
        with pytest.raises(ValueError, match=words):
            setup.build(config(**changes))
    run, params = setup.build(config(estimator=ESTIMATOR + ", components=(99,)"))
    with pytest.raises(ValueError, match="99 principal components"):
        setup.initial_state(run, params)
