"""Group DRO over bins of prompts: the worked example, a memory over steps in numpy, and growing weights of failing bins."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.advantages.gdro_prompt import bin_weights, followed
from jaxrl_llm.control.surrogate import surrogate_loss
from jaxrl_llm.data.rollouts import Rollouts, pad_lists

close = np.testing.assert_allclose
MOVING = jnp.array([0.5, 0, 0, 0.1, 0, 0, -0.2])
BINS_P = jnp.array([0, 3, 6])


@pytest.mark.parametrize("mode, expected", [
    ("code", [1.244671, 0.961995, 0.793334]), ("paper", [1.384031, 1.067159, 0.878095])])
def test_weights(mode, expected):
    close(bin_weights(MOVING, BINS_P, jnp.ones(3, bool), mode=mode), expected, atol=6e-7)
    padded = bin_weights(MOVING, jnp.array([0, 3, 6, 1]), jnp.array([True, True, True, False]), mode=mode)
    close(padded[:3], expected, atol=6e-7)  # a missing prompt is in no bin


def test_shares_of_the_present_bins():
    weights = bin_weights(MOVING, BINS_P, jnp.ones(3, bool))
    close(weights / weights.sum(), [0.414890, 0.320665, 0.264445], atol=6e-7)
    many = bin_weights(MOVING, jnp.array([0, 0, 0, 6]), jnp.ones(4, bool))
    close(many.mean(), 1, rtol=1e-6)
    assert bin_weights(100 * MOVING, BINS_P, jnp.ones(3, bool), most=2.0).max() <= 2
    assert not np.isnan(bin_weights(MOVING, BINS_P, jnp.zeros(3, bool))).any()


def test_moving_losses():
    seen = jnp.array([1.0, 0, 0, 1, 0, 0, 1])
    losses = jnp.array([[0.3, 0.1], [0.1, -0.1], [0, 0]])
    moving, new = followed(MOVING, seen, BINS_P, losses, jnp.ones((3, 2), bool), per_share=True)
    close(moving, [0.512, 0, 0, 0.088, 0, 0, -0.176], atol=1e-6)
    close(followed(MOVING, seen, BINS_P, losses, jnp.ones((3, 2), bool))[0], [0.464, 0, 0, 0.088, 0, 0, -0.176], atol=1e-6)
    assert new.tolist() == [2, 0, 0, 2, 0, 0, 2]
    first, _ = followed(MOVING, 0 * seen, BINS_P, losses, jnp.ones((3, 2), bool).at[2].set(False), per_share=True)
    close(first[jnp.array([0, 3, 6])], [0.4, 0, -0.2], atol=1e-6)  # the mean at once, over a share of a half; or as it was


def batch(ids, right):
    right = jnp.asarray(right, bool)
    valid = jnp.ones(right.shape, bool)
    return Rollouts(mask=valid[..., None], valid=valid, rewards=right * 1.0, prompt_ids=jnp.asarray(ids))


def test_groups_of_another_run_are_no_visits():
    """The state after a batch with a pool's group is that after the batch without it; its rollouts have advantages."""
    one = advantages.make("gdro_prompt", num_prompts=16, window=4)
    own, mixed = batch([1], [[1, 0, 0, 0]]), batch([1, 2], [[1, 0, 0, 0], [1, 1, 0, 0]])
    mixed = mixed.replace(extras={"replayed": jnp.array([[False] * 4, [True] * 4])})
    (A, state), (_, alone) = one.update(mixed, one.init()), one.update(own, one.init())
    jax.tree.map(np.testing.assert_array_equal, state, alone)
    assert (A[1] != 0).all()


def test_the_surrogate_loss_of_drifted_rollouts():
    """With A = +-0.707107: -A (1.28 + 1.1 + 0.5) / 3 and -A (0.8 + 1.5) / 2; without drift -A, together 0."""
    A, mask = jnp.array([[0.707107, -0.707107]]), pad_lists([[[1] * 3, [1] * 2]], fill=0) == 1
    ratios = pad_lists([[[1.5, 1.1, 0.5], [0.5, 1.5]]], fill=np.nan)
    close(surrogate_loss(ratios, A, mask), [[-0.678823, 0.813173]], atol=1e-6)
    close(surrogate_loss(jnp.ones((1, 2, 3)), A, mask), -A, atol=1e-6)


@pytest.mark.parametrize("ratios, moved", [([1.0, 1.0], 0.0), ([1.5, 0.5], -0.169706)])
def test_the_adversary_follows_the_surrogate_loss(ratios, moved):
    """The mean of -0.707107 * 1.28 and 0.707107 * 0.8 (sample std), after the updates; 0 without drift."""
    rollouts, ratios = batch([1, 2], [[1, 0], [0, 1]]), jnp.array([ratios, ratios[::-1]])[..., None]
    one = advantages.make("gdro_prompt", num_prompts=8, window=3, signal="surrogate")
    _, state = one.update(rollouts, one.init())
    assert not state.moving.any() and not state.seen.any()
    state = one.learned(rollouts, ratios, state)
    close(state.moving, [moved, 0, 0, 0, 0, 0, 0], atol=2e-6)
    assert state.seen.tolist() == [1, 0, 0, 0, 0, 0, 0]
    cut = rollouts.replace(mask=rollouts.mask.reshape(4, 1, 1), valid=rollouts.valid.reshape(4, 1),
                           rewards=rollouts.rewards.reshape(4, 1), prompt_ids=jnp.repeat(rollouts.prompt_ids, 2))
    again = one.learned(cut, ratios.reshape(4, 1, 1), one.update(rollouts, one.init())[1])
    close(again.moving, state.moving, atol=1e-6)  # groups that are cut into rows
    plain = advantages.make("gdro_prompt", num_prompts=8, window=3)
    assert plain.learned is None and plain.update(rollouts, plain.init())[1].moving[0] == 0.5
    with pytest.raises(ValueError, match="Unknown signal 'surogate'. Did you mean 'surrogate'"):
        advantages.make("gdro_prompt", signal="surogate")


@pytest.mark.parametrize("per_share", [False, True])
def test_several_steps_agree_with_a_memory_in_numpy(per_share):
    rng, edges = np.random.default_rng(0), np.array([0.1, 0.2, 0.4, 0.6, 0.8, 0.9])
    one = advantages.make("gdro_prompt", num_prompts=16, window=4, per_share=per_share)
    update, state = jax.jit(one.update), one.init()
    history, bins, loss_of = {i: [] for i in range(6)}, {}, np.full(7, np.nan)
    for _ in range(12):
        ids = rng.permutation(6)[:3]
        right = rng.random((3, 4)) < np.linspace(0, 0.9, 6)[ids][:, None]
        A, state = update(batch(ids, right), state)
        for i in ids:
            accuracy = np.mean(history[i][-4:]) if history[i] else 0.0
            raw, old = int((accuracy >= edges).sum()), bins.get(i, -1)
            if old >= 0 and raw != old:
                edge = edges[min(raw, old)]
                raw = raw if (accuracy >= edge + 0.03 if raw > old else accuracy <= edge - 0.03) else old
            bins[i] = raw
        mine = np.array([bins[i] for i in ids])
        there = np.unique(mine)
        power = np.exp(0.65 * np.nan_to_num(loss_of[there]))
        q = dict(zip(there, 0.99 * power / power.sum() + 0.01 / len(there)))
        w = np.array([q[b] for b in mine])
        z = (right - right.mean(1, keepdims=True)) / (right.std(1, ddof=1, keepdims=True) + 1e-6)
        close(A[..., 0], (w / w.mean())[:, None] * z, rtol=1e-5, atol=1e-6)
        for b in there:
            loss = (1 - right[mine == b].mean()) / ((mine == b).mean() if per_share else 1)
            loss_of[b] = loss if np.isnan(loss_of[b]) else 0.88 * loss_of[b] + 0.12 * loss
        for i, row in zip(ids, right):
            history[i].append(row.any())
    close(state.moving, np.nan_to_num(loss_of), rtol=1e-5)


def test_a_bin_with_few_prompts_fails_no_more_than_others():
    """One prompt of one bin and seven of another fail alike: equal losses, so per share the first has seven times as much."""
    bins, losses, valid = jnp.array([6] + [0] * 7), jnp.full((8, 2), 0.5), jnp.ones((8, 2), bool)
    nothing = jnp.zeros(7)
    close(followed(nothing, nothing, bins, losses, valid)[0], [0.5, 0, 0, 0, 0, 0, 0.5])
    close(followed(nothing, nothing, bins, losses, valid, per_share=True)[0], [4 / 7, 0, 0, 0, 0, 0, 4], rtol=1e-6)


@pytest.mark.slow
def test_failing_bins_gain_weight():
    """One prompt mostly fails and one mostly succeeds, both with mixed groups: the first ends with the larger advantages."""
    one = advantages.make("gdro_prompt", num_prompts=8, window=3)
    state = one.init()
    for step in range(30):
        hard = [step % 6 == 0, False, False, False]
        A, state = one.update(batch([1, 2], [hard, [True, True, True, False]]), state)
    A, _ = one.update(batch([1, 2], [[True, False, False, False], [True, True, True, False]]), state)
    assert np.abs(A[0]).max() > 1.2 * np.abs(A[1]).max()  # by themselves they are mirror images
    with pytest.raises(ValueError, match="mode 'cod'. Did you mean 'code'"):
        advantages.make("gdro_prompt", mode="cod")


def test_places_are_shared_by_taking_over():
    one = advantages.make("gdro_prompt", num_prompts=4, window=3)
    _, state = one.update(batch([1, 2], [[True, False]] * 2), one.init())
    _, state = one.update(batch([5, -1], [[False, False]] * 2), state)
    assert state.ids.tolist() == [-1, 5, 2, -1] and state.windows.visits.tolist() == [0, 1, 1, 0]
    assert not state.windows.solved[1, 0] and state.windows.bins.tolist()[1] == 0
