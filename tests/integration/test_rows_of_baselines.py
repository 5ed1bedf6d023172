"""Rows of baselines of rewards by name: three steps each, with what they sample and what they learn from."""
import chatter
import jax
import numpy as np
import pytest
import tiny_config

from jaxrl_llm.sampling.stages.base import policy_tokens
from jaxrl_llm.setup import setup
from jaxrl_llm.topologies import Begin


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


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "group"), [("scan", 1), ("slots", 3)])
def test_greedy_completions_are_baselines_and_nothing_else(engine, group):
    """Their rewards are those of a second greedy stream; no forest, count or mean of rewards has them, and tokens do."""
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"model.num_layers": 1, "method": "remax", "sampling.engine": engine,
                                       "sampling.group": group, "optimizer.learning_rate": 0.03})
    run, params = setup.build(config)
    other, _ = setup.build(config)
    state = setup.initial_state(run, params)
    for _ in range(3):
        snapshot = run.learner.publish(state)
        finished = run.source.next(snapshot)
        forest, rollouts = finished.forest, finished.rollouts
        rows = [(problem, forest.prompt_ids(at).tolist()) for at, problem in enumerate(forest.problems)]
        other.source.stream.publish(snapshot)
        alone = other.source.stream.run(other.source.planted(rows, 0), [Begin(at, sampling={"temperature": 0.0})
                                                                        for at in range(4)], 0)
        np.testing.assert_array_equal(rollouts.extras["greedy_rewards"], alone.rewards[alone.ends])
        assert rollouts.valid.shape == (4, group) and rollouts.valid.all()
        assert finished.counts["tried"].sum() == 4 * group and len(forest.ends) == 4 * group
        assert finished.metrics["completion/tokens"] == policy_tokens(forest) + policy_tokens(alone)
        np.testing.assert_allclose(finished.metrics["reward/mean"], rollouts.rewards.mean(), rtol=1e-6)
        np.testing.assert_allclose(finished.metrics["reward/greedy"], alone.rewards[alone.ends].mean(), rtol=1e-6)
        learned = run.learner.learn(state, rollouts, facts=finished.facts)
        state, mask = learned.state, np.asarray(rollouts.mask)
        wanted = (rollouts.rewards - rollouts.extras["greedy_rewards"][:, None])[..., None] * mask
        np.testing.assert_allclose(np.asarray(learned.advantages), wanted, atol=1e-6)
        assert learned.metrics["trained/rollouts"] == 4 * group and np.isfinite([*learned.metrics.values()]).all()


@pytest.mark.slow
def test_greedy_trajectories_of_an_environment_do_not_depend_on_the_key():
    """Under two keys of sampling their rewards are the same, and the rollouts differ."""
    found = []
    for key in (0, 1):
        run, params = setup.build(chatter.get_config(method="remax"))
        snapshot = run.learner.publish(setup.initial_state(run, params))._replace(key=jax.random.key(key))
        found.append(run.source.next(snapshot))
    one, other = (finished.rollouts for finished in found)
    np.testing.assert_array_equal(one.extras["greedy_rewards"], other.extras["greedy_rewards"])
    assert np.isfinite(one.extras["greedy_rewards"]).all() and one.valid.all()
    assert one.tokens.shape != other.tokens.shape or (one.tokens != other.tokens).any()
    assert all(finished.metrics["completion/tokens"] > policy_tokens(finished.forest) for finished in found)


@pytest.mark.slow
def test_prompts_whose_greedy_trajectory_is_lost_are_counted_and_not_trained_on():
    """The environment loses all greedy trajectories of the first batch: the advantages are 0, and the run goes on."""
    run, params = setup.build(chatter.get_config(
        method="remax", environment="chatter:letters(early=4)", environment_invalid=1.0))
    state = setup.initial_state(run, params)
    for lost in (4, 0):
        finished = run.source.next(run.learner.publish(state))
        assert finished.rollouts.valid.all() and finished.metrics.get("reward/greedy_lost", 0) == lost
        assert np.isnan(finished.rollouts.extras["greedy_rewards"]).sum() == lost
        learned = run.learner.learn(state, finished.rollouts, facts=finished.facts)
        state = learned.state
        assert (np.asarray(learned.advantages) == 0).all() == (lost == 4) and np.isfinite(learned.metrics["loss"])


@pytest.mark.slow
def test_every_problem_that_a_filter_draws_has_a_greedy_completion():
    _, steps = three_steps(method="remax", filters="dynamic_sampling", **{"sampling.group": 4})
    for finished, learned in steps:
        assert np.isfinite(finished.rollouts.extras["greedy_rewards"]).all()
        np.testing.assert_array_equal(finished.forest.facts["greedy_rewards"], finished.rollouts.extras["greedy_rewards"])
        assert np.isfinite([*learned.metrics.values()]).all()


@pytest.mark.parametrize(("changes", "message"), [
    ({"replay": "recent_groups(reuse=0.5)"}, "'remax' compares with a greedy completion .*; replayed groups have none"),
    ({"rewards": "format(pattern='a'), whole_batch:whole", "score": "format"}, "'whole'.* compares the completions of a batch"),
    ({"schedule": "pipelined(lag=1)"}, "no ratio that corrects for it")])
def test_refusals(changes, message, tmp_path, monkeypatch):
    (tmp_path / "whole_batch.py").write_text("""
from jaxrl_llm.rewards import Reward

def whole():
    return Reward("whole", lambda completions, answers, problems: [1.0] * len(completions), per="batch")
""")
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"method": "remax", **changes})
    with pytest.raises(ValueError, match=message):
        setup.build(config)
