"""Trajectories in an environment, of a tiny real model: what the forest and its views hold."""
import dataclasses
import itertools

import chatter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import streams

from jaxrl_llm import advantages, objectives
from jaxrl_llm.advantages.turns import of_turns
from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.engines.engine import Node
from jaxrl_llm.environments.runner import TooManyInvalid
from jaxrl_llm.objectives.turns import of_turns as objective_of_turns
from jaxrl_llm.runs.warmup import oracle_demonstrations
from jaxrl_llm.sampling.heldout import sample_held_out
from jaxrl_llm.setup import setup
from jaxrl_llm.tokenizers import conversation


@pytest.fixture(scope="module")
def played():
    run, params = setup.build(chatter.get_config())
    return run, params, run.source.next(run.learner.publish(setup.initial_state(run, params)))


def chain(forest, end):
    nodes = []
    while forest.role[end] != Role.PROMPT:
        nodes.insert(0, end)
        end = forest.parent[end]
    return nodes


def test_turns_and_answers_alternate_and_rewards_add_up(played):
    forest = played[2].forest
    assert len(forest.ends) == 16 and forest.uid[forest.ends].tolist() == list(range(16))
    for end in forest.ends:
        nodes = chain(forest, end)
        assert [int(forest.role[n]) for n in nodes] == [Role.POLICY, Role.ENVIRONMENT] * (len(nodes) // 2) + [Role.POLICY]
        assert forest.rewards[end] == sum(forest.turn_rewards[nodes])
        np.testing.assert_allclose(forest.components[end, 0], forest.rewards[end] / 0.75)
        assert forest.stopped[end] == (len(nodes) == 5) and all(forest.length[n] <= 4 for n in nodes[::2])
        answers = [forest.texts[n] for n in nodes[1::2]]
        good_turns = [any("a" <= c <= "z" for c in forest.texts[n]) for n in nodes[::2]]
        assert answers == ["Good." if good else "No." for good in good_turns[:-1]]


def test_an_environment_reads_a_message_through_its_stop_string(played):
    """A token may hold letters behind it; all tokens stay the policy's."""
    partner = dataclasses.replace(played[0].source.stream.partner, stop_strings=("</answer>", "</a>"))
    tokens, zeros = np.array(list(b"<answer>5</answer>\n\nx"), np.int32), np.zeros(21, np.float32)
    node = Node(0, None, 0, tokens, zeros, zeros, zeros.astype(np.int32), "stop")
    assert partner._said(node) == {"role": "assistant", "content": "<answer>5</answer>"} and len(node.tokens) == 21
    assert played[0].source.stream.partner._said(node)["content"] == "<answer>5</answer>\n\nx"


def test_tokens_are_those_of_the_conversation(played):
    run, _, finished = played
    forest, tokenizer, offset = finished.forest, run.source.stream.tokenizer, finished.forest.offset
    for end in forest.ends[:4]:
        ids = forest.prompt_ids(int(forest.prompt[end])).tolist()
        for node in chain(forest, end):
            own = forest.tokens[offset[node]:][:forest.length[node]].tolist()
            if forest.role[node] == Role.ENVIRONMENT:
                assert own == conversation.extend(tokenizer, ids, [{"role": "user", "content": forest.texts[node]}])
            ids += own


def test_the_view_trains_the_turns_of_the_policy_alone(played):
    rollouts, forest = played[2].rollouts, played[2].forest
    np.testing.assert_array_equal(rollouts.mask, rollouts.role == Role.POLICY)
    assert (rollouts.role == Role.ENVIRONMENT).any() and rollouts.mask.sum() == forest.length[forest.role == Role.POLICY].sum()
    step, turns = rollouts.extras["step"], rollouts.extras["turns"]
    np.testing.assert_array_equal(step, np.where(np.arange(3) < turns[..., None], np.arange(3), -1))
    np.testing.assert_allclose(rollouts.extras["step_rewards"].sum(-1), rollouts.rewards)
    assert (rollouts.extras["obs"][..., 0] == 0).all()  # all of a prompt begin alike
    for p, g in np.ndindex(rollouts.valid.shape):
        own = rollouts.step_ids[p, g][rollouts.mask[p, g]]
        assert (np.diff(own) >= 0).all() and own.max() == turns[p, g] - 1


def test_a_trajectory_depends_on_its_uid_alone(played):
    run, params, finished = played
    stream, forest = run.source.stream, finished.forest
    state = setup.initial_state(run, params)
    alone = stream.partner.plant([forest.problems[2]], [forest.prompt_ids(2).tolist()], 0)
    alone = streams.grow(stream, state.params, alone, np.array([0]), 8, state.key)
    whole = [chain(forest, end) for end in forest.ends if forest.prompt[end] == 2]
    assert [[forest.texts[n] for n in nodes] for nodes in whole] == [
        [alone.texts[n] for n in chain(alone, end)] for end in alone.ends]


def test_the_oracle_is_imitated_in_its_turns_alone(played):
    source = played[0].source
    shown = oracle_demonstrations(source, [source.task.train[i] for i in range(3)])
    text = source.stream.tokenizer.decode(shown.tokens[0, 0], skip_special=False).rstrip("\0")
    assert text == "a<|eos|>\nGood.\nb<|eos|>\nGood.\nc<|eos|>"
    np.testing.assert_array_equal(shown.mask[0, 0], np.isin(shown.tokens[0, 0], [*b"abc", 258]))


def test_strays_are_read_and_not_imitated():
    run, _ = setup.build(chatter.get_config(environment="treasure(size=2, brief=True)", **{
        "sampling.max_tokens": 320, "sampling.turn_tokens": 12, "sampling.max_turns": 8, "prompts.max_tokens": 64}))
    problems = [run.source.task.train[i] for i in range(12)]
    plain, strayed = (run.source.stream.partner.demonstrated(problems, share) for share in (0.0, 0.5))
    assert (plain.components[plain.ends] == 1).all() and not (plain.role == Role.HINT).any()
    hints = (strayed.role == Role.HINT).sum() / ((strayed.role == Role.HINT) | (strayed.role == Role.EXPERT)).sum()
    assert not (strayed.role == Role.POLICY).any()
    assert np.isnan(strayed.logprobs[np.repeat(strayed.role == Role.EXPERT, strayed.length)]).all()
    assert 0.3 < hints < 0.7 and (strayed.components[strayed.ends] == 1).any()
    shown = oracle_demonstrations(run.source, problems, 0.5)
    assert shown.mask.sum() == strayed.length[strayed.role == Role.EXPERT].sum()
    short = dataclasses.replace(run.source.stream.partner, max_tokens=60).demonstrated(problems, 0.5)
    for end in short.ends:  # cut before the turn that is too long, never within one
        assert short.length[chain(short, end)].sum() <= 60 and short.role[end] != Role.ENVIRONMENT


def test_turns_that_the_policy_ended_are_counted():
    run, params = setup.build(chatter.get_config(environment="chatter:letters(facts={'eos': 'count'})"))
    shown = run.source.stream.partner.demonstrated([run.source.task.train[0]])
    assert run.source.view(shown, 0).extras["eos"][0, 0] == 3  # the oracle ends all of its turns
    finished = run.source.next(run.learner.publish(setup.initial_state(run, params)))
    forest, end = finished.forest, run.source.stream.tokenizer.eos_id
    assert end not in forest.tokens[np.repeat(forest.role == Role.POLICY, forest.length)]
    assert not finished.rollouts.extras["eos"].any()  # all were cut


def test_a_baseline_within_other_bounds_than_returns_is_refused():
    """POISE clips its predictions to 0 and 1, and would expect 0 of a trajectory that returns -1."""
    changes = {"environment": "chatter:letters(returns=(-1.0, 1.0))", "method": "poise"}
    with pytest.raises(ValueError, match='from 0 to 1, and .* return -1 to 1; set config.estimator="low=-1, high=1"'):
        setup.build(chatter.get_config(**changes))
    setup.build(chatter.get_config(**changes, estimator="low=-1, high=1"))


def test_openings_are_those_that_the_policy_reads():
    """Also with one trajectory of a problem, which there is no other to compare with."""
    run, params = setup.build(chatter.get_config(environment="chatter:shifting"))
    state, partner = setup.initial_state(run, params), dataclasses.replace(run.source.stream.partner, group=1)
    problems = [run.source.task.train[row] for row in range(3)]
    forest = partner.plant(problems, partner.encode(problems, partner.tokenizer), 0)
    with pytest.raises(ValueError, match="'letters' opens a problem with .*Say .*the policy reads 'Say .*on the problem alone"):
        streams.grow(run.source.stream.apart(group=1, partner=partner), state.params, forest, np.arange(3), 0, state.key)


def test_a_prompt_with_the_date_of_yesterday_is_read(played):
    run, params, finished = played
    stream, state = run.source.stream, setup.initial_state(run, params)
    ids = [[*stream.tokenizer.encode("Yesterday\n"), *finished.forest.prompt_ids(0).tolist()]]
    forest = stream.partner.plant(finished.forest.problems[:1], ids, 0)
    forest = streams.grow(stream, state.params, forest, np.arange(1), 0, state.key)
    assert len(forest.ends) == stream.group


def test_a_batch_without_any_trajectory_is_reported():
    run, params = setup.build(chatter.get_config(environment="chatter:letters(broken=-2)", environment_invalid=1.0))
    with pytest.raises(TooManyInvalid, match="lost all 16 trajectories of a batch ..'letters/error': 16.*KeyError"):
        run.source.next(run.learner.publish(setup.initial_state(run, params)))


@pytest.mark.parametrize(("replayable", "evaluated", "opened"), [(False, [6, 16, 8], [16, 4]), (True, [6, 24], [20])])
def test_servers_have_places_for_a_batch(played, monkeypatch, replayable, evaluated, opened):
    """Held-out problems, and openings, of environments that are not replayable come in parts; what is sampled is the same."""
    run, params, _ = played
    stream, seen = run.source.stream, []
    for runner in (stream.partner.runner, run.source.held_out.partner.runner):
        monkeypatch.setattr(runner, "environment", dataclasses.replace(runner.environment, replayable=replayable))
        monkeypatch.setattr(runner, "reset", lambda problems, reset=runner.reset: seen.append(len(problems)) or reset(problems))
    key, params = jax.random.key(7), setup.initial_state(run, params).params
    forest = sample_held_out(run.source, params, None, 6, key)
    assert seen == evaluated and forest.uid[forest.ends].tolist() == list(range(24))
    assert len(stream.partner.encode(list(run.source.task.train), stream.tokenizer)) == 20 and seen[len(evaluated):] == opened
    whole = stream.partner.plant(forest.problems, [forest.prompt_ids(row).tolist() for row in range(6)], 0)
    del seen[:]
    whole = streams.grow(stream, params, whole, np.arange(6), 0, key, -1)
    assert seen == evaluated[1:]  # whoever asks for the groups
    assert [forest.texts[end] for end in forest.ends] == [whole.texts[end] for end in whole.ends]
    np.testing.assert_array_equal(forest.rewards[forest.ends], whole.rewards[whole.ends])


def test_openings_of_training_and_of_held_out_problems_have_uids_of_their_own(played, monkeypatch):
    source, seen = played[0].source, []
    training = dataclasses.replace(source.stream.partner, opened=itertools.count())
    for partner in (training, training.apart()):
        monkeypatch.setattr(partner.runner, "reset", lambda problems: seen.append({*problems}) or {})
        assert partner.encode([source.task.train[0]] * 2, source.stream.tokenizer) == [None, None]
    assert len(seen) == 2 and not seen[0] & seen[1]


def trajectories():
    """Two of three turns, of the spec of GiGPO: 2, 1 and 1 tokens with an answer of one token between them."""
    steps = np.array([0, 0, 0, 1, 1, 2])
    mask = np.array([1, 1, 0, 1, 0, 1], bool)
    three = np.arange(3)
    extras = {"traj": np.array([[[0] * 3, [1] * 3]]), "step": np.array([[three, three]]),
              "obs": np.array([[[0, 1, 2], [0, 3, 2]]]), "step_rewards": np.array([[[0, 0, 10.0], [0, 0, 0]]], np.float32)}
    return Rollouts(mask=np.broadcast_to(mask, (1, 2, 6)), valid=np.ones((1, 2), bool),
                    rewards=np.array([[10.0, 0]], np.float32), step_ids=np.broadcast_to(steps, (1, 2, 6)), extras=extras)


def test_tokens_get_the_advantage_of_their_turn():
    estimator = of_turns(advantages.make("gigpo"))
    A, _ = estimator.update(jax.tree.map(jnp.asarray, trajectories()), estimator.init())
    np.testing.assert_allclose(A[0], [[9.5125, 9.5125, 0, 5, 0, 10], [-9.5125, -9.5125, 0, -5, 0, -10]], atol=1e-5)


def test_a_trajectory_that_ends_early_has_fewer_turns():
    rollouts = trajectories()
    rollouts.extras["step"][0, 1, 1:] = -1
    rollouts = rollouts.replace(mask=rollouts.mask & (np.arange(6) < np.array([6, 2])[:, None]))
    estimator = of_turns(advantages.make("gigpo"))
    A, _ = estimator.update(jax.tree.map(jnp.asarray, rollouts), estimator.init())
    np.testing.assert_allclose(A[0], [[9.5125, 9.5125, 0, 5, 0, 5], [-9.5125, -9.5125, 0, 0, 0, 0]], atol=1e-5)


def test_tokens_weigh_as_in_turns_of_their_own():
    objective = objective_of_turns(objectives.make("ppo_clip", aggregation="seq_mean_token_mean"))
    result = objective.weights(jax.tree.map(jnp.asarray, trajectories()))
    np.testing.assert_allclose(result["loss"][0, 0], np.array([1, 1, 0, 2, 0, 2]) / 12, rtol=1e-6)
    np.testing.assert_allclose(result["sequence"], [[0.5, 0.5]], rtol=1e-6)
