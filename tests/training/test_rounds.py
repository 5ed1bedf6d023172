"""Draws in rounds: every draw lands with its prompt, and rows of unequal groups give the loss of the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.generation.sampler import Completions
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollouts import Prompts, Rollouts
from jaxrl_llm.training import rollout, rounds
from jaxrl_llm.training.rollout import Sampled
from jaxrl_llm.values.v0_5 import fuse, wants_more

P, T = 3, 2


def drawn(rewards, number):
    """A batch whose every entry can be told: rewards [R, g], and tokens that name the round."""
    rewards = np.asarray(rewards, np.float32)
    shape = (*rewards.shape, T)
    completions = Completions(np.full(shape, number), np.ones(shape, bool), np.full(shape, -float(number)), np.zeros(shape),
                              np.ones(shape[:2], bool), np.int32(5))
    texts = [f"round {number}: {r:g}" for r in rewards.ravel()]
    scores = Scores(rewards.ravel(), rewards.reshape(-1, 1), ("exact",), {"exact": 1})
    R = len(rewards)
    prompts = Prompts(np.zeros((R, 4)), np.ones((R, 4), bool), np.arange(R))
    uids = 100 * number + np.arange(rewards.size).reshape(rewards.shape)
    return Sampled([None] * R, prompts, completions, texts, scores, uids, [int(r) for r in rewards.ravel()])


def test_those_who_disagree_with_their_prior_draw_again():
    prior, asked = np.array([1.0, 0.0, 1.0]), []
    truth = {0: [[1, 1], [1, 1], [0, 0]], 1: [[0, 1]], 2: [[1, 0]]}  # prompt 0 is believed; 1 and 2 are not

    def draw(rows):
        number = len(asked)
        asked.append(rows.tolist())
        return drawn(truth[0] if number == 0 else truth[number] * len(rows), number)

    def wants(rewards, valid):
        count = valid.sum(1)
        mean = (rewards * valid).sum(1) / count
        return wants_more(fuse(prior, mean, count, variance=0.25), count, variance=0.25, k_init=2, k_max=6, cost=0.01)

    sampled, valid = rounds.in_rounds(draw, wants, P, 3)
    assert asked[:2] == [[0, 1, 2], [1, 2]]
    assert valid.tolist()[0] == [True, True] + [False] * (valid.shape[1] - 2) and valid[1, :4].all()
    assert sampled.rewards[1, :4].tolist() == [1, 1, 0, 1] and sampled.rewards[2, :4].tolist() == [0, 0, 0, 1]
    G = valid.shape[1]
    assert sampled.texts[G:G + 4] == ["round 0: 1", "round 0: 1", "round 1: 0", "round 1: 1"]
    assert sampled.texts[2] == "" and sampled.answers[2] is None and len(sampled.texts) == P * G
    assert sampled.completions.tokens[2, 2].tolist() == [1, 1] and not sampled.completions.mask[0, 2:].any()
    assert sampled.completions.decode_steps == 5 * len(asked) and sampled.scores.failures == {"exact": len(asked)}
    assert sampled.scores.components.shape == (P * G, 1)
    assert sampled.uids[0].tolist() == [0, 1] + [-1] * (G - 2) and sampled.uids[1:, :4].tolist() == [
        [2, 3, 100, 101], [4, 5, 102, 103]]


def test_nobody_has_to_draw_again():
    sampled, valid = rounds.in_rounds(lambda rows: drawn([[1], [0], [1]], 0), lambda r, v: np.zeros(P, bool), P, 4)
    assert valid.shape == (P, 1) and sampled.rewards.ravel().tolist() == [1, 0, 1]


def uneven():
    """Three prompts with 1, 2 and 1 draws, with room for three."""
    draws = iter([drawn([[1], [0], [0]], 0), drawn([[1]], 1)])
    wants = lambda rewards, valid: np.array([False, True, False])  # noqa: E731
    sampled, valid = rounds.in_rounds(lambda rows: next(draws), wants, P, 2)
    return dataclasses.replace(rounds.widen(sampled, valid, 3), prior={"expected": np.array([0.2, 0.9, 0.4], np.float32)})


def test_what_was_never_drawn_is_in_no_metric_and_no_loss():
    sampled = uneven()
    assert sampled.valid.tolist() == [[True, False, False], [True, True, False], [True, False, False]]
    assert sampled.rewards.shape == (P, 3) and len(sampled.texts) == len(sampled.answers) == 9
    assert sampled.uids.tolist() == [[0, -1, -1], [1, 100, -1], [2, -1, -1]]
    facts = rollout.metrics_of(sampled)
    assert facts["completion/tokens"] == 4 * T and facts["completion/length"] == T and facts["completion/truncated"] == 0
    assert facts["reward/mean"] == facts["reward/exact"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert facts["groups/all_equal"] == pytest.approx(2 / 3) and facts["groups/largest"] == 2
    whole = rollout.to_rollouts(sampled, T, 4, 0)  # one prompt is missing
    assert whole.valid.sum(1).tolist() == [1, 2, 1, 0]
    assert whole.extras["prior"].tolist()[:3] == sampled.prior["expected"].tolist()
    assert not whole.token_mask[~whole.valid].any() and not whole.extras["truncated"][:3][~sampled.valid].any()
    assert rounds.widen(sampled, sampled.valid, 3).texts == sampled.texts  # there is room already


def test_unequal_groups_are_chosen_and_joined_with_all_that_belongs_to_them():
    sampled = uneven()
    part = rollout.select(sampled, np.array([False, True, True]))
    assert part.valid.tolist() == sampled.valid[1:].tolist()
    assert part.prior["expected"].tolist() == sampled.prior["expected"][1:].tolist()
    assert part.rewards.tolist() == [[0, 1, 0], [0, 0, 0]] and part.texts[:2] == ["round 0: 0", "round 1: 1"]
    both = rollout.concatenate([part, sampled])
    assert both.valid.tolist() == [*part.valid.tolist(), *sampled.valid.tolist()]
    assert both.prior["expected"].tolist() == [*part.prior["expected"].tolist(), *sampled.prior["expected"].tolist()]


def test_rows_of_one_prompt_become_its_group():
    """Five rows of one draw, of prompts 2, 0, 2, 2 and 0."""
    rows = drawn([[1], [0], [1], [0], [1]], 0)
    rows = dataclasses.replace(rows, scores=rows.scores._replace(failures={"exact/error": 1}))
    merged, valid = rounds.merge(rows, np.array([2, 0, 2, 2, 0]))
    assert valid.tolist() == [[True, True, True], [True, True, False]]
    assert merged.rewards.tolist() == [[1, 1, 0], [0, 1, 0]]
    assert merged.prompts.ids.tolist() == [0, 1]
    assert merged.texts == [rows.texts[i] for i in (0, 2, 3, 1, 4)] + [""]
    assert merged.scores.failures == {"exact/error": 1}
    assert int(merged.completions.decode_steps) == int(rows.completions.decode_steps)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_rows_of_equal_size_give_the_loss_of_unequal_groups(aggregation):
    rng = np.random.default_rng(0)
    G, S = 6, 6  # as many prompt tokens as rollouts: axes are not told by size alone
    valid = np.arange(G) < np.array([2, 6, 3])[:, None]
    mask = np.arange(T) < rng.integers(1, T + 1, (P, G, 1))
    logprobs = rng.normal(size=(P, G, T))
    rollouts = Rollouts(mask=jnp.asarray(mask), valid=jnp.asarray(valid), rewards=jnp.asarray(rng.normal(size=(P, G))),
                        old_logprobs=jnp.asarray(logprobs), prompt_ids=jnp.arange(P),
                        prompt_tokens=jnp.arange(P * S).reshape(P, S), prompt_mask=jnp.ones((P, S), bool),
                        extras={"prior": jnp.arange(P) / 10})
    A = np.where(mask & valid[..., None], rng.normal(size=(P, G, T)), 0)
    rows, cut = rounds.regroup(rollouts, A, 2, 4)
    assert rows.valid.shape == (8, 2) and rows.valid.sum() == valid.sum() and cut.shape == (8, 2, T)
    assert rows.prompt_ids[:6].tolist() == [0, 1, 1, 1, 2, 2] and not rows.valid[6:].any()
    assert rows.prompt_tokens[:6].tolist() == rollouts.prompt_tokens[jnp.array([0, 1, 1, 1, 2, 2])].tolist()
    assert np.allclose(rows.extras["prior"][:6], np.array([0, 1, 1, 1, 2, 2]) / 10)
    objective = objectives.ppo_clip(aggregation=aggregation)
    loss = lambda batch, values: objective.update(jnp.asarray(batch.old_logprobs) + 0.1, batch, jnp.asarray(values), ())[0]  # noqa: E731
    np.testing.assert_allclose(loss(rows, cut), loss(rollouts, A), rtol=1e-5)
    scattered = rng.permuted(np.arange(P * G).reshape(P, G), axis=1) % G  # what is kept may lie anywhere
    mixed = jax.tree.map(lambda x: x[np.arange(P)[:, None], scattered],
                         rollouts.replace(prompt_ids=None, prompt_tokens=None, prompt_mask=None, extras={}))
    rows, cut = rounds.regroup(mixed, A[np.arange(P)[:, None], scattered], 2, 4)
    assert rows.valid.shape == (8, 2) and rows.valid.sum() == valid.sum()
    np.testing.assert_allclose(loss(rows, cut), loss(rollouts, A), rtol=1e-5)
    with pytest.raises(ValueError, match="rows of 4"):
        rounds.regroup(rollouts, A, 4, 1)
