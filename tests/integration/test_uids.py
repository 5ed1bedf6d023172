"""Numbers of trajectories: what is drawn depends on them alone, a run hands out each once, a resumed one goes on counting."""
import json

import jax
import numpy as np
import pytest
import tiny_config
from jaxrl_llm.training.uids import Uids

from jaxrl_llm.generation import row_keys
from jaxrl_llm.training import loop, rollout, setup
from jaxrl_llm.training.metrics import PhaseTimer

G = 4


def config(**changes):
    c = tiny_config.get_config()
    c.update_from_flattened_dict({"eval.every": 0, "samples_every": 0, "sampling.group": G, **changes})
    return c


@pytest.fixture(scope="module")
def built():
    return setup.build(config())


def drawn(built, problems, uids, seed=3):
    """The batch of these problems of the task with these uids, sampled as the loop does it."""
    run, params = built
    rows = rollout.fitting_problems([run.task.train[i] for i in problems], run.tokenizer, run.prompt_tokens, "fail")
    return rollout.sample(run.sampler(params, None), rows, jax.random.key(seed), np.asarray(uids), timer=PhaseTimer(),
                          prompt_tokens=run.prompt_tokens, prompts=4, tokenizer=run.tokenizer, reward=run.reward)


def test_a_trajectory_does_not_change_with_its_company(built):
    """Alone beside filling rows, in another order and among others, also beyond 32 bits: the same tokens in float32."""
    problems, uids = [5, 0, 9, 2], np.array([[7, 8, 9, 10], [0, 1, 2, 3], [2**40, 5, 2**32 + 7, 6], [11, 12, 13, 14]])
    whole = drawn(built, problems, uids)
    np.testing.assert_array_equal(whole.uids, uids)
    for place, problem in enumerate(problems):
        alone = drawn(built, [problem], uids[place:place + 1])
        np.testing.assert_array_equal(alone.completions.tokens[0], whole.completions.tokens[place])
        np.testing.assert_allclose(alone.completions.logprobs[0], whole.completions.logprobs[place], atol=1e-5)
    order, within = [2, 3, 1, 0], [3, 1, 0, 2]
    other = drawn(built, [problems[i] for i in order], uids[order][:, within])
    np.testing.assert_array_equal(other.completions.tokens, whole.completions.tokens[order][:, within])
    np.testing.assert_array_equal(other.completions.mask, whole.completions.mask[order][:, within])
    mixed = drawn(built, [1, 5, 0], [[20, 21, 22, 23], [24, 7, 25, 10], [3, 26, 27, 28]])
    np.testing.assert_array_equal(mixed.completions.tokens[1, [1, 3]], whole.completions.tokens[0, [0, 3]])
    np.testing.assert_array_equal(mixed.completions.tokens[2, 0], whole.completions.tokens[1, 3])
    # of the same problem but with other numbers, or of another stream, they do differ
    assert (mixed.completions.tokens[1, 0] != whole.completions.tokens[0]).any(-1).all()
    assert (drawn(built, problems, uids, seed=4).completions.tokens != whole.completions.tokens).any()


def test_keys_are_told_apart_by_all_bits():
    uids = np.array([0, 1, 2**31, 2**32, 2**32 + 1, 2**33, 2**62, -1])
    data = jax.random.key_data(row_keys(jax.random.key(0), uids))
    assert len(np.unique(data, axis=0)) == len(uids)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), 2)
    np.testing.assert_array_equal(jax.random.key_data(row_keys(jax.random.key(0), [2**32 + 2]))[0], jax.random.key_data(key))


def test_numbers_are_handed_out_in_order():
    uids = Uids(5)
    assert uids.take(2, 3).tolist() == [[5, 6, 7], [8, 9, 10]] and uids.take(1, 2).tolist() == [[11, 12]] and uids.next == 13
    assert uids.take(0, 4).shape == (0, 4) and uids.next == 13


def watch(monkeypatch):
    """The `(key, uids)` of every batch that is sampled from now on."""
    asked, sample = [], rollout.sample

    def watched(generate, rows, key, uids, **others):
        asked.append((tuple(np.asarray(jax.random.key_data(key)).tolist()), np.array(uids)))
        return sample(generate, rows, key, uids, **others)

    monkeypatch.setattr(rollout, "sample", watched)
    return asked


def saved_next(workdir, step):
    return json.loads((workdir / "checkpoints" / str(step) / "host" / "metadata").read_text())["host"]["next_uid"]


def test_a_resumed_run_goes_on_counting_and_evaluations_count_for_themselves(tmp_path, monkeypatch):
    asked = watch(monkeypatch)
    loop.train(config(steps=4, **{"eval.every": 2, "checkpoint.every": 1}), tmp_path / "straight")
    straight, asked[:] = list(asked), []
    loop.train(config(steps=2, **{"eval.every": 2, "checkpoint.every": 1}), tmp_path / "resumed")
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 4"):
        loop.train(config(steps=4, **{"eval.every": 2, "checkpoint.every": 1}), tmp_path / "resumed", True)
    assert len(asked) == len(straight) == 4 + 3
    for (key, uids), (wanted_key, wanted) in zip(asked, straight):
        assert key == wanted_key
        np.testing.assert_array_equal(uids, wanted)
    by_key = {}
    for key, uids in straight:
        by_key.setdefault(key, []).append(uids.ravel())
    counts = sorted(np.concatenate(found).tolist() for found in by_key.values())
    # three evaluations in one stream, four steps in another
    assert counts == [list(range(4 * G)) * 3, list(range(4 * 4 * G))]
    assert [saved_next(tmp_path / "resumed", step) for step in (3, 4)] == [3 * 4 * G, 4 * 4 * G]


@pytest.mark.parametrize("changes", (
    {"method": "dapo", "rewards": "format(pattern='(?s)[a-z].*')"},  # few groups hold both
    pytest.param({"method": "reinforce_ada", "sampling.max_group": 2 * G, "rewards": "exact"}, marks=pytest.mark.slow),
    pytest.param({"method": "grpo", "budget.utility": "per_rollout", "prior.source": "oracle"}, marks=pytest.mark.slow)))
def test_every_number_is_handed_out_once_however_often_is_sampled(monkeypatch, changes):
    """Rounds that filters, estimators or an oracle ask for: no number twice, none left out, and those kept are recorded."""
    asked = watch(monkeypatch)
    run, params = setup.build(config(**changes))
    state, uids = setup.initial_state(run, params), Uids(100)
    data = loop.batches(run.task.train, run.drawn_prompts, 0)
    sampled, _ = loop.collect(run, state, data, uids, PhaseTimer())
    first = len(asked)
    again, _ = loop.collect(run, state, data, uids, PhaseTimer())
    assert first > 1 and len({key for key, _ in asked}) == 1
    handed = np.concatenate([found.ravel() for _, found in asked])
    np.testing.assert_array_equal(handed, np.arange(100, 100 + handed.size))
    assert uids.next == 100 + handed.size
    for batch, turns in ((sampled, asked[:first]), (again, asked[first:])):
        kept = batch.uids[batch.drawn].tolist()
        assert batch.uids.shape == batch.rewards.shape and (batch.uids[~batch.drawn] == -1).all()
        assert kept and len(set(kept)) == len(kept)
        assert set(kept) <= set(np.concatenate([found.ravel() for _, found in turns]).tolist())
