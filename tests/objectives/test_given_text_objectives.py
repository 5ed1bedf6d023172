"""Supervised learning and preferences: the worked examples, terms, finite differences and refusals."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixed_batches import close, run

from jaxrl_llm import objectives
from jaxrl_llm.data.rollouts import from_lists, pad_lists

SFT = from_lists([[0], [0]], [[2], [1]], extras={"weight": np.float32([[1], [0.5]])})
LIKELY = pad_lists([[[-1, -2]], [[-3]]])
ONES = np.zeros((2, 1))


def pair(lp, ref, **extras):
    """Rollouts of one prompt from the log-probs of its chosen and its rejected text, and those under the reference."""
    rollouts = from_lists([[1, 0]], [[len(one) for one in lp]], ref_logprobs=pad_lists([ref]),
                          extras={"chosen": np.array([[True, False]]), **extras})
    return pad_lists([lp]), rollouts, np.zeros((1, 2))


def test_sft_worked_example():
    loss, metrics, gradient = run("sft", LIKELY, SFT, ONES)
    close(loss, 1.8, rtol=1e-6)  # (1 + 2 + 0.5 * 3) / 2.5
    close(metrics["nll"], 2.0, rtol=1e-6)
    close(gradient, [[[-0.4, -0.4]], [[-0.2, 0]]], rtol=1e-6)


def test_sft_as_a_mean_over_texts():
    loss, _, gradient = run("sft", LIKELY, SFT, ONES, aggregation="seq_mean_token_mean")
    close(loss, 2.0, rtol=1e-6)  # (1 * 1.5 + 0.5 * 3) / 1.5
    close(gradient, [[[-1 / 3, -1 / 3]], [[-1 / 3, 0]]], rtol=1e-6)
    close(run("sft", LIKELY, SFT.replace(extras={}), ONES, aggregation="seq_mean_token_mean")[0], 2.25, rtol=1e-6)


def test_texts_of_weight_zero_count_as_nothing():
    none = SFT.replace(extras={"weight": jnp.zeros((2, 1))})
    loss, _, gradient = run("sft", LIKELY, none, ONES)
    assert loss == 0 and not gradient.any()


def test_dpo_worked_example():
    arguments = pair([[-2, -3], [-1, -5]], [[-3, -2.5], [-2, -3]])
    loss, metrics, gradient = run("dpo", *arguments)
    close(loss, 0.620957, atol=5e-7)  # h = 0.1 ((-5 + 5.5) - (-6 + 5)) = 0.15
    close(gradient, [[[-0.046257, -0.046257], [0.046257, 0.046257]]], atol=5e-7)
    close([metrics[f"preference/{name}"] for name in ("accuracy", "chosen", "rejected", "margin")], [1, 0.05, -0.1, 0.15],
          atol=1e-6)
    close(run("dpo(smoothing=0.1)", *arguments)[0], 0.635957, atol=5e-7)


def test_ipo_worked_example():
    loss, metrics, gradient = run("dpo(kind=ipo)", *pair([[-2, -3], [-1, -5]], [[-3, -2.5], [-2, -3]]))
    close(loss, 18.0625, rtol=1e-6)  # (0.25 + 0.5 - 5)^2
    close(gradient, [[[-4.25, -4.25], [4.25, 4.25]]], rtol=1e-6)
    close(metrics["preference/margin"], 0.075, rtol=1e-5)


def test_the_likelihood_of_the_chosen_text_is_a_term():
    loss, _, gradient = run("dpo + nll(0.2)", *pair([[-2, -3], [-1, -5]], [[-3, -2.5], [-2, -3]]))
    close(loss, 0.620957 + 0.2 * 2.5, atol=1e-6)
    close(gradient, [[[-0.146257, -0.146257], [0.046257, 0.046257]]], atol=5e-7)


def test_pairs_weigh_what_their_chosen_texts_weigh_and_their_order_does_not_matter():
    lp, ref = pad_lists([[[-5], [-6]], [[-4], [-1]]]), pad_lists([[[-5.5], [-5]], [[-4], [-3]]])
    extras = {"chosen": np.array([[True, False], [False, True]]), "weight": np.float32([[1, 9], [9, 3]])}
    rollouts = from_lists([[1, 0], [0, 1]], ref_logprobs=ref, extras=extras)
    second = np.log1p(np.exp(-0.2))  # h = 0.1 ((-1 + 3) - (-4 + 4))
    loss, metrics, _ = run("dpo", lp, rollouts, np.zeros((2, 2)))
    close(loss, (0.620957 + 3 * second) / 4, atol=1e-6)
    close(metrics["preference/margin"], (0.15 + 3 * 0.2) / 4, atol=1e-6)


@pytest.mark.parametrize("chosen, valid", [([True, True], [True, True]), ([False, False], [True, True]),
                                           ([True, False], [True, False])])
def test_a_prompt_without_one_text_of_each_kind_does_not_count(chosen, valid):
    lp, rollouts, advantages = pair([[-1.0], [-2.0]], [[-1.5], [-1.0]])
    rollouts = rollouts.replace(valid=jnp.array([valid]), extras={"chosen": jnp.array([chosen])})
    loss, metrics, gradient = run("dpo", lp, rollouts, advantages)
    assert loss == 0 and not gradient.any() and not any(metrics.values())


@pytest.mark.parametrize("text", ["sft", "sft(aggregation=seq_mean_token_mean)", "dpo(beta=0.7, smoothing=0.2)",
                                  "dpo(kind=ipo)"])
def test_gradients_are_those_of_finite_differences(text):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        lp = -rng.gamma(2.0, size=(3, 2, 4))
        extras = {"chosen": np.array([[True, False]] * 3), "weight": np.array([[1.0, 1.0], [0.5, 2.0], [2.0, 0.5]])}
        ref = -rng.gamma(2.0, size=lp.shape)
        rollouts = from_lists([[1, 0]] * 3, [[4, 2], [1, 3], [2, 2]], ref_logprobs=ref, extras=extras)
        objective = objectives.of(text)

        def loss(lp):
            return objective.update(jnp.asarray(lp), rollouts, jnp.zeros(lp.shape), ())[0]

        gradient, step = np.asarray(jax.grad(loss)(jnp.asarray(lp))), 1e-5
        for place in np.ndindex(lp.shape):
            moved = np.zeros(lp.shape)
            moved[place] = step
            close(gradient[place], (loss(lp + moved) - loss(lp - moved)) / (2 * step), atol=1e-8)


@pytest.mark.parametrize("text, said", [
    ("sft(aggregation=prompt_mean)", "token_mean"), ("dpo(beta=0)", "more than 0"), ("dpo(smoothing=0.5)", "less than 0.5"),
    ("dpo(kind=hinge)", "sigmoid"), ("dpo(kind=ipo, smoothing=0.1)", "leave it out")])
def test_what_cannot_be_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        objectives.of(text)
