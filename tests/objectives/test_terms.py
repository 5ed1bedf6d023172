"""Terms: losses by hand in numpy, gradients by differences, the unbiased KL over all tokens, and what is refused."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.objectives import composed, terms
from jaxrl_llm.objectives.base import Objective

close = np.testing.assert_allclose


def example(dtype=np.float64):
    """Log-probs, rollouts and advantages of 3 prompts with 4 rollouts of up to 6 tokens, with invalid ones and holes."""
    rng = np.random.default_rng(3)
    shape = 3, 4, 6
    def normal(mean=-1.0, size=0.3):
        return rng.normal(mean, size, shape).astype(dtype)
    mask = (np.arange(6) < rng.integers(1, 7, (3, 4, 1))) & (rng.random(shape) < 0.9)
    expert = rng.random((3, 4)) < 0.4
    rollouts = Rollouts(mask=mask, valid=rng.random((3, 4)) < 0.8, rewards=rng.random((3, 4)).astype(dtype),
                        old_logprobs=normal(), ref_logprobs=normal(),
                        extras={"expert": expert, "current_entropies": np.abs(normal())})
    logprobs, advantages = normal(), normal(0, 1)
    return logprobs, rollouts.replace(behavior_logprobs=normal()), advantages


def by_hand(logprobs, rollouts, old):
    """The value of each term on each token, in numpy."""
    d = rollouts.ref_logprobs - logprobs
    rho = np.exp(logprobs - rollouts.old_logprobs)
    k3 = np.exp(d) - d - 1
    drift = rollouts.old_logprobs - logprobs
    return {"k1": -d, "abs": np.abs(d), "k2": d**2 / 2, "k3": k3, "k1+": -d, "k3+": k3, "unbiased": rho * k3,
            "k2 old": drift**2 / 2, "k2 behavior": (rollouts.behavior_logprobs - logprobs) ** 2 / 2,
            "unbiased old": rho * (np.exp(drift) - drift - 1),
            "entropy": -rollouts.extras["current_entropies"], "nll": -logprobs}[old]


def run(objective, logprobs, rollouts, advantages):
    (loss, (metrics, _)), slope = jax.value_and_grad(objective.update, has_aux=True)(
        jnp.asarray(logprobs), rollouts, jnp.asarray(advantages), objective.init())
    return float(loss), {name: float(value) for name, value in metrics.items()}, np.asarray(slope)


CASES = [("kl", {"estimator": name}, name) for name in ("k1", "abs", "k2", "k3", "k1+", "k3+", "unbiased")] + [
    ("kl", {"estimator": "k2", "against": "old"}, "k2 old"),
    ("kl", {"estimator": "unbiased", "against": "old"}, "unbiased old"),
    ("kl", {"estimator": "k2", "against": "behavior"}, "k2 behavior"),
    ("entropy", {"on": "all"}, "entropy"), ("entropy", {}, "entropy"), ("entropy", {"on": "expert"}, "entropy"),
    ("nll", {}, "nll"), ("nll", {"on": "expert"}, "nll"), ("nll", {"on": "all"}, "nll"), ("nll", {"on": "policy"}, "nll")]


@pytest.mark.parametrize("name, options, formula", CASES, ids=[f"{one[0]}-{one[1]}" for one in CASES])
def test_a_term_adds_its_formula(name, options, formula):
    """To GRPO's mean over rollouts, in float64: values on the chosen tokens, with the loss's weights or a mean of their own."""
    with jax.enable_x64(True):
        logprobs, rollouts, A = example()
        base = objectives.ppo_clip(aggregation="seq_mean_token_mean")
        whole = composed(base, (terms.make(name, coef=0.3, **options),))
        mask = rollouts.mask & rollouts.valid[..., None]
        expert = mask & rollouts.extras["expert"][..., None]
        on = options.get("on", {"entropy": "policy", "nll": "right"}.get(name, "all"))
        right = mask & (rollouts.rewards > 0.5)[..., None]
        chosen = {"all": mask, "expert": expert, "policy": mask & ~expert, "right": right}[on]
        length = mask.sum(2, keepdims=True)
        share = np.where(mask, 1 / np.maximum(length, 1) / (length > 0).sum(), 0)
        share = chosen / chosen.sum() if name == "nll" else share * chosen
        loss, metrics, slope = run(whole, logprobs, rollouts, A)
        plain, others, plain_slope = run(base, logprobs, rollouts, A)
        values = by_hand(logprobs, rollouts, formula)
        close(loss, plain + 0.3 * (share * values).sum(), rtol=1e-12)
        assert {key: value for key, value in metrics.items() if key in others} == others
        if name == "kl":
            close(metrics["_".join(["kl", *filter(None, [options.get("against")])])], values[mask].mean(), rtol=1e-12)
        added = slope - plain_slope
        assert not added[~chosen].any()
        if name != "entropy" and not formula.endswith("+"):  # these have the gradient of another quantity
            for place in np.argwhere(chosen)[::5]:
                step = np.zeros(mask.shape)
                step[tuple(place)] = 1e-6
                sides = [0.3 * (share * by_hand(logprobs + sign * step, rollouts, formula)).sum() for sign in (1, -1)]
                close(added[tuple(place)], (sides[0] - sides[1]) / 2e-6, rtol=1e-6, atol=1e-10)
        if formula.endswith("+"):
            close(added, np.where(chosen, 0.3 * share * (logprobs - rollouts.ref_logprobs), 0), rtol=1e-12)
        if name == "entropy":
            assert not added.any()
            def of_entropies(entropies):
                seen = rollouts.replace(extras={**rollouts.extras, "current_entropies": entropies})
                return whole.update(jnp.asarray(logprobs), seen, jnp.asarray(A), ())[0]
            slope = jax.grad(of_entropies)(jnp.asarray(rollouts.extras["current_entropies"]))
            close(slope, -0.3 * share, rtol=1e-12)


def test_the_unbiased_estimate_is_exact_over_all_tokens():
    """Summed over a vocabulary with the old policy's probabilities: the value of the KL and its gradient by the logits."""
    with jax.enable_x64(True):
        old, ref, now = (jax.nn.log_softmax(jnp.asarray(np.random.default_rng(seed).normal(size=7))) for seed in range(3))
        term = terms.make("kl", coef=1.0, estimator="unbiased")
        full = jnp.ones((1, 1, 7), bool)
        rollouts = Rollouts(mask=full, valid=full[..., 0], old_logprobs=old[None, None], ref_logprobs=ref[None, None])

        def expected(logits):
            values = term.value(jax.nn.log_softmax(logits)[None, None], rollouts)
            return (jnp.exp(old) * values[0, 0]).sum()

        def exact(logits):
            logprobs = jax.nn.log_softmax(logits)
            return (jnp.exp(logprobs) * (logprobs - ref)).sum()

        close(expected(now), exact(now), rtol=1e-12)
        close(jax.grad(expected)(now), jax.grad(exact)(now), rtol=1e-9, atol=1e-14)


def test_what_a_sum_refuses():
    kl = terms.make("kl", coef=0.1)
    base = objectives.ppo_clip()
    assert composed(base, ()) is base and composed(base, (terms.make("kl", coef=0.0),)) is base
    assert composed(base, (kl,)) is composed(objectives.ppo_clip(), (terms.make("kl", coef=0.1),))  # runs share programs
    with pytest.raises(ValueError, match="the loss has kl more than once"):
        composed(base, (kl, terms.make("kl", coef=0.2, estimator="k2")))
    assert composed(base, (kl, terms.make("kl", coef=0.2, against="old"))).needs == ("ref_logprobs",)
    pulled = composed(base, (terms.make("kl", coef=0.2, against="behavior"),))
    assert pulled.needs == ("behavior_logprobs",) and not pulled.corrects  # a term corrects nothing in the loss
    odd = Objective(lambda: (), base.update, lambda rollouts: {"mine": rollouts.rewards})
    with pytest.raises(ValueError, match="the objective weighs mine, and its `shares` are 'loss'"):
        composed(odd, (kl,)).weights(example()[1])
    for wrong, message in (({"coef": -0.1}, "give 0 or more"), ({"coef": "nan"}, "give a number, for example 0.01"),
                           ({"coef": 0.1, "estimator": "k4"}, "Unknown KL estimator 'k4'"),
                           ({"coef": 0.1, "against": "reward"}, "Allowed: behavior, old, reference"),
                           ({}, "needs the keyword 'coef'")):
        with pytest.raises(ValueError, match=message):
            terms.make("kl", **wrong)
    with pytest.raises(ValueError, match="Unknown term 'entropi'. Did you mean 'entropy'"):
        terms.make("entropi", coef=0.1)
