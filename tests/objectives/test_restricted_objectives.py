"""Rollouts left out of loss and denominator (overlong filtering, rejection), and REINFORCE with KL, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, methods, objectives
from jaxrl_llm.data.rollouts import from_lists, pad_lists

with np.errstate(divide="ignore"):
    OLD, NEW, REF = (np.log(pad_lists([rows])) for rows in (
        [[0.5, 0.2, 0.8], [0.4, 0.1]], [[0.75, 0.22, 0.4], [0.2, 0.15]], [[0.5, 0.3, 0.8], [0.25, 0.1]]))


def example(rewards, **fields):
    return from_lists([rewards], lengths=[[3, 2]], old_logprobs=OLD, ref_logprobs=REF, **fields)


def run(objective, rollouts, values, new=NEW):
    update = jax.value_and_grad(objective.update, has_aux=True)
    (loss, (metrics, _)), gradient = update(jnp.asarray(new), rollouts, values, objective.init())
    return float(loss), metrics, np.asarray(gradient)


def test_reinforce_rej_worked_example():
    rollouts = example([1, -1])
    values, _ = advantages.make("reinforce_rej").update(rollouts, ())
    loss, metrics, gradient = run(objectives.of("reinforce_rej + kl(0.001)"), rollouts, values)
    np.testing.assert_allclose(loss, -0.157585181, atol=1e-7)
    np.testing.assert_allclose(gradient, [[[-0.199933, -0.200073, -0.2002], [0.19995, 0.200067, 0]]], atol=1e-6)
    np.testing.assert_allclose(metrics["kl"], 0.106291, atol=1e-6)
    clipped, _, _ = run(objectives.of("reinforce_rej(clip) + kl(0.001)"), rollouts, values)
    np.testing.assert_allclose(clipped, -0.1 + 0.001 * 0.106290851, atol=1e-7)


def test_a_rejected_prompt_only_pays_its_kl_unless_it_is_dropped():
    rollouts = example([1, 1])
    values, _ = advantages.make("reinforce_rej").update(rollouts, ())
    assert run(objectives.make("reinforce_rej"), rollouts, values)[0] == 0
    kept, _, _ = run(objectives.of("reinforce_rej + kl(0.001)"), rollouts, values)
    np.testing.assert_allclose(kept, 0.001 * 0.106291, atol=1e-8)
    loss, _, gradient = run(objectives.of("reinforce_rej(drop=True) + kl(0.001)"), rollouts, values)
    assert loss == 0 and not np.any(gradient)


@pytest.mark.slow
def test_dropping_takes_rejected_tokens_out_of_the_denominator():
    good, bad = example([1, -1]), example([1, 1])
    both = jax.tree.map(lambda *x: jnp.concatenate(x), good, bad)
    values, _ = advantages.make("reinforce_rej").update(both, ())
    new = np.concatenate([NEW, NEW])
    for variant in ("reinforce", "clip"):
        alone, _, gradient = run(objectives.of("reinforce_rej + kl(0.001)", variant=variant), good, values[:1])
        dropped, _, wide = run(objectives.of("reinforce_rej(drop=True) + kl(0.001)", variant=variant), both, values, new)
        np.testing.assert_allclose(dropped, alone, rtol=1e-6)
        np.testing.assert_allclose(wide, np.concatenate([gradient, np.zeros_like(gradient)]), atol=1e-7)
        halved, _, _ = run(objectives.make("reinforce_rej", variant=variant), both, values, new)
        full, _, _ = run(objectives.make("reinforce_rej", variant=variant), good, values[:1])
        np.testing.assert_allclose(2 * halved, full, rtol=1e-6)


def test_overlong_filtering():
    truncated = jnp.array([[False, True]])
    rollouts = example([1, 0], extras={"truncated": truncated})
    values, _ = advantages.grpo().update(rollouts, ())
    np.testing.assert_allclose(values[0, :, 0], [0.7071058, -0.7071058], atol=1e-6)
    loss, metrics, gradient = run(objectives.make("dapo_overlong"), rollouts, values)
    np.testing.assert_allclose(loss, -0.7071058 * (1.28 + 1.1 + 0.5) / 3, atol=1e-6)
    np.testing.assert_allclose(gradient, np.array([[[0, -1.1, -0.5], [0, 0, 0]]]) * 0.7071058 / 3, atol=1e-6)
    np.testing.assert_allclose(metrics["clip_fraction"], 1 / 3, rtol=1e-6)
    all_cut = rollouts.replace(extras={"truncated": jnp.ones((1, 2), bool)})
    assert run(objectives.make("dapo_overlong"), all_cut, values)[0] == 0
    with pytest.raises(ValueError, match="'truncated'"):
        run(objectives.make("dapo_overlong"), example([1, 0]), values)


def test_asymmetric_reinforce_from_the_catalogue():
    estimator, objective = methods.build("asym_re")
    rollouts = example([1, 0])
    values, _ = estimator.update(rollouts, ())
    loss, _, gradient = run(objective, rollouts, values)
    np.testing.assert_allclose(loss, 0.045647433, atol=1e-7)
    np.testing.assert_allclose(gradient, [[[-0.12] * 3, [0.08, 0.08, 0]]], atol=1e-7)
