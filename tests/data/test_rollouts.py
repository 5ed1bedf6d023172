"""Rollouts, their checks, and the masked reductions against numpy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, control
from jaxrl_llm.data.rollouts import Role, Rollouts, check, clean, from_lists, pad_lists, take
from jaxrl_llm.maths import masked

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4, 5)).astype(np.float32)
MASK = RNG.random((3, 4, 5)) < 0.6
MASK[1] = False
DIRTY = jnp.asarray(np.where(MASK, X, np.nan))


@pytest.mark.parametrize("axis", [None, 1, (1, 2)])
@pytest.mark.parametrize("ddof", [0, 1])
def test_reductions_agree_with_numpy_and_ignore_padding(axis, ddof):
    total = np.where(MASK, X, 0).sum(axis=axis, dtype=np.float64)
    np.testing.assert_allclose(masked.sum(DIRTY, MASK, axis), total, atol=1e-5)
    n = MASK.sum(axis=axis)
    centre = total / np.maximum(n, 1)
    np.testing.assert_allclose(masked.mean(DIRTY, MASK, axis), centre, atol=1e-6)
    wide = np.expand_dims(centre, axis) if axis is not None else centre
    square = np.where(MASK, X - wide, 0) ** 2
    variance = np.where(n > ddof, square.sum(axis=axis) / np.maximum(n - ddof, 1), 0)
    np.testing.assert_allclose(masked.var(DIRTY, MASK, axis, ddof=ddof), variance, atol=1e-6)
    np.testing.assert_allclose(masked.std(DIRTY, MASK, axis, ddof=ddof), np.sqrt(variance), atol=1e-6)


def test_mean_of_equal_numbers_is_exact():
    for value in (0.1, 1 / 3, 1e-3, 7.7e5):
        x = jnp.full((1, 7), value)
        assert masked.mean(x, x == x) == x[0, 0] and masked.std(x, x == x, ddof=1) == 0
    naive = np.full(7, 0.1, np.float32).sum() / np.float32(7)
    assert naive != np.float32(0.1)  # why the shift is there


def test_gradients_stay_finite_on_empty_and_constant_sets():
    whiten, std = partial(masked.whiten, eps=1e-8, ddof=1), partial(masked.std, ddof=1)
    for mask in (MASK, np.zeros_like(MASK)):
        for function in (masked.mean, std, whiten):
            for x in (DIRTY, jnp.ones_like(DIRTY)):
                gradient = np.asarray(jax.grad(lambda x: jnp.sum(function(x, mask)))(x))
                assert np.isfinite(gradient).all() and not np.any(gradient[~mask])


def test_mean_has_the_gradient_of_a_mean():
    gradient = jax.grad(lambda x: masked.mean(x, jnp.asarray(MASK)))(DIRTY)
    np.testing.assert_allclose(gradient, MASK / MASK.sum(), rtol=1e-6)


def test_group_statistics():
    x, valid = jnp.array([[1.0, 0, 0, 0.5], [4, 2, 9, 9]]), jnp.array([[True] * 4, [True, True, False, False]])
    np.testing.assert_allclose(masked.group_mean(x, valid), [[0.375], [3]])
    spread = [[np.std([1, 0, 0, 0.5], ddof=1)], [2**0.5]]
    np.testing.assert_allclose(masked.group_std(x, valid, ddof=1), spread, rtol=1e-6)
    others = np.asarray(masked.leave_one_out_mean(x, valid))
    np.testing.assert_allclose(others[0], [1 / 6, 0.5, 0.5, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(others[1, :2], [2, 4])
    assert masked.leave_one_out_mean(jnp.array([[5.0]]), jnp.array([[True]])) == 5
    valid = jnp.array([[True, True], [True, False], [False, False]])
    assert masked.unless_alone(jnp.array([[3.0], [4], [5]]), valid).tolist() == [[3], [0], [0]]
    assert masked.unless_alone(jnp.full((3, 2), 7.0), valid, 1.0).tolist() == [[7, 7], [1, 1], [1, 1]]


def test_last_token_and_return_skip_holes():
    mask = jnp.array([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    assert masked.last_token(mask).tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    returns = masked.discounted_return(jnp.array([[1.0, 50, 8, 50], [9, 9, 9, 9], [1, 1, 1, 1]]), mask, gamma=0.5)
    assert returns.tolist() == [[5, 0, 8, 0], [0, 0, 0, 0], [1.875, 1.75, 1.5, 1]]


def test_lists_of_unequal_length():
    rollouts = from_lists([[1, 0], [3]], lengths=[[3, 1], [0]])
    assert rollouts.valid.tolist() == [[True, True], [True, False]]
    assert rollouts.lengths.tolist() == [[3, 1], [0, 0]] and rollouts.live.tolist() == [[True, True], [False, False]]
    assert pad_lists([[[1, 2], []]], fill=-1).tolist() == [[[1, 2], [-1, -1]]]


def test_a_token_counts_only_in_a_valid_rollout():
    rollouts = Rollouts(mask=jnp.ones((1, 2, 3), bool), valid=jnp.array([[True, False]]))
    assert rollouts.token_mask.sum() == 3 and rollouts.lengths.tolist() == [[3, 0]]


def test_what_is_there_and_what_is_trained_are_two_things():
    role = jnp.asarray([[[1, 2, 1, 0], [3, 4, 2, 2], [1, 0, 0, 0]]], jnp.int8)
    rollouts = Rollouts(mask=(role == Role.POLICY) | (role == Role.EXPERT), valid=jnp.array([[True, True, False]]), role=role)
    assert check(rollouts).present.tolist() == [[[True, True, True, False], [True] * 4, [False] * 4]]
    assert rollouts.lengths.tolist() == [[2, 1, 0]] and rollouts.live.tolist() == [[True, True, False]]
    dropped = rollouts.replace(mask=jnp.zeros_like(rollouts.mask))  # a filter drops it: nothing trained, all still present
    assert (dropped.present == rollouts.present).all() and not dropped.live.any()
    plain = rollouts.replace(role=None)
    assert (plain.present == plain.token_mask).all()


def test_zeros_are_padding_and_roles_stay_integers():
    assert Role(0) is Role.PADDING and len(Role) == 7
    rollouts = from_lists([[1, 0]], lengths=[[2, 1]], role=np.array([[[1, 2], [3, 0]]], np.int8))
    assert clean(rollouts).role.dtype == jnp.int8
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, 3)][:x.ndim]), rollouts)
    assert padded.present.sum() == 3
    with pytest.raises(ValueError, match="rollouts.role must hold integers, see rollouts.Role, got float32"):
        check(rollouts.replace(role=jnp.ones((1, 2, 2))))


def test_clean_removes_garbage_from_holes():
    rollouts = from_lists([[1]], lengths=[[3]], old_logprobs=np.float32([[[-1, np.nan, -2]]]),
                          extras={"values": np.float32([[[1, np.inf, 2]]])}, role=np.array([[[1, 2, 1]]], np.int8))
    result = clean(rollouts.replace(mask=rollouts.role == Role.POLICY))
    assert result.old_logprobs.tolist() == [[[-1, 0, -2]]] and result.extras["values"].tolist() == [[[1, 0, 2]]]


def test_clean_removes_garbage_from_padding_only():
    rollouts = from_lists([[1, 0]], lengths=[[2, 1]], old_logprobs=np.float32([[[-1, -2], [-3, np.nan]]]),
                          extras={"quality": np.float32([[1, np.inf]]), "traj": np.array([[7, 7]])})
    rollouts = clean(rollouts.replace(valid=jnp.array([[True, False]])))
    assert rollouts.old_logprobs.tolist() == [[[-1, -2], [0, 0]]]
    assert rollouts.extras["quality"].tolist() == [[1, 0]] and rollouts.extras["traj"].tolist() == [[7, 7]]


def test_clean_distinguishes_tokens_from_features_of_the_same_number():
    rollouts = from_lists([[1, 0]], lengths=[[2, 1]], features=np.float32([[[1, 2], [3, 4]]]),
                          reward_components=np.float32([[[5, 6], [7, 8]]]))
    result = clean(rollouts)
    assert result.features.tolist() == [[[1, 2], [3, 4]]] and result.reward_components.tolist() == [[[5, 6], [7, 8]]]


@pytest.mark.parametrize("change, message", [
    ({"rewards": jnp.ones((1, 3))}, r"rollouts.rewards has shape \(1, 3\), expected \[P=1, G=2\]"),
    ({"old_logprobs": jnp.ones((1, 2))}, r"old_logprobs has shape \(1, 2\), expected \[P=1, G=2, T=2\]"),
    ({"valid": jnp.ones((1, 2))}, "rollouts.valid must be boolean"),
    ({"extras": {"traj": jnp.zeros((5, 2))}}, r"extras\['traj'\].*P=1"),
])
def test_wrong_shapes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        check(from_lists([[1, 0]], lengths=[[2, 1]]).replace(**change))


def test_needs_are_named():
    rollouts = from_lists([[1, 0]], extras={"traj": np.zeros((1, 2), np.int32)})
    check(rollouts, "rewards", "traj")
    with pytest.raises(ValueError, match="field 'ref_logprobs'"):
        check(rollouts, "ref_logprobs")
    with pytest.raises(ValueError, match=r"extras\['obs'\]"):
        check(rollouts, "obs")


def test_take_slices_everything_that_belongs_to_a_prompt():
    rollouts = from_lists([[1, 0], [2, 3]], extras={"traj": np.arange(4).reshape(2, 2)})
    part = jax.jit(take, static_argnums=2)(rollouts.replace(loss_weights={"loss": jnp.arange(2.0)}), 1, 1)
    assert part.rewards.tolist() == [[2, 3]] and part.extras["traj"].tolist() == [[2, 3]]
    assert part.loss_weights["loss"].tolist() == [1] and part.old_logprobs is None


def test_the_record_of_right_answers_wins_over_the_total_reward():
    """A format bonus of 0.6 makes a wrong answer look right, a length penalty a right one wrong."""
    rollouts = from_lists([[0.6, 0.4, 1.0]])
    assert rollouts.correct.tolist() == [[True, False, True]]
    recorded = rollouts.replace(extras={"correct": np.array([[False, True, True]])})
    assert recorded.correct.tolist() == [[False, True, True]]


def test_integer_and_boolean_rewards_are_numbers():
    for dtype in (np.int32, np.uint8, bool):
        rollouts = from_lists([[1, 0, 1]]).replace(rewards=np.array([[1, 0, 1]], dtype))
        values, _ = advantages.make("nsr_psr").update(rollouts, ())
        np.testing.assert_allclose(values[..., 0], [[0.1, -1, 0.1]])
        rollouts = rollouts.replace(extras={"flawed": np.array([[True, False, False]])})
        values, _ = advantages.make("fapo").update(rollouts, ())
        np.testing.assert_allclose(values[..., 0], [[0, -1, 1]], atol=1e-5)  # rewards 0, -1, 1


def test_halves_neither_round_nor_overflow():
    equal = from_lists([[1] * 4096]).replace(rewards=np.full((1, 4096), 0.1, np.float16))
    values, _ = advantages.grpo().update(equal, ())
    assert values.dtype == np.float32 and not np.any(np.asarray(values))  # the square of 4096 is no float16
    one = equal.replace(rewards=np.array([[1] + [0] * 4095], np.float16))
    values, _ = advantages.grpo().update(one, ())
    np.testing.assert_allclose(values[0, :2, 0], [63.984375, -0.015625], rtol=1e-4)  # (1 - 1/4096) / std, std = 1/64


@pytest.mark.parametrize(("rewards", "dtype"), [
    (np.array([[1, 0]], np.complex64), "complex64"), (np.array([["1", "0"]]), "<U1"), (np.array([[1, None]]), "object")])
def test_what_is_no_real_number_is_refused(rewards, dtype):
    with pytest.raises(TypeError, match=f"rollouts.rewards is of dtype {dtype}; give real numbers"):
        advantages.grpo().update(from_lists([[1, 0]]).replace(rewards=rewards), ())


def test_filters_read_any_dtype():
    for dtype in (np.int32, bool, np.float16):
        rollouts = from_lists([[1, 0], [1, 1]]).replace(rewards=np.array([[1, 0], [1, 1]], dtype))
        assert control.make_filter("dynamic_sampling").keep(rollouts).tolist() == [True, False]
