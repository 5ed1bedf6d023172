"""B-Coder: its worked example to the last digit, its bound, holes and ranks; the recorder's log-probs against full logits."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, objectives, recorders
from jaxrl_llm.advantages.b_coder import bellman_targets, bounded, following, program_scores, unbounded
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models import ModelConfig, Transformer

LOGITS, ANCHOR = np.array([[1.0, 0], [0, 2]]), np.array([[1.0, 0], [0.5, 0]])
TOKENS, V_PHI = np.array([0, 1]), np.array([0.2, 0.1])


def example(expert=True, reward=-0.3):
    logprobs = np.array(jax.nn.log_softmax(LOGITS))
    picked = np.arange(2), TOKENS
    extras = {"values": V_PHI[None, None], "max_logprobs": logprobs.max(-1)[None, None],
              "greedy_logprobs": logprobs[np.arange(2), ANCHOR.argmax(-1)][None, None]}
    extras |= {"expert": np.ones((1, 1), bool)} if expert else {}
    rollouts = Rollouts(mask=np.ones((1, 1, 2), bool), valid=np.ones((1, 1), bool), rewards=np.full((1, 1), reward, np.float32),
                        old_logprobs=logprobs[picked][None, None].astype(np.float32), extras=extras)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32) if x.dtype == np.float64 else jnp.asarray(x), rollouts)


def test_worked_example():
    rollouts = example()
    values = bounded(jnp.array(V_PHI))
    np.testing.assert_allclose(values, [.995008, .998751], atol=1e-6)
    advantage = LOGITS - LOGITS.max(-1, keepdims=True)
    np.testing.assert_allclose(advantage + np.array(values)[:, None], [[.995008, -.004992], [-1.001249, .998751]], atol=1e-6)
    greedy = rollouts.extras["greedy_logprobs"] - rollouts.extras["max_logprobs"]
    y = bellman_targets(rollouts.rewards, values[None, None], greedy, rollouts.mask, 0.999)
    np.testing.assert_allclose(y[0, 0], [-1.000248, -.3], atol=1e-6)
    result, _ = advantages.make("b_coder").update(rollouts, ())
    loss, (metrics, _) = objectives.make("b_coder").update(rollouts.old_logprobs, rollouts, result, ())
    np.testing.assert_allclose(loss, 2.943948, atol=2e-6)
    without = example(expert=False)
    loss, _ = objectives.make("b_coder").update(without.old_logprobs, without, result, ())
    np.testing.assert_allclose(loss, 2.833901, atol=2e-6)
    alone, _ = objectives.make("b_coder", adv_coef=0.0, ce_coef=1.0).update(rollouts.old_logprobs, rollouts, result, ())
    np.testing.assert_allclose(alone - loss, .220095, atol=2e-6)
    q = rollouts.old_logprobs - rollouts.extras["max_logprobs"] + values
    np.testing.assert_allclose(program_scores(q, values[None, None], rollouts.mask, 0.999), .996007, atol=1e-6)


def test_values_are_bounded_by_the_best_return():
    np.testing.assert_allclose(1 - bounded(jnp.array([0.0, 1, 5])), [0, .120115, 1.813568], atol=1e-6)
    v = jnp.linspace(0.0, 9, 50)
    np.testing.assert_allclose(unbounded(bounded(v)), v, atol=5e-3)
    assert (unbounded(jnp.array([1.0, 3.0])) == 0).all() and (bounded(jnp.linspace(-9, 9, 99)) <= 1).all()


def test_the_critic_is_fitted_to_what_makes_q_the_target():
    rollouts = example()
    estimator = advantages.make("b_coder")
    own = rollouts.old_logprobs - rollouts.extras["max_logprobs"]
    values = bounded(estimator.value_targets(rollouts, False))
    np.testing.assert_allclose((own + values)[0, 0], [-1.000248, -.3], atol=1e-5)
    seen = bounded(estimator.value_targets(rollouts, True))  # stage 1: the observed returns
    np.testing.assert_allclose(seen[0, 0], [.999 * -.3, -.3], atol=1e-5)


def test_the_successor_is_the_next_trained_token():
    x, mask = jnp.array([[[1.0, 2, 3, 4]]]), jnp.array([[[True, False, True, False]]])
    assert following(x, mask)[0, 0].tolist() == [3, 3, 0, 0]


def test_ranks_of_programs():
    rollouts = example()
    def pair(x):
        return None if x is None else jnp.concatenate([x, x], axis=1)
    both = jax.tree.map(pair, rollouts)
    extras = {**both.extras, "max_logprobs": both.extras["max_logprobs"].at[:, 0].add(1.0)}  # the first seems worse
    both = both.replace(rewards=jnp.array([[-0.3, 1.0]]), extras=extras)
    numbers = advantages.make("b_coder").metrics(both, None, ())
    assert numbers["b_coder/ranked"] == 1
    assert advantages.make("b_coder").metrics(both.replace(rewards=both.rewards[:, ::-1]), None, ())["b_coder/ranked"] == 0


@pytest.mark.slow
def test_the_recorder_reads_whole_logits():
    model = Transformer(ModelConfig(vocab_size=11, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8,
                                    mlp_size=16))
    params, start = (jax.tree.map(lambda x: 5 * x, model.init(jax.random.key(n))) for n in (0, 1))
    rng = np.random.default_rng(0)
    rollouts = Rollouts(mask=np.ones((2, 3, 4), bool), valid=np.ones((2, 3), bool), tokens=rng.integers(0, 11, (2, 3, 4)),
                        prompt_tokens=rng.integers(0, 11, (2, 3)), prompt_mask=np.ones((2, 3), bool))
    result = recorders.greedy(Policy(model, chunk=5).likeliest, adapters=False).record(start, params, None, rollouts)

    def logits(weights):
        states, _ = model.packed_states(weights, rollouts.prompt_tokens, rollouts.prompt_mask, rollouts.tokens)
        return jax.nn.log_softmax(states @ model.unembedding(weights).T)

    own, theirs = logits(params), logits(start)
    np.testing.assert_allclose(result["max_logprobs"], own.max(-1), atol=1e-4)
    expected = np.take_along_axis(np.asarray(own), np.asarray(theirs.argmax(-1))[..., None], -1)[..., 0]
    np.testing.assert_allclose(result["greedy_logprobs"], expected, atol=1e-4)
    assert (expected < np.asarray(own.max(-1)) - 1e-3).any()


@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_a_policy_that_is_right_about_everything_has_no_loss(gamma):
    """The policy is deterministic, certain and right: V is the discounted return and A is 0, so Q is the target."""
    mask = jnp.array([[[True, True, False, True]]])
    values = unbounded(jnp.array([[[gamma**2, gamma, 0, 1.0]]]))
    zero = jnp.zeros((1, 1, 4))
    rollouts = Rollouts(mask=mask, valid=jnp.ones((1, 1), bool), rewards=jnp.ones((1, 1)), old_logprobs=zero,
                        extras={"values": values, "max_logprobs": zero, "greedy_logprobs": zero})
    result, _ = advantages.make("b_coder", gamma=gamma).update(rollouts, ())
    loss, _ = objectives.make("b_coder").update(zero, rollouts, result, ())
    np.testing.assert_allclose(loss, 0, atol=1e-9)
