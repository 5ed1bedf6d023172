"""Uids of trajectories: draws depend only on them, a run uses each once, and a resumed run continues the count."""
import json

import jax
import numpy as np
import pytest
import streams
import tiny_config

from jaxrl_llm.engines import row_keys
from jaxrl_llm.runs import loop
from jaxrl_llm.sampling import stream
from jaxrl_llm.sampling.fitting import fitting_problems
from jaxrl_llm.setup import setup

G = 4


def config(**changes):
    c = tiny_config.get_config()
    c.update_from_flattened_dict({"eval.every": 0, "samples_every": 0, "sampling.group": G, **changes})
    return c


@pytest.fixture(scope="module")
def built():
    return setup.build(config())


def drawn(built, problems, firsts, seed=3):
    """Tokens of each uid, for these problems of the task with G uids each from `firsts` on, as a source samples them."""
    run, params = built
    own, value = run.source.stream, {}
    rows = fitting_problems([run.source.task.train[i] for i in problems], own.tokenizer, own.prompt_tokens, "fail")
    for first in sorted(set(firsts)):
        chosen = np.flatnonzero(np.asarray(firsts) == first)
        forest = streams.grow(own, params, run.source.planted(rows, 0), chosen, first, jax.random.key(seed))
        value |= {int(forest.uid[end]): forest.tokens[forest.offset[end]:][:forest.length[end]].tolist() for end in forest.ends}
    return value


def test_a_trajectory_does_not_change_with_its_company(built):
    """Alone beside filling rows, in another order, among others and beyond 32 bits: the same tokens in float32."""
    beyond = 2**40
    whole = drawn(built, [5, 0, 9, 2], [beyond] * 4)
    assert sorted(whole) == [beyond + i for i in range(4 * G)] and len(set(map(str, whole.values()))) > 2 * G
    for place, problem in enumerate([5, 0, 9, 2]):
        alone = drawn(built, [problem], [beyond + place * G])
        assert alone == {uid: whole[uid] for uid in alone} and len(alone) == G
    apart = drawn(built, [2, 9, 0, 5], [beyond + 3 * G, beyond + 2 * G, beyond + G, beyond])
    assert apart == whole
    # of the same problems but with other numbers, or of another stream, they do differ
    assert list(drawn(built, [5, 0, 9, 2], [7] * 4).values()) != list(whole.values())
    assert drawn(built, [5, 0, 9, 2], [beyond] * 4, seed=4) != whole


def test_keys_differ_in_all_bits_of_a_uid():
    uids = np.array([0, 1, 2**31, 2**32, 2**32 + 1, 2**33, 2**62, -1])
    data = jax.random.key_data(row_keys(jax.random.key(0), uids))
    assert len(np.unique(data, axis=0)) == len(uids)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), 2)
    np.testing.assert_array_equal(jax.random.key_data(row_keys(jax.random.key(0), [2**32 + 2]))[0], jax.random.key_data(key))


def watch(monkeypatch):
    """The `(key, uids)` of all that is submitted to engines at once, from now on."""
    asked, words = [], stream.words_of

    def watched(key, uids):
        asked.append((tuple(np.asarray(jax.random.key_data(key)).tolist()), uids))
        return words(key, uids)

    monkeypatch.setattr(stream, "words_of", watched)
    return asked


def saved_next(workdir, step):
    return json.loads((workdir / "checkpoints" / str(step) / "host" / "metadata").read_text())["host"]["next_uid"]


@pytest.mark.slow
def test_a_resumed_run_continues_its_count_and_evaluations_have_their_own(tmp_path, monkeypatch):
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
    counts = sorted(np.concatenate(value).tolist() for value in by_key.values())
    # three evaluations in one stream, four steps in another
    assert counts == [list(range(4 * G)) * 3, list(range(4 * 4 * G))]
    assert [saved_next(tmp_path / "resumed", step) for step in (3, 4)] == [3 * 4 * G, 4 * 4 * G]


@pytest.mark.parametrize("changes", (
    {"method": "dapo", "rewards": "format(pattern='(?s)[a-z].*')"},  # few groups hold both
    pytest.param({"method": "reinforce_ada", "sampling.max_group": 2 * G, "rewards": "exact"}, marks=pytest.mark.slow),
    pytest.param({"method": "grpo", "budget.utility": "per_rollout", "prior.source": "oracle"}, marks=pytest.mark.slow)))
def test_every_number_is_handed_out_once_however_often_is_sampled(monkeypatch, changes):
    """Rounds for filters, estimators or an oracle: no uid twice, no block left out, and those of kept rollouts are recorded."""
    asked = watch(monkeypatch)
    run, params = setup.build(config(**changes))
    state, source = setup.initial_state(run, params), run.source
    source.next_uid = 100
    sampled = source.next(run.learner.publish(state)).forest
    first = len(asked)
    again = source.next(run.learner.publish(state)).forest
    assert first > 1 and len({key for key, _ in asked}) == 1
    handed = np.concatenate([value.ravel() for _, value in asked])
    if "budget.utility" in changes:  # numbers of rollouts that are no multiple of G leave the rest of a block of G out
        assert (np.diff(handed) >= 1).all() and handed[0] == 100 and handed[-1] < source.next_uid
        assert {*(handed - 100) // G} == {*range((source.next_uid - 100) // G)} and (source.next_uid - 100) % G == 0
    else:
        np.testing.assert_array_equal(handed, np.arange(100, 100 + handed.size))
        assert source.next_uid == 100 + handed.size
    for forest, turns in ((sampled, asked[:first]), (again, asked[first:])):
        kept = forest.uid[forest.ends].tolist()
        assert kept and len(set(kept)) == len(kept)
        assert set(kept) <= set(np.concatenate([value.ravel() for _, value in turns]).tolist())
