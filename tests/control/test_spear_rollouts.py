"""SPEAR's choice of rollouts, against counts of windows by hand and in Python."""
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import control
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths.ngrams import most_repeats


def batch(tokens, mask=None, **extras):
    tokens = np.array([tokens], np.int32)
    mask = np.ones(tokens.shape, bool) if mask is None else np.array([mask], bool)
    nowhere = np.zeros(tokens.shape[:2], bool)
    extras = {"truncated": nowhere, "unreadable": nowhere, **{name: np.array([x]) for name, x in extras.items()}}
    return Rollouts(mask=jnp.asarray(mask), valid=jnp.ones(tokens.shape[:2], bool), tokens=jnp.asarray(tokens), extras=extras)


def test_runs_of_tokens_are_counted_with_overlaps_and_not_across_holes():
    """7 7 7 7 has 7 7 three times; 1 2 1 2 has 1 2 twice, and once where the second 1 is not trained."""
    rows = batch([[7, 7, 7, 7], [1, 2, 1, 2], [1, 2, 1, 2], [1, 2, 3, 4]],
                 [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 1, 0]])
    assert most_repeats(rows.tokens, rows.token_mask, 2).tolist() == [[3, 2, 1, 0]]
    assert most_repeats(rows.tokens, rows.token_mask, 5).tolist() == [[0] * 4], "a run is longer than the rollouts"
    keep = control.make_filter("spear_rollouts", ngram=2, repeats=3).keep
    assert keep(rows).tolist() == [[False, True, True, True]]
    assert control.make_filter("spear_rollouts", ngram=2, repeats=2).keep(rows).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_counts_are_those_of_every_window(size):
    rng = np.random.default_rng(size)
    tokens, mask = rng.integers(0, 2, (2, 3, 17)), rng.random((2, 3, 17)) < 0.9
    wanted = [[max(Counter(tuple(row[i:i + size]) for i in range(18 - size) if real[i:i + size].all()).values(), default=0)
               for row, real in zip(*group)] for group in zip(tokens.tolist(), mask)]
    assert most_repeats(jnp.asarray(tokens), jnp.asarray(mask), size).tolist() == wanted


def test_twenty_tokens_nine_times_stay_and_ten_times_do_not():
    """The numbers of the authors' code: 28 equal tokens hold 9 runs of 20, 29 hold 10."""
    tokens = np.arange(100, 129)[None] * np.ones((2, 1), int)
    tokens[0, :28], tokens[1] = 5, 5
    assert control.make_filter("spear_rollouts").keep(batch(tokens)).tolist() == [[True, False]]


def test_what_is_cut_void_or_without_an_answer_is_left_out():
    """Each fault in a rollout of its own; a void turn counts by its trained tokens."""
    tokens, void = np.arange(10).reshape(5, 2), np.zeros((5, 2), bool)
    void[1, 0] = void[4, 1] = True
    mask = np.ones((5, 2), bool)
    mask[4, 1] = False
    rows = batch(tokens, mask, void=void, answers=[0, 1, -1, 0, 0], truncated=[False] * 3 + [True, False])
    keep = control.make_filter("spear_rollouts").keep
    assert keep(rows).tolist() == [[True, False, False, False, True]]
    bare = rows.replace(extras={name: rows.extras[name] for name in ("truncated", "unreadable")})
    unread = bare.replace(extras={**bare.extras, "unreadable": np.array([[False, False, False, False, True]])})
    assert keep(unread).tolist() == [[True, True, True, False, False]]
    assert keep(bare).tolist() == [[True, True, True, False, True]], "a run without these records"
    with pytest.raises(ValueError, match="ngram=0, repeats=10; give a number of tokens"):
        control.make_filter("spear_rollouts", ngram=0)
