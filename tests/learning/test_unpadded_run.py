"""A step that leaves padding out learns what the padded one learns, in every way that a batch is cut."""

import jax
import numpy as np
import pytest

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.setup import setup, sources
from jaxrl_llm.setup.config import default_config

CASES = {"whole": {}, "words_of_others": {}, "score_and_reference": {"objective": "+ kl(0.1)", "learner.epochs": 2},
         "minibatches_and_micro_batches": {"learner.minibatches": 2, "learner.micro_batches": 2},
         "features": {"method": "poise"}, "critic": {"method": "ppo"}}


def build(**changes):
    c = default_config()
    c.task = "arithmetic(level=digit)"
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 2, 4, 48
    c.steps, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = 4, 4, 2, 8
    c.update_from_flattened_dict(changes)
    return setup.build(c)


def of_unequal_lengths(rollouts, others):
    """The batch with completions that end at other places, the third prompt's nearly at once; in two `others` wrote too."""
    assert rollouts.mask[:, 0].all()  # nothing has stopped
    there = np.arange(8) < np.array([[8, 1], [3, 2], [1, 1], [2, 4]])[..., None]
    rollouts = rollouts.replace(mask=there, rewards=np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2))
    if not others:
        return rollouts
    mask = there.copy()
    mask[0, 0, 2:5], mask[3, 1, 0] = False, False
    role = np.where(mask, Role.POLICY, np.where(there, Role.ENVIRONMENT, Role.PADDING)).astype(np.int8)
    recorded = {name: np.where(mask, getattr(rollouts, name), np.nan) for name in ("behavior_logprobs", "entropies")}
    return rollouts.replace(mask=mask, role=role, **recorded)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_states_and_metrics_after_a_step(monkeypatch, case):
    outcomes = []
    for unpads in (False, True):
        monkeypatch.setattr(sources, "unpads", lambda model, slots: unpads)
        run, params = build(**CASES[case])
        state = setup.initial_state(run, params)
        frozen = run.learner.frozen(state.params)
        sampled = of_unequal_lengths(run.source.next(run.learner.publish(state)).rollouts, case == "words_of_others")
        state, metrics, batch, _ = run.learner.learn(state, sampled, frozen)
        assert batch.filled < 4 if unpads else batch.filled == 4
        outcomes.append((jax.device_get(state.params), metrics))
    (params, metrics), (short_params, short_metrics) = outcomes
    assert metrics["grad_norm"] > 0 and np.isfinite(metrics["loss"]) and metrics["skipped_updates"] == 0
    for name, value in metrics.items():
        np.testing.assert_allclose(short_metrics[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    moved = 2 * default_config().optimizer.learning_rate  # Adam's first step is as long for small gradients as for large ones
    for ours, expected in zip(jax.tree.leaves(short_params), jax.tree.leaves(params)):
        assert np.abs(ours - expected).mean() < 1e-3 * moved
