"""A mixture of experts through the whole loop: it learns, resumes bit for bit, and its export is a Mixtral."""
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm.models import weights
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup
from jaxrl_llm.store.checkpoints import Checkpoints


def tiny(steps):
    c = tiny_config.get_config()
    c.model.experts, c.objective, c.learner.micro_batches, c.steps = 4, "+ balance(0.02)", 2, steps
    c.eval.every, c.checkpoint.every, c.optimizer.learning_rate = 12, 12, 1e-2
    return c


@pytest.mark.slow
def test_a_mixture_learns_resumes_and_is_exported(tmp_path):
    loop.train(tiny(24), tmp_path / "straight")
    loop.train(tiny(12), tmp_path / "broken")
    with pytest.warns(RuntimeWarning, match="steps: 12 -> 24"):
        loop.train(tiny(24), tmp_path / "broken", resume=True)
    run_files.assert_same(*(run_files.saved(tmp_path / name, tiny(24)) for name in ("broken", "straight")))
    result = run_files.lines(tmp_path / "straight")
    steps = [line for line in result if "moe/max_load" in line]
    assert len(steps) == 24 and all(1 <= line["moe/max_load"] <= 2 for line in steps)
    assert all(1.9 < line["moe/balance_loss"] < 2.5 and line["max/mismatch"] < 1e-4 for line in steps)
    rewards = [line["reward/mean"] for line in steps]
    assert np.mean(rewards[:4]) < 0.65 and np.mean(rewards[-4:]) > 0.85
    run, params = setup.build(tiny(24))
    with Checkpoints(tmp_path / "straight" / "checkpoints", read_only=True) as checkpoints:
        state = checkpoints.restore(setup.initial_state(run, params)).state
    weights.save_hf(tmp_path / "out", run.learner.policy.model.config, state.params)
    config, params = weights.load(tmp_path / "out")
    assert config == run.learner.policy.model.config and config.family == "mixtral" and config.experts.per_token == 2
    np.testing.assert_array_equal(params["layers"]["experts_up"]["kernel"], state.params["layers"]["experts_up"]["kernel"])
