"""Methods that need correctness read its record if there is one, and not the total reward."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.data.rollouts import from_lists

HYPER = {"lightningrl": {"perf": "length"}, "demystify_cot": {"max_len": 50}}
REWARDS = [[0.6, 0.4, 1.0, 0.0], [0.2, 0.9, 0.7, 0.1]]
FLIPPED = [[False, True, True, False], [False, False, True, True]]


def rollouts_with(**extras):
    random = np.random.default_rng(0)
    rollouts = from_lists(REWARDS, [[1, 2, 3, 4], [4, 3, 2, 1]])
    shape = rollouts.mask.shape
    logprobs = {name: jnp.asarray(-random.exponential(size=shape), jnp.float32)
                for name in ("old_logprobs", "ref_logprobs", "behavior_logprobs", "entropies")}
    common = {"flawed": jnp.zeros((2, 4), bool), "truncated": jnp.zeros((2, 4), bool), "values": jnp.zeros(shape)}
    return rollouts.replace(**logprobs, tokens=jnp.asarray(random.integers(0, 9, shape)), prompt_ids=jnp.arange(2),
                            extras=common | {name: jnp.asarray(value) for name, value in extras.items()})


@pytest.mark.parametrize("slug", ("ace", "demystify_cot", "fapo", "grpo_lambda", "lightningrl", "mssr", "nsr_psr",
                                  "reinforce_rej", "xrpo_advantage"))
def test_the_record_decides(slug):
    estimator = advantages.make(slug, **HYPER.get(slug, {}))

    def first_and_second(rollouts):  # the tracker's state after the first batch changes the second
        A, state = estimator.update(rollouts, estimator.init())
        return np.asarray(A), np.asarray(estimator.update(rollouts, state)[0])

    guessed = first_and_second(rollouts_with())
    recorded = first_and_second(rollouts_with(correct=np.array(REWARDS) > 0.5))
    np.testing.assert_array_equal(recorded, guessed)
    assert np.abs(np.subtract(first_and_second(rollouts_with(correct=np.array(FLIPPED))), guessed)).max() > 1e-3


def test_a_format_bonus_makes_no_wrong_answer_right():
    A, _ = advantages.make("nsr_psr").update(rollouts_with(correct=np.array(FLIPPED)), ())
    assert (np.sign(A[..., 0]) == np.where(FLIPPED, 1, -1)).all()
