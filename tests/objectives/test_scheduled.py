"""Objectives with scheduled numbers: each step equals the plain objective with the number of that step."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import methods, objectives
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths.descent import split
from jaxrl_llm.objectives.base import token_objective
from jaxrl_llm.objectives.scheduled import scheduled
from jaxrl_llm.objectives.schedules import schedule

close = np.testing.assert_allclose


def example():
    """Two prompts with rollouts of 3, 1, 4 and 2 tokens, off-policy and away from the reference."""
    rng = np.random.default_rng(0)
    def normal():
        return jnp.asarray(rng.normal(-1, 0.3, (2, 2, 4)), jnp.float32)
    mask = np.arange(4) < np.array([[3, 1], [4, 2]])[..., None]
    rollouts = Rollouts(mask=jnp.asarray(mask), valid=jnp.ones((2, 2), bool), rewards=jnp.array([[1.0, 0], [0, 1]]),
                        old_logprobs=normal(), ref_logprobs=normal(), extras={"current_entropies": jnp.abs(normal())})
    return normal(), rollouts, normal()


def falling(step):
    return 0.4 - 0.1 * step


def with_term(base, name, coef):
    return objectives.composed(base, (objectives.terms.make(name, coef=coef),))


@pytest.mark.slow
@pytest.mark.parametrize("name, factory", [
    ("kl_coef", lambda kl_coef: with_term(objectives.ppo_clip(clip_high=0.3), "kl", kl_coef)),
    ("clip_high", objectives.ppo_clip),
    ("entropy_coef", lambda entropy_coef: with_term(objectives.of("ppo_clip + kl(0.001)"), "entropy", entropy_coef)),
    ("kl_coef", lambda kl_coef: with_term(objectives.make("c3po", budget=6), "kl", kl_coef))],
    ids=("kl", "clip", "entropy", "c3po"))
def test_each_step_is_the_plain_objective_with_its_number(name, factory):
    """Two updates a step: losses, gradients and metrics."""
    logprobs, rollouts, A = example()
    one = scheduled(factory, {name: falling}, per_step=2)
    state, update = one.init(), jax.jit(jax.value_and_grad(one.update, has_aux=True))
    for number in range(6):
        (loss, (metrics, state)), slope = update(logprobs, rollouts, A, state)
        plain = factory(**{name: falling(number // 2)})
        (wanted, (others, _)), wanted_slope = jax.value_and_grad(plain.update, has_aux=True)(
            logprobs, rollouts, A, plain.init())
        close(loss, wanted, rtol=1e-5)
        close(slope, wanted_slope, rtol=1e-4, atol=1e-7)
        close(metrics.pop(f"objective/{name}"), falling(number // 2), rtol=1e-6)
        assert metrics.keys() == others.keys()
        assert int(state.updates) == number + 1
    assert update._cache_size() == 1
    assert set(one.needs) == set(factory(**{name: 0.1}).needs)


def test_parts_of_a_mini_batch_add_up():
    logprobs, rollouts, A = example()
    one = scheduled(lambda kl_coef: with_term(objectives.ppo_clip(), "kl", kl_coef), {"kl_coef": falling})
    whole, (metrics, state) = one.update(logprobs, rollouts, A, one.init())
    weighed = rollouts.replace(loss_weights=one.weights(rollouts))
    parts = [one.update(*jax.tree.map(lambda x: x[i], split((logprobs, weighed, A), 2)), one.init()) for i in range(2)]
    close(sum(loss for loss, _ in parts), whole, rtol=1e-6)
    close(sum(result["objective/kl_coef"] for _, (result, _) in parts), 0.4, rtol=1e-6)
    assert all(int(after.updates) == int(state.updates) == 1 for _, (_, after) in parts)


def test_a_term_that_begins_at_0_is_there():
    assert objectives.of("ppo_clip + kl(linear(0, 0.4, 4))").needs == ("ref_logprobs",)
    assert objectives.of("ppo_clip + kl(0)").needs == ()


def test_an_objective_with_a_state_of_its_own_keeps_it():
    def counting(*, scale):
        def loss(logprobs, rollouts, advantages, count):
            return scale * count * logprobs, {}
        return token_objective(loss, init=lambda: jnp.int32(1), advance=lambda count: 2 * count)

    logprobs, rollouts, A = example()
    one = scheduled(counting, {"scale": lambda step: step + 1.0})
    state, mean = one.init(), float(logprobs[rollouts.mask].mean())
    for factor in (1, 4, 12):  # 1, 2, 4 times 1, 2, 3
        loss, (_, state) = one.update(logprobs, rollouts, A, state)
        close(loss, factor * mean, rtol=1e-5)
    assert (int(state.inner), int(state.updates)) == (8, 3)


def test_numbers_that_are_no_coefficients_are_refused():
    logprobs, rollouts, A = example()
    for make, name in ((objectives.ppo_clip, "dual_clip"), (functools.partial(objectives.make, "c3po"), "budget")):
        with pytest.raises(ValueError, match=f"{name} of this objective cannot follow a schedule: what is computed"):
            scheduled(make, {name: falling})

    def choosing(*, beta):
        return token_objective(lambda logprobs, rollouts, advantages: (logprobs if beta > 0 else -logprobs, {}))

    def weighing(*, beta):
        return token_objective(lambda logprobs, rollouts, advantages: ({"own": logprobs}, {}),
                               extra_weights=lambda rollouts: {"own": beta * rollouts.mask})

    one = scheduled(choosing, {"beta": falling})
    with pytest.raises(ValueError, match="beta of this objective cannot follow a schedule"):
        jax.jit(one.update)(logprobs, rollouts, A, one.init())
    one = scheduled(weighing, {"beta": falling})
    with pytest.raises(ValueError, match="or how rollouts are weighed, depends on it"):
        one.weights(rollouts)


@pytest.mark.slow
def test_every_method_can_schedule_a_divergence():
    """In place of its own, if it has one of the same name."""
    for slug in methods.names():
        own = [part for part in methods.get(slug).parts("objective") if part.name != "kl"]
        one = objectives.made([*own, ("kl", {"coef": "linear(0.4, 0, 4)"})], max_len=8)
        state = one.init()
        assert int(state.updates) == 0 and "ref_logprobs" in one.needs


def test_a_text_schedules_numbers_of_its_parts():
    """The base's, a term's, and a bonus that begins after two steps of two updates."""
    logprobs, rollouts, A = example()
    text = "ppo_clip(clip_high=linear(0.3, 0.1, 2)) + kl(cosine(0.4, 0)) + entropy(after(0.2, 2))"
    one = objectives.of(text, steps=4, per_step=2)
    state, plain = one.init(), objectives.ppo_clip(clip_high=0.3)
    losses, found = [], []
    for _ in range(6):
        loss, (metrics, state) = one.update(logprobs, rollouts, A, state)
        losses.append(float(loss))
        found.append({name: float(value) for name, value in metrics.items() if name.startswith("objective/")})
    close([line["objective/clip_high"] for line in found], [0.3, 0.3, 0.2, 0.2, 0.1, 0.1], rtol=1e-6)
    close([line["objective/kl_coef"] for line in found], np.repeat([0.4, 0.2 + 0.4 / np.sqrt(8), 0.2], 2), rtol=1e-6)
    close([line["objective/entropy_coef"] for line in found], [0, 0, 0, 0, 0.2, 0.2], rtol=1e-6)
    first = plain.update(logprobs, rollouts, A, ())[0] + 0.4 * metrics["kl"]
    close(losses[0], first, rtol=1e-5)
    entropy = float(rollouts.extras["current_entropies"][rollouts.mask].mean())
    last = objectives.ppo_clip(clip_high=0.1).update(logprobs, rollouts, A, ())[0] + 0.2 * metrics["kl"] - 0.2 * entropy
    close(losses[-1], last, rtol=1e-5)
    for text, message in (("linar(1, 0)", "Did you mean 'linear'"), ("linear(begin=1, end=0)", "'linear' 'begin'"),
                          ("linear(1)", "has the numbers start, end, steps"), ("linear(1, 0, 0)", "steps of 1 or more"),
                          ("after(one, 50)", "has the numbers value, step"), ("after(1, -1)", "has the numbers value, step"),
                          ("linear(1, 0), cosine(1, 0)", "are 2 schedules; give one")):
        with pytest.raises(ValueError, match=message):
            schedule(text, 4)
    with pytest.raises(ValueError, match="has the numbers start, end, steps"):
        objectives.of("ppo_clip + kl(linear(0.1, 0))")  # no run says over how many steps


OWN_TERM = """
import jax.numpy as jnp
from jaxrl_llm.objectives.terms import Term

def unlikely(*, coef, least=-1.0):
    return Term("unlikely", coef, lambda logprobs, rollouts: jnp.maximum(least - logprobs, 0), metric="unlikely")
"""


def test_a_term_of_your_own_costs_one_file(tmp_path, monkeypatch):
    (tmp_path / "terms_of_mine.py").write_text(OWN_TERM)
    monkeypatch.syspath_prepend(tmp_path)
    logprobs, rollouts, A = example()
    plain = objectives.ppo_clip().update(logprobs, rollouts, A, ())[0]
    one = methods.build("grpo", objective="ppo_clip + terms_of_mine:unlikely(after(0.5, 1))")[1]
    state, mean = one.init(), np.maximum(-1 - np.asarray(logprobs), 0)[np.asarray(rollouts.mask)].mean()
    for coef in (0, 0.5):
        loss, (metrics, state) = one.update(logprobs, rollouts, A, state)
        close(loss, plain + coef * mean, rtol=1e-5)
        close(metrics["unlikely"], mean, rtol=1e-5)


def test_sums_that_are_none():
    for text, message in (("kl(0.1)", "a loss begins with an objective, and 'kl' is a term"),
                          ("ppo_clip + gspo", "'gspo' is a second objective: a loss has one, and terms behind it"),
                          ("ppo_clip + kl", "term 'kl' needs the keyword 'coef'"),
                          ("ppo_clip + kl(0.1) + kl(0.2)", "the loss has kl more than once"),
                          ("ppo_clip(kl_coef=0.1)", r"has no kl_coef: .* write objective=\"ppo_clip\(...\) \+ kl\(0.1\)\""),
                          ("kl_cov(kl_coef=0.1)", "write held_coef=0.1"),
                          ("ppo_clip + kl(0.1, estimater=k2)", "Did you mean 'estimator'")):
        with pytest.raises(ValueError, match=message):
            objectives.of(text)
