"""Dr. GRPO's centred reward."""

import numpy as np

from jaxrl_llm import advantages
from jaxrl_llm.data.rollouts import from_lists


def test_worked_example():
    values, _ = advantages.make("dr_grpo").update(from_lists([[1, 0]], lengths=[[2, 1]]), ())
    assert np.array_equal(np.asarray(values), [[[0.5, 0.5], [-0.5, 0]]])


def test_scale_of_the_reward_is_kept_and_singletons_vanish():
    values, _ = advantages.make("dr_grpo").update(from_lists([[30, 10, 20], [5]]), ())
    assert np.array_equal(np.asarray(values)[..., 0], [[10, -10, 0], [0, 0, 0]])
