"""Losses of given texts and of an environment's words beside a policy's: values by hand, gradients, and what stays unseen."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import Rollouts, with_apart, without_apart
from jaxrl_llm.objectives import composed, terms
from jaxrl_llm.objectives.turns import of_turns

close = np.testing.assert_allclose
# Two rollouts of the first prompt, the second token of which an environment wrote; a text each for two other prompts.
P = np.array([[[0.5, 0.25, 0.5], [0.5, 0.5, 0.0]], [[0.8, 0.4, 0.0], [0, 0, 0]], [[0.1, 0.0, 0.0], [0, 0, 0]]])
LOGPROBS = np.log(np.where(P > 0, P, 1)).astype(np.float32)
MASK = np.array([[[1, 0, 1], [1, 0, 0]], [[0, 0, 0]] * 2, [[0, 0, 0]] * 2], bool)
TEXTS = np.array([[[0, 0, 0]] * 2, [[1, 1, 0], [0, 0, 0]], [[1, 0, 0], [0, 0, 0]]], bool)
OBSERVED = np.array([[[0, 1, 0], [0, 1, 0]], [[0, 0, 0]] * 2, [[0, 0, 0]] * 2], bool)
GIVEN = TEXTS.any(-1)
A = np.broadcast_to(np.array([[1.0, -2.0], [9, 9], [9, 9]])[..., None], P.shape)


def batch(apart=TEXTS | OBSERVED):
    return Rollouts(mask=MASK, valid=MASK.any(-1), rewards=np.zeros((3, 2), np.float32), old_logprobs=LOGPROBS, extras={
        "apart": apart, "given": GIVEN, "observed": OBSERVED, "weight": np.float32([[1, 1], [3, 1], [1, 1]]),
        "expert": TEXTS})


def run(objective, rollouts):
    (loss, (metrics, _)), slope = jax.value_and_grad(objective.update, has_aux=True)(
        jnp.asarray(LOGPROBS), jax.tree.map(jnp.asarray, rollouts), jnp.asarray(A), objective.init())
    return float(loss), {name: float(value) for name, value in metrics.items()}, np.asarray(slope)


def test_a_batch_with_what_stands_apart_is_the_same_without_it_again():
    whole = with_apart(batch())
    assert whole.token_mask.tolist() == (MASK | TEXTS | OBSERVED).tolist() and whole.valid.tolist() == [[1, 1], [1, 0], [1, 0]]
    jax.tree.map(np.testing.assert_array_equal, without_apart(whole), batch())
    plain = batch().replace(extras={})
    assert with_apart(plain) is plain and without_apart(plain) is plain


def test_an_estimator_sees_the_rollouts_alone():
    whole = without_apart(with_apart(batch())).replace(rewards=np.float32([[1, 0], [7, 7], [7, 7]]))
    found, _ = advantages.make("grpo").update(whole, ())
    close(np.asarray(found)[0, :, 0], [0.70710, -0.70710], atol=1e-4)
    assert not np.asarray(found)[1:].any()


def test_texts_add_their_weighted_mean_and_leave_the_policys_loss_alone():
    base = objectives.make("ppo_clip")
    loss, metrics, slope = run(composed(base, (terms.make("nll", coef=0.5, on="given"),)), with_apart(batch()))
    alone = run(base, batch())
    nll = -(3 * np.log(0.8) + 3 * np.log(0.4) + np.log(0.1)) / 7
    close(loss, alone[0] + 0.5 * nll, rtol=1e-6)
    close(metrics["nll_given"], nll, rtol=1e-6)
    close(slope[0], alone[2][0], atol=1e-7)
    close(slope[1:, 0], 0.5 * np.array([[-3 / 7, -3 / 7, 0], [-1 / 7, 0, 0]]), atol=1e-7)
    assert metrics["clip_fraction"] == alone[1]["clip_fraction"] and not slope[:, :, 2][1:].any()


def test_echo_adds_the_mean_over_the_environments_tokens():
    base = objectives.make("ppo_clip")
    loss, metrics, slope = run(composed(base, (terms.make("echo"),)), with_apart(batch()))
    alone, nll = run(base, batch()), -(np.log(0.25) + np.log(0.5)) / 2
    close([loss, metrics["echo"]], [alone[0] + 0.05 * nll, nll], rtol=1e-6)
    close(slope - alone[2], np.where(OBSERVED, -0.025, 0), atol=1e-7)


def test_terms_beside_rows_of_turns_weigh_whole_trajectories():
    """The policy's tokens are two turns and one, and neither texts nor an environment's words change their shares."""
    extras = {"step": np.array([[[0, 1], [0, -1]], [[-1, -1]] * 2, [[-1, -1]] * 2])}
    steps = np.array([[[0, 0, 1], [0, 0, 0]], [[0, 0, 0]] * 2, [[0, 0, 0]] * 2])
    base = objectives.make("ppo_clip", aggregation="seq_mean_token_mean")
    plain = batch().replace(extras=extras, step_ids=steps)
    alone = run(of_turns(base), plain)
    close(alone[2][0], [[-1 / 3, 0, -1 / 3], [2 / 3, 0, 0]], rtol=1e-6)
    beside = composed(base, (terms.make("nll", coef=0.5, on="given"), terms.make("echo")))
    whole = with_apart(batch().replace(extras=batch().extras | extras, step_ids=steps))
    loss, metrics, slope = run(of_turns(beside), whole)
    nll, echo = -(3 * np.log(0.8) + 3 * np.log(0.4) + np.log(0.1)) / 7, -(np.log(0.25) + np.log(0.5)) / 2
    close([loss, metrics["nll_given"], metrics["echo"]], [alone[0] + 0.5 * nll + 0.05 * echo, nll, echo], rtol=1e-6)
    close(slope[0], alone[2][0] + np.where(OBSERVED, -0.025, 0)[0], rtol=1e-5, atol=1e-7)


def test_chord_learns_from_texts_itself():
    made = objectives.make("chord", warmup=0, decay=1, peak=0.1, valley=0.1, weighting="none")
    loss, *_ = run(composed(made, (terms.make("echo", coef=0.0),)), with_apart(batch(TEXTS)))
    close(loss, 0.9 * (-1 - 1 + 2) / 3 - 0.1 * (np.log(0.8) + np.log(0.4) + np.log(0.1)) / 3, rtol=1e-6)


def test_micro_batches_add_up():
    whole = jax.tree.map(jnp.asarray, with_apart(batch()))
    objective = composed(objectives.make("ppo_clip"), (terms.make("nll", coef=0.5, on="given"), terms.make("echo")))
    weighed = whole.replace(loss_weights=objective.weights(whole))
    parts = [jax.tree.map(lambda x: x[i:i + 1], weighed) for i in range(3)]
    losses = [objective.update(jnp.asarray(LOGPROBS[i:i + 1]), part, jnp.asarray(A[i:i + 1]), ())[0] for i, part in
              enumerate(parts)]
    close(sum(map(float, losses)), run(objective, whole)[0], rtol=1e-6)


def test_other_tokens_of_a_likelihood_are_refused():
    with pytest.raises(ValueError, match="Did you mean 'given'"):
        terms.make("nll", coef=1.0, on="givn")
