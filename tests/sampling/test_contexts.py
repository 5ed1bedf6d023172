"""Trajectories whose context begins anew: the forest, its views, and the update."""
import chatter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import streams

from jaxrl_llm import advantages, methods
from jaxrl_llm.data.forest import contexts, grow, metrics, plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.runs.warmup import oracle_demonstrations
from jaxrl_llm.setup import setup
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tokenizers import conversation

CONFIG = {"environment": "chatter:forgetful", "method": "multi_context_grpo", "sampling.max_turns": 6,
          "sampling.max_tokens": 24}


@pytest.fixture(scope="module")
def played():
    run, params = setup.build(chatter.get_config(**CONFIG))
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    learned = run.learner.learn(state, finished.rollouts, run.learner.frozen(state.params))
    return run, finished, learned


def chain(forest, end):
    nodes = []
    while forest.role[end] != Role.PROMPT:
        nodes.insert(0, end)
        end = forest.parent[end]
    return nodes


def test_every_context_begins_with_the_opening_and_what_was_kept(played):
    run, finished, _ = played
    forest, tokenizer, offset = finished.forest, run.source.stream.tokenizer, finished.forest.offset
    kept = {}
    for leaf in forest.leaves:
        nodes, uid, row = chain(forest, leaf), int(forest.uid[leaf]), int(forest.prompt[leaf])
        assert [int(forest.role[n]) for n in nodes] == ([Role.ENVIRONMENT, Role.POLICY] * 2)[:len(nodes)]
        messages = [{"role": "user", "content": f"Say {forest.problems[row].id % 3}."}]
        if uid in kept:
            messages.append({"role": "user", "content": f"You kept {kept[uid]}."})
        read = [*forest.prompt_ids(row), *forest.tokens[offset[nodes[0]]:][:forest.length[nodes[0]]]]
        assert [*map(int, read)] == conversation.start(tokenizer, messages)
        kept[uid] = len(kept.get(uid, "")) * "x" + "x"
    assert forest.uid[forest.ends].tolist() == list(range(16)) and len(forest.leaves) > 16
    first = {int(forest.uid[leaf]): forest.texts[chain(forest, leaf)[1]] for leaf in forest.leaves[::-1]}
    later = [(first[int(forest.uid[leaf])], forest.texts[chain(forest, leaf)[1]]) for leaf in forest.leaves]
    assert np.mean([a == b for a, b in later]) < 0.7  # each context draws random numbers of its own


def test_a_context_is_a_rollout_with_the_reward_of_its_trajectory(played):
    _, finished, _ = played
    forest, rollouts = finished.forest, finished.rollouts
    assert rollouts.mask.shape[:2] == (4, 12) and rollouts.valid.sum() == len(forest.leaves)
    np.testing.assert_array_equal(rollouts.mask & rollouts.valid[..., None],
                                  (rollouts.role == Role.POLICY) & rollouts.valid[..., None])
    total = {int(forest.uid[end]): forest.rewards[end] for end in forest.ends}
    uid, traj = forest.uid[forest.leaves], rollouts.extras["traj"]
    place = 0
    for p in range(4):
        for g in range(int(rollouts.valid[p].sum())):
            assert traj[p, g] == uid[place] - 4 * p and rollouts.rewards[p, g] == total[int(uid[place])]
            place += 1
    assert finished.metrics["reward/mean"] == pytest.approx(np.mean([*total.values()]))
    written = forest.length[forest.role == Role.POLICY].sum()
    assert metrics(forest)["completion/length"] == pytest.approx(written / 16)
    assert finished.metrics["environment/turns"] == pytest.approx((forest.role == Role.POLICY).sum() / 16)


def test_all_contexts_of_a_trajectory_have_its_advantage(played):
    _, finished, learned = played
    forest = finished.forest
    total = np.array([forest.rewards[end] for end in forest.ends]).reshape(4, 4)
    z = (total - total.mean(1, keepdims=True)) / (total.std(1, ddof=1, keepdims=True) + 1e-6)
    z = np.where(total.std(1, keepdims=True) > 0, z, 0)
    batch, result = learned.rollouts, np.asarray(learned.advantages)
    seen = 0
    for p, g in np.argwhere(np.asarray(batch.valid)):
        prompt = int(np.flatnonzero([problem.id == batch.prompt_ids[p] for problem in forest.problems])[0])
        tokens = np.asarray(batch.mask)[p, g]
        np.testing.assert_allclose(result[p, g][tokens], z[prompt, batch.extras["traj"][p, g]], rtol=1e-4, atol=1e-5)
        seen += 1
    assert seen == len(forest.leaves) and learned.metrics["skipped_updates"] == 0
    assert learned.metrics["max/mismatch"] < 1e-4 and abs(learned.metrics["max/ratio"] - 1) < 1e-4


@pytest.mark.slow
def test_packed_rows_learn_the_same_from_contexts(played):
    _, finished, learned = played
    run, params = setup.build(chatter.get_config(**CONFIG, **{"learner.packed_rows": 2}))
    state = setup.initial_state(run, params)
    packed = run.learner.learn(state, finished.rollouts, run.learner.frozen(state.params))
    for name in ("loss", "grad_norm", "kl", "entropy"):
        assert packed.metrics[name] == pytest.approx(learned.metrics[name], rel=1e-4, abs=1e-6)
    for one, other in zip(jax.tree.leaves(packed.state.params), jax.tree.leaves(learned.state.params), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_trajectory_depends_on_its_uid_alone(played):
    run, finished, _ = played
    stream, forest = run.source.stream, finished.forest
    state = setup.initial_state(run, run.learner.policy.model.init(jax.random.key(run.config.seed)))
    alone = stream.partner.plant([forest.problems[2]], [forest.prompt_ids(2).tolist()], 0)
    alone = streams.grow(stream, state.params, alone, np.array([0]), 8, state.key)
    assert [forest.texts[leaf] for leaf in forest.leaves if forest.prompt[leaf] == 2] == alone.texts[alone.leaves].tolist()


def test_a_memory_that_fills_the_context_ends_the_trajectory():
    run, params = setup.build(chatter.get_config(**{**CONFIG, "sampling.max_tokens": 16}))
    finished = run.source.next(run.learner.publish(setup.initial_state(run, params)))
    forest = finished.forest
    assert finished.rollouts.mask.shape[-1] <= 16 and len(forest.ends) == 16
    assert all(forest.role[leaf] == Role.POLICY for leaf in forest.leaves)


def test_the_oracle_is_imitated_in_all_contexts():
    run, _ = setup.build(chatter.get_config(**CONFIG))
    shown = oracle_demonstrations(run.source, [run.source.task.train[i] for i in range(2)])
    decode = run.source.stream.tokenizer.decode
    assert shown.mask.shape[:2] == (2, 3) and shown.valid.all()
    assert ["".join(decode(row[own])) for row, own in zip(shown.tokens[0], shown.mask[0])] == ["aa", "aa", "aa"]


def of_one_prompt(uid, rewards):
    """Contexts of one token each, of the trajectories `uid`."""
    zeros, ones = np.zeros(len(uid)), np.ones(len(uid), int)
    return grow(plant([Problem("?", "", 0)], [[1]], ["success"], answers=False), np.zeros(len(uid), int), np.array(uid),
                dict(role=Role.POLICY, length=ones, stopped=ones > 0, rewards=rewards, components=np.array(rewards)[:, None],
                texts=[""] * len(uid), answers=None, tokens=zeros, logprobs=zeros, entropies=zeros, version=zeros))


def test_worked_example_of_memsearcher():
    """Trajectories with the rewards .8, 0 and .4, of two, one and three conversations."""
    uid = [0, 0, 1, 2, 2, 2]
    forest = of_one_prompt(uid, [0, 0.8, 0, 0, 0, 0.4])
    rollouts = contexts(forest, group=6, prompts=1, version=0, tokens=lambda n: n, prompt_tokens=lambda n: n)
    assert rollouts.extras["traj"].tolist() == [uid] and forest.ends.tolist() == [2, 3, 6]
    values, _ = advantages.make("multi_context_grpo").update(jax.tree.map(jnp.asarray, rollouts), ())
    np.testing.assert_allclose(values[0, :, 0], [1, 1, -1, 0, 0, 0], atol=1e-5)


def test_worked_example_of_markov_rows():
    """Three episodes of 2, 1 and 3 turns, each turn a row; the first one succeeds."""
    rollouts = contexts(of_one_prompt([0, 0, 1, 2, 2, 2], [0, 1, 0, 0, 0, 0]), group=6, prompts=1, version=0,
                        tokens=lambda n: n, prompt_tokens=lambda n: n)
    estimator, _ = methods.build("markov_multi_turn")
    values, _ = estimator.update(jax.tree.map(jnp.asarray, rollouts), ())
    np.testing.assert_allclose(values[0, :, 0], [1.1547, 1.1547, *[-0.57735] * 4], atol=1e-5)


def test_methods_that_would_count_contexts_are_refused():
    with pytest.raises(ValueError, match="count a trajectory as often as it has contexts.*multi_context_grpo"):
        setup.build(chatter.get_config(**{**CONFIG, "method": "grpo"}))
    with pytest.raises(NotImplementedError, match="'gigpo' needs obs"):
        setup.build(chatter.get_config(**{**CONFIG, "method": "gigpo"}))
    with pytest.raises(NotImplementedError, match="needs traj"):
        setup.build(chatter.get_config(**CONFIG, objective="aggregation=trajectory_mean"))
