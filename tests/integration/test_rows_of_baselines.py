"""Rows of baselines of rewards by name: three steps each, with what they sample and what they learn from."""
import numpy as np
import pytest
import tiny_config

from jaxrl_llm.setup import setup


def three_steps(**changes):
    """The finished and the learned batches of three steps of a tiny run."""
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"model.num_layers": 1, **changes})
    run, params = setup.build(config)
    state, steps = setup.initial_state(run, params), []
    for _ in range(3):
        finished = run.source.next(run.learner.publish(state))
        learned = run.learner.learn(state, finished.rollouts, facts=finished.facts)
        state = learned.state
        steps.append((finished, learned))
    return run, steps


@pytest.mark.slow
@pytest.mark.parametrize("slug", ["opo", "gpg", "optimal_token_baseline"])
def test_three_steps_learn_from_whole_groups(slug):
    _, steps = three_steps(method=slug)
    for finished, learned in steps:
        assert finished.rollouts.valid.all() and np.isfinite([*learned.metrics.values()]).all()
        assert learned.metrics["trained/rollouts"] == 16
    assert any(learned.metrics["grad_norm"] > 0 for _, learned in steps)


@pytest.mark.slow
def test_the_pulls_of_tokens_are_the_same_in_packed_rows():
    batches = {rows: three_steps(method="optimal_token_baseline", **{"learner.packed_rows": rows})[1] for rows in (0, 4)}
    (_, plain), (_, packed) = batches[0][0], batches[4][0]
    mask = np.asarray(plain.rollouts.token_mask)
    np.testing.assert_allclose(np.asarray(packed.rollouts.extras["logit_gradients"])[mask],
                               np.asarray(plain.rollouts.extras["logit_gradients"])[mask], rtol=1e-4)
