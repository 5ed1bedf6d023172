"""RAFT's choice of rollouts: right, few, short, no text twice."""
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import control
from jaxrl_llm.data.rollouts import from_lists

TEXTS = np.array([[[7, 8, 9], [7, 8, 0], [7, 8, 0], [5, 0, 0], [6, 6, 0]]])
GROUP = from_lists([[1, 1, 1, 0, 1]], [[3, 2, 2, 1, 2]], tokens=TEXTS)


@pytest.mark.parametrize("options, kept", [
    ({}, [False, True, False, False, False]),
    ({"most": 2}, [False, True, False, False, True]),
    ({"most": 4}, [True, True, False, False, True]),  # the third says what the second says
    ({"by": "first"}, [True, False, False, False, False]),
    ({"by": "first", "most": 2}, [True, True, False, False, False])])
def test_right_ones(options, kept):
    assert control.make_filter("right_ones", **options).keep(GROUP).tolist() == [kept]


def test_tokens_outside_the_mask_do_not_make_texts_different():
    other = GROUP.replace(tokens=jnp.asarray(np.where(GROUP.mask, TEXTS, [[[3], [4], [5], [6], [7]]])))
    assert control.make_filter("right_ones", most=5).keep(other).tolist() == [[True, True, False, False, True]]


def test_none_is_refused():
    with pytest.raises(ValueError, match="1 or more"):
        control.make_filter("right_ones", most=0)
