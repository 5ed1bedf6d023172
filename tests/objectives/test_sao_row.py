"""SAO from values and rewards to the gradient, by hand: advantages skip what others wrote, stray tokens are masked."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import methods
from jaxrl_llm.data.rollouts import from_lists

VALUES = np.float32([[[0.5, 0.6, 9.0, 0.8]]])
WRITTEN = jnp.array([[[True, True, False, True]]])  # by the policy: the third token is of the environment
ESTIMATOR, OBJECTIVE = methods.build("sao")


def test_the_value_after_an_action_is_that_of_the_next_action():
    """delta = (0.6 - 0.5, 0.8 - 0.6, 1 - 0.8), lam = 1 - 1 / (1.5 * 3): the message between the actions has no part."""
    rollouts = from_lists([[1]], lengths=[[4]], extras={"values": VALUES}).replace(mask=WRITTEN)
    advantages, _ = ESTIMATOR.update(rollouts, ())
    lam = 7 / 9
    by_hand = [0.1 + lam * (0.2 + lam * 0.2), 0.2 + lam * 0.2, 0, 0.2]
    np.testing.assert_allclose(advantages[0, 0], by_hand, rtol=1e-5)
    np.testing.assert_allclose(by_hand[:2], [0.37654321, 0.35555556], rtol=1e-7)
    np.testing.assert_allclose(ESTIMATOR.value_targets(rollouts, False)[0, 0], [1, 1, 0, 1], rtol=1e-6)  # lambda_critic = 1


@pytest.mark.parametrize("ratios, kept", [((2.0, 6.5, 0.6), (1, 0, 0)), ((0.71, 5.9, 1.0), (1, 1, 1)),
                                          ((0.69, 6.1, 1e-6), (0, 0, 0))])
def test_tokens_outside_the_band_are_masked_and_stay_in_the_mean(ratios, kept):
    """l = -(1/3) sum_t k_t [0.7 <= k_t <= 6] A_t log p_t, whatever the sign of A; no rollout is dropped."""
    logs, advantages = np.log([0.5, 0.65, 0.06]), np.array([0.5, -0.25, 2.0])
    rollouts = from_lists([[1]], lengths=[[3]], behavior_logprobs=(logs - np.log(ratios))[None, None])
    update = jax.value_and_grad(OBJECTIVE.update, has_aux=True)
    (loss, (metrics, _)), slope = update(jnp.asarray(logs)[None, None], rollouts, jnp.asarray(advantages)[None, None], ())
    by_hand = -np.multiply(ratios, kept) * advantages / 3
    np.testing.assert_allclose(slope[0, 0], by_hand, rtol=1e-5)
    assert float(loss) == pytest.approx(by_hand @ logs, rel=1e-5)
    assert float(metrics["mask_fraction"]) == pytest.approx(1 - np.mean(kept), abs=1e-6)
