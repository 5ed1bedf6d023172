"""Agents with a context each: what they read, the rows of their turns, baselines of roles, and the update."""
import chatter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.advantages.turns import of_contexts, of_environment
from jaxrl_llm.data.forest import chains
from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.environments import Environment, Turn, base
from jaxrl_llm.setup import setup
from jaxrl_llm.tasks.base import seeded
from jaxrl_llm.tokenizers import conversation

CONFIG = {"environment": "chatter:cards", "method": "spiral", "sampling.max_turns": 6, "sampling.max_tokens": 96}


@pytest.fixture(scope="module")
def played():
    run, params = setup.build(chatter.get_config(**CONFIG))
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    return run, finished, run.learner.learn(state, finished.rollouts, run.learner.frozen(state.params))


def games_of(forest):
    """For each trajectory in order: its contexts, lists of nodes by agent."""
    node, row = chains(forest, forest.leaves)
    games = {}
    for place, leaf in enumerate(forest.leaves):
        nodes = node[row == place].tolist()
        agent = next(forest.turn_info[n]["agent"] for n in nodes if forest.role[n] in (Role.POLICY, Role.EXPERT))
        games.setdefault(int(forest.uid[leaf]), {})[agent] = nodes
    return games


@pytest.mark.slow
def test_each_agent_reads_its_own_card_and_its_own_words(played):
    run, finished, _ = played
    forest, tokenizer, offset = finished.forest, run.source.stream.tokenizer, finished.forest.offset
    games = games_of(forest)
    assert sorted(games) == list(range(16)) and max(map(len, games.values())) == 2
    for contexts in games.values():
        for agent, nodes in contexts.items():
            row = int(forest.prompt[nodes[0]])
            card = (forest.problems[row].id + agent) % 3
            messages, ids = [{"role": "user", "content": "Cards."}], []
            for number, node in enumerate(nodes):
                own = forest.tokens[offset[node]:][:forest.length[node]].tolist()
                if number % 2 == 0:
                    turn = 2 * (number // 2) + agent
                    text = (f"Yours is {card}." if number == 0 else "") + (" " * (number == 0) + f"Now {turn}." if turn else "")
                    heard = [{"role": "user", "content": text}]
                    expected = (conversation.start(tokenizer, [*messages, *heard]) if not ids
                                else ids + conversation.extend(tokenizer, ids, heard))
                    assert ([*forest.prompt_ids(row).tolist(), *own] if not ids else ids + own) == expected
                    ids = expected
                else:
                    assert forest.role[node] == Role.POLICY and forest.turn_info[node]["agent"] == agent
                    ids = ids + own
            others = [forest.texts[n] for other, theirs in contexts.items() if other != agent for n in theirs[1::2]]
            assert not any(text and text in tokenizer.decode(ids) for text in others if len(text) > 2)
    assert finished.metrics["completion/computed"] <= 1.05, "no context is read again"


def test_a_context_is_a_rollout_whose_agent_gets_its_own_return(played):
    _, finished, _ = played
    forest, extras = finished.forest, finished.rollouts.extras
    assert finished.rollouts.mask.shape[:2] == (4, 8) and finished.rollouts.valid.sum() == len(forest.leaves) > 16
    place = 0
    for p in range(4):
        for g in range(int(finished.rollouts.valid[p].sum())):
            leaf = forest.leaves[place]
            nodes = chains(forest, np.array([leaf]))[0]
            said = nodes[forest.role[nodes] == Role.POLICY]
            agent = forest.turn_info[said[0]]["agent"]
            end = forest.ends[forest.uid[forest.ends] == forest.uid[leaf]][0]
            count = extras["turns"][p, g]
            assert count == len(said) and extras["traj"][p, g] == forest.uid[leaf] - 4 * p and extras["settled"][p, g]
            assert extras["agent"][p, g].tolist() == [agent] * count + [-1] * (6 - count)
            assert extras["step"][p, g].tolist() == [*range(count)] + [-1] * (6 - count)
            paid = forest.turn_info[end]["returns"][agent]
            assert extras["agent_returns"][p, g].tolist() == [paid] * count + [0] * (6 - count)
            place += 1


def test_both_contexts_of_a_game_move_one_baseline(played):
    """A = R - b and b <- 0.95 b + 0.05 R, game by game; the tokens of a context have the advantage of its agent."""
    _, finished, learned = played
    forest, baseline, expected = finished.forest, np.zeros(2), {}
    for uid, contexts in sorted(games_of(forest).items()):
        end = forest.ends[forest.uid[forest.ends] == uid][0]
        paid = np.array(forest.turn_info[end]["returns"], float)
        expected |= {(uid, agent): paid[agent] - baseline[agent] for agent in contexts}
        baseline = 0.95 * baseline + 0.05 * paid
    seen, batch = {}, learned.rollouts
    for p, g in np.argwhere(np.asarray(batch.valid)):
        prompt = int(np.flatnonzero([problem.id == batch.prompt_ids[p] for problem in forest.problems])[0])
        own = np.asarray(learned.advantages)[p, g][np.asarray(batch.mask)[p, g]]
        assert len({*own.tolist()}) == 1
        seen[4 * prompt + int(batch.extras["traj"][p, g]), int(batch.extras["agent"][p, g, 0])] = own[0]
    assert seen.keys() == expected.keys()
    np.testing.assert_allclose([seen[key] for key in expected], [*expected.values()], atol=1e-6)
    np.testing.assert_allclose(np.asarray(learned.state.estimator_state)[0], baseline, atol=1e-6)


def rows(contexts, T=4, K=2):
    """Contexts of one prompt from (traj, agent, return of the agent, turns); turn k has one token, then an answer."""
    R = len(contexts)
    mask, step_ids, step = np.zeros((1, R, T), bool), np.zeros((1, R, T), int), np.full((1, R, K), -1)
    agent, paid = np.full((1, R, K), -1), np.zeros((1, R, K), np.float32)
    for row, (_, mine, value, count) in enumerate(contexts):
        mask[0, row, 1:2 * count + 1:2], step_ids[0, row] = True, np.arange(T) // 2
        step[0, row, :count], agent[0, row, :count], paid[0, row, :count] = range(count), mine, value
    valid = np.array([[count > 0 for *_, count in contexts]])
    extras = {"traj": np.array([[traj for traj, *_ in contexts]]), "agent": agent, "step": step, "agent_returns": paid,
              "functional_group": agent, "game": np.zeros((1, R), int), "settled": valid}
    return jax.tree.map(jnp.asarray, Rollouts(mask=mask, valid=valid, rewards=np.zeros((1, R), np.float32), step_ids=step_ids,
                                             extras=extras))


def test_worked_example_of_roles_in_contexts():
    """R = (1, -1), then (-1, 1), gamma 0.9: as in one conversation, in whatever order the contexts are."""
    estimator = of_contexts(of_environment(advantages.make("spiral_rae", gamma=0.9)), 2)
    games = [(0, 1, -1, 1), (0, 0, 1, 2), (1, 0, -1, 1), (1, 1, 1, 2)]
    values, state = estimator.update(rows(games), estimator.init())
    np.testing.assert_allclose(values[0, :, 1::2], [[-1, 0], [0.9, 1], [-1.05, 0], [0.945, 1.05]], rtol=1e-6)
    np.testing.assert_allclose(state, [[-0.0025, 0.0025]], atol=1e-7)
    alone, after = estimator.update(rows([(0, 0, 1, 1), (1, 1, 1, 2), (1, 0, -1, 1), (0, 0, 0, 0)]), estimator.init())
    np.testing.assert_allclose(alone[0, :, 1::2], [[1, 0], [0.945, 1.05], [-1.05, 0], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(after, state, atol=1e-7)  # the silent agent of the first game got -1
    with pytest.raises(ValueError, match="groups of 3 contexts"):
        estimator.update(rows(games[:3]), estimator.init())


def test_worked_example_of_functional_groups_in_contexts():
    """Agent 0 gets 1 and -1, agent 1 gets 0.5 and 1: the baselines are 0 and 0.75."""
    estimator = of_contexts(of_environment(advantages.make("advevo_baseline")), 2)
    values, _ = estimator.update(rows([(0, 0, 1, 2), (0, 1, 0.5, 1), (1, 1, 1, 2), (1, 0, -1, 1)]), ())
    np.testing.assert_allclose(values[0, :, 1::2], [[1, 1], [-0.25, 0], [0.25, 0.25], [-1, 0]], rtol=1e-6)


def test_games_that_are_cut_have_no_outcome():
    run, params = setup.build(chatter.get_config(**{**CONFIG, "sampling.max_turns": 2}))
    finished = run.source.next(run.learner.publish(setup.initial_state(run, params)))
    forest, extras = finished.forest, finished.rollouts.extras
    ended = {int(uid): bool(done) for uid, done in zip(forest.uid[forest.ends], forest.stopped[forest.ends])}
    assert not all(ended.values())
    assert extras["settled"][finished.rollouts.valid].tolist() == [ended[int(uid)] for uid in forest.uid[forest.leaves]]


def test_the_oracle_is_imitated_by_both_agents():
    run, _ = setup.build(chatter.get_config(**CONFIG))
    forest = run.source.stream.partner.demonstrated([run.source.task.train[i] for i in range(2)])
    said = {agent: [forest.texts[n] for n in nodes[1::2]] for agent, nodes in games_of(forest)[0].items()}
    assert said == {0: ["a"] * 3, 1: ["b"] * 3} and len(forest.leaves) == 4


def test_methods_that_do_not_tell_agents_apart_are_refused():
    for method in ("grpo", "gspo"):
        with pytest.raises(ValueError, match="as often as it has contexts; take one that compares agents: spiral"):
            setup.build(chatter.get_config(**{**CONFIG, "method": method}))
    with pytest.raises(NotImplementedError, match="'gigpo' needs obs"):
        setup.build(chatter.get_config(**{**CONFIG, "method": "gigpo"}))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["advevo_baseline", "dr_mas", "multi_context_grpo"])
def test_other_methods_take_a_step(method):
    run, params = setup.build(chatter.get_config(**{**CONFIG, "method": method}))
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    learned = run.learner.learn(state, finished.rollouts, run.learner.frozen(state.params))
    assert int(learned.state.step) == 1 and bool(np.any(learned.advantages)) == (method != "multi_context_grpo")


@pytest.mark.slow
@pytest.mark.parametrize("package, environment, tokens", [
    ("textarena", "textarena_game(game='KuhnPoker-v0', turns=6)", 2048),
    ("pgx", "pgx_game(game='kuhn_poker', selfplay=True, opening=0)", 512)])
def test_games_with_cards_are_trained_with_baselines_of_roles(package, environment, tokens):
    """An untrained policy makes no legal move, and so the agent that begins loses every game."""
    pytest.importorskip(package)
    run, params = setup.build(chatter.get_config(**{
        **CONFIG, "environment": environment, "sampling.max_tokens": tokens, "prompts.max_tokens": 512, "prompts.per_step": 2}))
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    forest, extras, valid = finished.forest, finished.rollouts.extras, finished.rollouts.valid
    for nodes in (nodes for contexts in games_of(forest).values() for nodes in contexts.values()):
        assert "card is" in forest.texts[nodes[0]] and forest.role[nodes[0]] == Role.ENVIRONMENT
    assert extras["settled"][valid].all() and (extras["agent_returns"][valid][:, 0] == -1).all()
    learned = run.learner.learn(state, finished.rollouts, run.learner.frozen(state.params))
    first = int(extras["agent"][valid][0, 0])
    baseline = np.asarray(learned.state.estimator_state)[0]
    assert learned.metrics["skipped_updates"] == 0 and baseline[first] != 0


FACTS = {"agent": "turn"}


def environment(opening, *turns):
    answers = iter(turns)
    return Environment(name="whisper", task=seeded("whisper", "?", 2, 1), reset=lambda problem, key: (None, opening),
                       step=lambda state, message: next(answers), contexts=2, apart=True, facts=FACTS)


def to(reader, text="psst"):
    return {"role": "user", "content": text, **({} if reader is None else {"reader": reader})}


def test_messages_without_one_reader_are_rubbish():
    common, mine, info = to(None), to(0), {"agent": 0}
    for opening, why in (([common], "the readers"), ([mine], "all messages of the opening have a reader"),
                         ([common, mine, to(1)], "the readers"), ([common, to(2)], "allowed is one agent, 0 to 1")):
        made = environment(opening)
        with pytest.raises(base.Rubbish, match=why):
            base.begin(made, made.task.train[0], 0)
    made = environment([common, mine], Turn([to(1)], info=info), Turn([common], info=info), Turn([mine, to(1)], info=info),
                       Turn([mine], info=info, fresh=True), Turn(done=True, info=info))
    state, _ = base.begin(made, made.task.train[0], 0)
    said = {"role": "assistant", "content": "ok"}
    assert base.advance(made, state, said).messages == [to(1)]
    for why in ("the readers", "the readers", "a reader is enough"):
        with pytest.raises(base.Rubbish, match=why):
            base.advance(made, state, said)
    assert base.advance(made, state, said).done
    for wrong in ({"contexts": 1}, {"facts": {}}):
        with pytest.raises(ValueError, match="with apart=True it has two contexts or more"):
            Environment(**{"name": "x", "task": made.task, "reset": made.reset, "step": made.step, "apart": True, "contexts": 2,
                           "facts": FACTS, **wrong})
