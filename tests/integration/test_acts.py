"""Acts through real streams: exact numbers of rollouts, beginnings in any role, trajectories that are stopped, memory."""
import dataclasses
import json

import chatter
import jax
import numpy as np
import pytest
import tiny_config

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.sampling import stages
from jaxrl_llm.sampling.position import jsonable
from jaxrl_llm.setup import setup, sources
from jaxrl_llm.setup.judge import make_judge
from jaxrl_llm.tools.registry import Kind
from jaxrl_llm.tools.timer import PhaseTimer
from jaxrl_llm.topologies import TOPOLOGIES, Begin, BeginPart, Plan, Stop, Topology, groups
from jaxrl_llm.topologies.base import everyone

G, KEY = 4, jax.random.key(0)


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"model.num_layers": 1, **changes})
    return config


def begun(config, acts, problems=2):
    """`(stream, forest of prompts)` of a run in which these acts are applied, with uids from 100 on."""
    run, params = setup.build(config)
    stream, some = run.source.stream, [run.source.task.train[i] for i in range(problems)]
    stream.publish(Snapshot(3, params, None, KEY))
    forest = run.source.planted(list(zip(some, stream.partner.encode(some, stream.tokenizer))), 0)
    stream.apply(forest, acts, 100)
    return stream, forest


def grown(stream, forest):
    while stream.advance():
        pass
    return stream.take(forest)


def nodes_of(forest, uid):
    """`(role, tokens, text)` of the nodes of a trajectory."""
    return [(Role(int(forest.role[i])), forest.tokens[forest.offset[i]:][:forest.length[i]].tolist(), forest.texts[i])
            for i in np.flatnonzero(forest.uid == uid) if forest.role[i] != Role.PROMPT]


def counted(counts):
    """As many rollouts of each prompt as its count."""
    def plan(forest):
        if not forest.problems:
            return Plan(draw=len(counts))
        return Plan() if len(forest.ends) else Plan(acts=groups(range(len(counts)), np.array(counts)))

    return Topology(plan, everyone, most=max(counts))


def test_numbers_of_rollouts_are_exact_in_both_engines():
    """5, 1, 3 and 4 rollouts with groups of four: the same ones in both engines, in rows of an update, whatever is padded."""
    sampled = []
    for engine in ("scan", "slots"):
        run, params = setup.build(tiny(**{"sampling.engine": engine}))
        source = dataclasses.replace(run.source, topology=counted([5, 1, 3, 4]))
        sampled.append(source.next(Snapshot(0, params, None, KEY)))
    one, other = (batch.forest for batch in sampled)
    assert one.uid[one.ends].tolist() == [*range(5), 8, *range(12, 15), *range(16, 20)] and source.next_uid == 20
    for name in ("uid", "tokens", "length", "stopped", "rewards"):
        np.testing.assert_array_equal(one.columns[name], other.columns[name], err_msg=name)
    rollouts = sampled[0].rollouts
    assert rollouts.valid.shape == (4, 5) and rollouts.valid.sum(1).tolist() == [5, 1, 3, 4]
    assert not rollouts.mask[~rollouts.valid].any()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "engine", "changes", "wanted"), [
    ("mc_grpo", "scan", {}, [5] * 4), ("mc_grpo_std", "slots", {"sampling.group": 3}, [4] * 4),
    ("dars", "slots", {"sampling.max_group": 9}, None), ("dars_hardness", "scan", {"sampling.max_group": 7}, None),
    ("gvm_raft", "scan", {"sampling.max_group": 9, "allocation": "pilot=3"}, None),
    ("v0", "slots", {"sampling.max_group": 9}, None),
    ("knapsack_rl", "scan", {"sampling.max_group": 11, "budget.prompts": 3}, None)])
def test_rows_sample_and_learn_exact_numbers(method, engine, changes, wanted):
    """Two steps: totals of budgets are kept, updates have rows of a group, and medians are not trained on."""
    run, params = setup.build(tiny(**{"method": method, "sampling.engine": engine, **changes}))
    state, group, most = setup.initial_state(run, params), run.config.sampling.group, run.config.sampling.max_group
    for _ in range(2):
        finished = run.source.next(run.learner.publish(state))
        tried = finished.counts["tried"]
        counts = np.sort(tried[tried > 0])
        assert wanted is None or counts.tolist() == wanted
        if method in ("v0", "knapsack_rl"):
            assert counts.sum() == 4 * group and counts.min() >= 2 and counts.max() <= most
        if method == "gvm_raft":
            assert counts.sum() == 2 * 4 * 3 and counts.min() >= 3
        learned = run.learner.learn(state, finished.rollouts, facts=finished.facts)
        state = learned.state
        if finished.rollouts is not None:
            assert learned.rollouts.valid.shape[1] == group and np.isfinite([*learned.metrics.values()]).all()
            trained = int(finished.rollouts.valid.sum()) - 4 * method.startswith("mc_grpo")
            assert learned.metrics["trained/rollouts"] == trained == int(np.asarray(learned.rollouts.valid).sum())


PARTS = (BeginPart(Role.POLICY, [50, 51], [-1.5, -2.5]), BeginPart(Role.HINT, "7", by="a teacher"))


@pytest.mark.parametrize("engine", ("scan", "slots"))
def test_a_rollout_goes_on_behind_parts_of_any_role(engine):
    """Two tokens that were drawn before, with their log-probs, then a hint, which is read and not trained on."""
    config, policy, source, params = setup.build_policy(tiny(**{"sampling.engine": engine}))
    source = sources.make_plain_source(config, policy, policy.mesh, source.stream.tokenizer, make_judge(config))
    stream, problem = source.stream, source.task.train[0]
    forest = source.planted([(problem, stream.partner.encode([problem], stream.tokenizer)[0])], 0)
    stream.publish(Snapshot(3, params, None, KEY))
    whole = stream.run(forest, [Begin(0, 1, PARTS), Begin(0, 2, limit=3)], 0)
    found = nodes_of(whole, 0)
    assert [role for role, *_ in found] == [Role.POLICY, Role.HINT, Role.POLICY]
    assert [ids for _, ids, _ in found[:2]] == [[50, 51], [55]] and found[2][2].startswith("237")
    assert whole.writer[whole.uid == 0].tolist() == ["", "a teacher", ""] and not any(whole.writer[whole.uid > 0])
    rollouts = source.view(whole, 3)
    assert rollouts.mask[0, 0, :4].tolist() == [True, True, False, True] and rollouts.valid[0].tolist() == [True] * 3 + [False]
    np.testing.assert_allclose(rollouts.behavior_logprobs[0, 0, :2], [-1.5, -2.5])
    assert rollouts.mask[0, 1:].sum(-1).max() <= 3


def test_log_probs_of_a_part_may_be_an_array():
    part = BeginPart(Role.POLICY, np.array([50, 51]), np.array([-1.5, -2.5]))
    stream, forest = begun(tiny(method="luffy"), [Begin(0, 1, (part,))])
    whole = grown(stream, forest)
    assert whole.logprobs[whole.offset[whole.ends[0]]:][:2].tolist() == [-1.5, -2.5]


@pytest.mark.parametrize(("change", "said"), [
    ({"at": 2}, "^prompt 2 is to be sampled, and the forest has 2;"),
    ({"parts": (BeginPart(Role.POLICY, [50, 51], [-1.5]),)}, "begins with 2 tokens of POLICY, and there are log-probs for 1;"),
    ({"parts": (BeginPart(Role.HINT, [999]),)}, "uid 108 was given a token outside the vocabulary"),
    ({"sampling": {"temprature": 0}}, "Did you mean 'temperature'"),
    ({"sampling": {"temperature": -1}}, "temperature=-1.0: must be >= 0")])
def test_nothing_begins_with_an_act_that_cannot_be(change, said):
    stream, forest = begun(tiny(), [Begin(0, 3)])
    with pytest.raises(ValueError, match=said):
        stream.apply(forest, [Stop(100), Begin(0, 1), Begin(**{"at": 1, **change})], 103)
    assert grown(stream, forest).uid[2:].tolist() == [100, 101, 102]


def test_an_act_says_all_that_is_wrong_with_it():
    said = (r"^Begin at prompt -1: at=-1; give a whole number, 0 or more. count=2.5; give a whole number, 0 or more. "
            r"limit=0; give a whole number, 1 or more. a part has the role <Role.PROMPT: 5>; give POLICY, ENVIRONMENT, HINT")
    with pytest.raises(ValueError, match=said):
        Begin(-1, 2.5, (BeginPart(Role.PROMPT, "a"),), limit=0)


def test_an_environment_hears_parts_as_the_beginning_of_a_message():
    parts = BeginPart(Role.HINT, "a"), BeginPart(Role.EXPERT, "bc", by="one")
    stream, forest = begun(chatter.get_config(method="luffy"), [Begin(0, 1, parts)])
    whole = grown(stream, forest)
    (first, ids, _), (second, said, _), (role, _, text), *_ = nodes_of(whole, 100)
    assert (first, ids, second, said) == (Role.HINT, [97], Role.EXPERT, [98, 99])
    assert role == Role.POLICY and text.startswith("abc") and whole.turn_rewards.any()
    assert whole.writer[whole.uid == 100][:4].tolist() == ["", "one", "", ""]


def test_a_turn_ends_at_a_stop_string_of_what_it_begins_with():
    config = chatter.get_config(**{"sampling.stop_strings": ("b.",)})
    stream, forest = begun(config, [Begin(0, 1, (BeginPart(Role.EXPERT, "ab.c"),))])
    (role, ids, text), *_ = nodes_of(grown(stream, forest), 100)
    assert (role, ids, text) == (Role.EXPERT, [97, 98, 46], "ab.")


def test_an_agent_whose_first_turn_nobody_draws_speaks_again():
    """The engine has never seen its context when the other agent has answered."""
    config = chatter.get_config(**{"environment": "chatter:cards", "method": "spiral", "model.num_layers": 1, "seed": 3,
                                   "sampling.max_turns": 6, "sampling.max_tokens": 96, "sampling.turn_tokens": 1})
    stream, forest = begun(config, [Begin(0, 4, (BeginPart(Role.EXPERT, [97]),))])
    whole = grown(stream, forest)
    turns = [[role for role, *_ in nodes_of(whole, uid) if role != Role.ENVIRONMENT] for uid in range(100, 104)]
    assert all(roles[0] == Role.EXPERT and {*roles[1:]} <= {Role.POLICY} for roles in turns) and max(map(len, turns)) > 2


def test_a_distribution_of_its_own():
    """At temperature 0 all rollouts of a prompt are equal, in the engine and beside others that are drawn."""
    stream, forest = begun(tiny(), [Begin(0, 3, sampling={"temperature": 0}), Begin(1, 4)])
    whole = grown(stream, forest)
    texts = [whole.texts[whole.ends][whole.prompt[whole.ends] == row].tolist() for row in range(2)]
    assert len(texts[0]) == 3 and len({*texts[0]}) == 1 and len({*texts[1]}) > 1


@pytest.mark.parametrize(("numbers", "changes"), ((("top_k", "top_p", "min_p"), {}), ((), {"sampling.top_k": 200})))
def test_numbers_that_a_topology_declares_are_compiled_once(numbers, changes, monkeypatch):
    """One prompt is greedy by top_k=1, the other is as without these numbers, in batch after batch of one program."""
    monkeypatch.setitem(TOPOLOGIES, "narrow", Kind(lambda prompts: counted([3, 4])._replace(numbers=numbers)))
    under = {"top_k": 1, **{name: 0.5 for name in numbers[1:]}}
    plain = grown(*begun(tiny(**{"sampling.engine": "scan"}, **changes), [Begin(1, 4)]))
    stream, forest = begun(tiny(**{"sampling.engine": "scan", "topology": "narrow"}, **changes), [Begin(0, 3, sampling=under)])
    first = grown(stream, forest)
    assert len({*first.texts[first.ends].tolist()}) == 1
    stream.apply(forest, [Begin(1, 4)], 100)
    other = grown(stream, forest)
    assert other.texts[other.ends].tolist() == plain.texts[plain.ends].tolist()


def test_numbers_that_no_topology_declares_are_refused_where_a_program_lacks_them():
    said = (r"trajectory 100 has top_k=3, and engine 'scan' is compiled without; write Topology\(..., numbers=\('top_k',\)\), "
            "or set sampling.engine='slots'")
    with pytest.raises(ValueError, match=said):
        begun(tiny(**{"sampling.engine": "scan"}), [Begin(0, 3, sampling={"top_k": 3})])
    first = grown(*begun(tiny(**{"sampling.engine": "slots"}), [Begin(0, 3, sampling={"top_k": 1}), Begin(1, 4)]))
    assert len({*first.texts[first.ends][:3].tolist()}) == 1


# --- Stop ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", (40, 120))
def test_trajectories_stop_with_what_is_there_or_without_a_trace(most):
    """One that waits, one that is sampled, kept and dropped; the others are as if nothing had been stopped.

    The shorter ones end in the chunk that the engine computes as they are stopped.
    """
    config = tiny(**{"sampling.engine": "slots", "sampling.max_tokens": most, "rewards": "exact"})
    stream, forest = begun(config, groups(range(2), G))
    whole = grown(stream, forest)
    stream, forest = begun(config, groups(range(2), G))
    with pytest.raises(ValueError, match="trajectory 99 does not grow"):
        stream.apply(forest, [Stop(99)], 0)
    stream.apply(forest, [Stop(107)], 0)
    stream._start(PhaseTimer())
    for _ in range(2):
        stream._engine.step()
    stream.apply(forest, [Stop(100), Stop(101, keep=False)], 0)
    cut = grown(stream, forest)
    assert cut.uid[cut.ends].tolist() == [100, *range(102, 107)]
    one, other = (tokens_of(batch, 100) for batch in (cut, whole))
    assert other[:len(one)] == one and 0 < len(one) and (len(one) < len(other)) == (most == 120)
    for uid in range(102, 107):
        assert tokens_of(cut, uid) == tokens_of(whole, uid)
    assert not stream._held and not stream._begun and not stream.partner._going


@pytest.mark.parametrize("config", (tiny(**{"sampling.engine": "slots"}), chatter.get_config()), ids=("task", "environment"))
def test_what_is_planted_alone_leaves_nothing_when_it_stops(config):
    """Two trajectories that begin with a hint and an expert's words are stopped before their first token is drawn."""
    parts = (BeginPart(Role.HINT, "1"), BeginPart(Role.EXPERT, "23"))
    stream, forest = begun(config, [Begin(0, 2, parts), Begin(1, 1)])
    stream._start(PhaseTimer())
    stream.apply(forest, [Stop(100), Stop(101, keep=False)], 0)
    whole = grown(stream, forest)
    assert whole.uid[whole.ends].tolist() == [104] and not stream._held and not stream.partner._going


def test_a_completion_of_a_compiled_batch_leaves_nothing():
    stream, forest = begun(tiny(**{"sampling.engine": "scan", "sampling.micro_batches": 2}), groups(range(4), G), 4)
    stream._start(PhaseTimer())
    stream._engine.step()  # the first half has ended, and the second is sampled
    stream.apply(forest, [Stop(100), Stop(101, keep=False), Stop(112), Stop(113, keep=False)], 0)
    whole = grown(stream, forest)
    assert whole.uid[whole.ends].tolist() == [100, *range(102, 112), 114, 115]


@pytest.mark.slow
@pytest.mark.parametrize("waits", (False, True))
def test_trajectories_of_an_environment_stop(waits):
    """After their first turns: kept ones end with it, with their rewards so far, dropped ones are not counted as lost."""
    config = chatter.get_config(environment=f"chatter:letters(waits={waits})")
    every = grown(*begun(config, groups(range(2), G)))
    stream, forest = begun(config, groups(range(2), G))
    while all(one.turns < 1 for one in stream._going.values()) or not stream._going:
        stream.advance()
    stream.apply(forest, [Stop(100), Stop(101, keep=False)], 0)
    whole = grown(stream, forest)
    assert {*every.uid} - {*whole.uid} == {101} and not stream.partner.runner._running
    np.testing.assert_array_equal(whole.lost, every.lost)
    own = [role for role, *_ in nodes_of(whole, 100)]
    assert Role.POLICY in own and own[-1] == Role.POLICY and not stream.partner._going


def tokens_of(forest, uid):
    return [token for _, ids, _ in nodes_of(forest, uid) for token in ids]


# --- finish and memory ----------------------------------------------------------------------------------------------------


def remembering(prompts):
    """Single groups, of whose rewards the number of the batch is known at its end alone."""
    memory = {"batches": 0}

    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        return Plan() if len(forest.ends) else Plan(acts=groups(range(prompts), G))

    def finish(forest):
        memory["batches"] += 1
        rewards = forest.rewards.copy()
        rewards[forest.ends] = memory["batches"]
        return forest.with_columns(rewards=rewards)

    return Topology(plan, lambda forest: forest.rewards[forest.ends].reshape(prompts, G).mean(1) > 0, finish=finish,
                    memory=memory)


def test_a_topology_finishes_a_batch_once_and_remembers_it():
    """Its memory lies in a checkpoint with the position; replays make a topology of fewer prompts, which goes on with it."""
    run, params = setup.build(tiny(method="dots_rr"))
    mix = next(stage for stage in run.source.stages if stage.name == "mix")
    plain = tuple(stage for stage in run.source.stages if stage is not mix)
    source = dataclasses.replace(run.source, topology=remembering(4), stages=plain)
    for number in (1, 2):
        batch = source.next(Snapshot(number, params, None, KEY))
        assert set(batch.forest.rewards[batch.forest.ends]) == {number} and batch.rollouts.rewards.max() == number
    kept = json.loads(json.dumps(jsonable(source.position())))
    assert kept["topology"] == {"batches": 2}
    other = dataclasses.replace(run.source, topology=remembering(4), stages=plain)
    other.set_position(kept)
    first = other.next(Snapshot(3, params, None, KEY)).forest
    assert set(first.rewards[first.ends]) == {3} and source.position()["topology"] == {"batches": 2}
    fewer = dataclasses.replace(other, stages=(*plain, stages.Stage("fewer", begin=lambda batch, source: batch._replace(
        topology=remembering(2)))))
    second = fewer.next(Snapshot(4, params, None, KEY)).forest
    assert len(second.problems) == 2 and set(second.rewards[second.ends]) == {4} and other.topology.memory == {"batches": 4}
