"""C3PO: the worked example, the exact token budget, dropped tokens, and the divisor."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.objectives.c3po import within_budget

close = np.testing.assert_allclose
LENGTHS = np.array([[3, 4, 1]])
MASK = np.arange(4) < LENGTHS[..., None]


def example():
    moved = np.zeros((1, 3, 4), np.float32)
    moved[0, 0, :3], moved[0, 1], moved[0, 2, 0] = [0.1, 0.3, 0], [-0.1, 0.2, -0.4, 0], 0.05
    old = np.full((1, 3, 4), -1, np.float32)
    rollouts = Rollouts(mask=jnp.asarray(MASK), valid=jnp.ones((1, 3), bool), rewards=jnp.array([[1.0, 0, 0]]),
                        old_logprobs=jnp.asarray(old), ref_logprobs=jnp.asarray(old))
    A, _ = advantages.grpo(ddof=0).update(rollouts, ())
    close(A[0, :, 0], [1.41421056, -0.70710528, -0.70710528], rtol=1e-6)
    return jnp.asarray(old + moved), rollouts, A


@pytest.mark.slow
@pytest.mark.parametrize("truncate, counts, loss", [(True, [3, 2, 0], -0.6341324816), (False, [3, 4, 0], -0.3795562154)])
def test_worked_example(truncate, counts, loss):
    logprobs, rollouts, A = example()
    assert within_budget(rollouts.mask, 5, truncate=truncate).sum(2).tolist() == [counts]
    one = objectives.of("c3po + kl(0.001)", budget=5, truncate=truncate)
    (result, (metrics, _)), slope = jax.value_and_grad(one.update, has_aux=True)(logprobs, rollouts, A, ())
    close(result, loss, rtol=2e-6)
    assert ((slope != 0).sum(2) <= jnp.asarray([counts])).all()
    close(metrics["trained"], sum(counts) / 8)


def test_a_budget_is_spent_to_the_token():
    rng = np.random.default_rng(0)
    for budget in (1, 7, 30, 999):
        mask = jnp.asarray(np.arange(9) < rng.integers(0, 10, (4, 5, 1)))
        assert int(within_budget(mask, budget).sum()) == min(budget, int(mask.sum()))
        whole = np.asarray(within_budget(mask, budget, truncate=False).sum(2)).T.ravel()  # rollouts in the order of draws
        length = np.asarray(mask.sum(2)).T.ravel()
        reached = np.cumsum(length) - length < budget
        np.testing.assert_array_equal(whole, np.where(reached, length, 0))


def test_the_divisor_stays_where_tokens_are_few():
    """Twice the budget is half the loss, when both hold all tokens."""
    logprobs, rollouts, A = example()
    losses = [float(objectives.make("c3po", budget=budget).update(logprobs, rollouts, A, ())[0]) for budget in (8, 16, 80)]
    close(losses, losses[0] * np.array([1, 0.5, 0.1]), rtol=1e-5)
    with pytest.raises(ValueError, match="budget=0 tokens of an update"):
        objectives.make("c3po", budget=0)
