"""Forests written out by hand, and random ones against a walk from each end to its prompt."""
import dataclasses

import numpy as np
import pytest

from jaxrl_llm.data import forest as forests
from jaxrl_llm.data import packing, rollouts
from jaxrl_llm.data.columns import Column
from jaxrl_llm.data.forest import chains, contexts, grow, join, outcomes, paths, plant, select
from jaxrl_llm.data.ladders import buckets, smallest
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.data.shapes import quarters_filled
from jaxrl_llm.tasks.base import Problem

SAME = {"tokens": lambda longest: longest, "prompt_tokens": lambda longest: longest, "version": 7}


def prompts(count, first_id=0, *, answers=True, **options):
    """Prompts of 1, 2, ... tokens."""
    problems = [Problem(f"q{first_id + p}", "12", first_id + p) for p in range(count)]
    return plant(problems, [[100 + p] * (p + 1) for p in range(count)], ("exact", "format"), answers=answers, **options)


def node(forest, parent, ids, uid, *, role=Role.POLICY, reward=0.0, answer=None, stopped=True, text=None, paid=0.0):
    """The forest with one more node; log-probs are minus its tokens over ten, entropies its tokens, versions its uid."""
    ids = np.asarray(ids)
    return grow(forest, [parent], [uid], dict(role=role, length=[len(ids)], stopped=[stopped], rewards=[reward],
                components=[[reward, 1 - reward]], texts=[text or f"text {uid}"], answers=[answer], turn_rewards=[paid],
                turn_info=[{}], tokens=ids, logprobs=-ids / 10, entropies=ids, version=np.full(len(ids), uid)),
                failures={"exact/error": 1})


def conversation(**options):
    """Prompt 0: two turns with a tool's answer between, and a fork of it after that answer; prompt 1: one turn."""
    result = prompts(2, **options)
    result = node(result, 0, [1, 2], uid=0)
    result = node(result, 2, [50, 51, 52], uid=0, role=Role.ENVIRONMENT)
    result = node(result, 3, [3], uid=0, reward=1.0, answer="12")
    result = node(result, 3, [4, 5], uid=1, answer="7", stopped=False)
    return node(result, 1, [6], uid=2, reward=0.25, answer="12")


def test_a_path_holds_all_tokens_after_the_prompt_and_the_mask_has_holes():
    result = rollouts.check(paths(conversation(), group=2, prompts=2, **SAME))
    np.testing.assert_array_equal(result.tokens, [[[1, 2, 50, 51, 52, 3, 0], [1, 2, 50, 51, 52, 4, 5]],
                                                  [[6, 0, 0, 0, 0, 0, 0], [0] * 7]])
    np.testing.assert_array_equal(result.mask[0], np.array([[1, 1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1, 1]], bool))
    np.testing.assert_allclose(result.behavior_logprobs[0, 0], -np.array([1, 2, 50, 51, 52, 3, 0]) / 10, rtol=1e-6)
    np.testing.assert_array_equal(result.role[0, 0], [1, 1, 2, 2, 2, 1, 0])
    assert result.present.sum(-1).tolist() == [[6, 7], [1, 0]] and result.lengths.tolist() == [[3, 4], [1, 0]]
    assert result.policy_version[0, 1].tolist() == [0, 0, 0, 0, 0, 1, 1] and result.policy_version[1, 0, 1:].tolist() == [7] * 6
    assert result.valid.tolist() == [[True, True], [True, False]]
    np.testing.assert_array_equal(result.rewards, [[1, 0], [0.25, 0]])
    np.testing.assert_array_equal(result.reward_components[0], [[1, 0], [0, 1]])
    np.testing.assert_array_equal(result.prompt_tokens, [[100, 0], [101, 101]])
    np.testing.assert_array_equal(result.prompt_mask, [[True, False], [True, True]])
    assert result.extras["truncated"].tolist() == [[False, True], [False, False]]
    assert result.extras["correct"].tolist() == [[True, False], [False, False]]
    assert result.extras["answers"].tolist() == [[0, 1], [0, -1]]
    assert result.prompt_ids.tolist() == [0, 1]


def test_a_row_of_200_tokens_of_the_policy_among_400_of_a_tool_is_not_cut():
    result = node(node(node(prompts(1), 0, [1] * 100, 0), 1, [2] * 400, 0, role=Role.ENVIRONMENT), 2, [3] * 100, 0)
    shapes = SAME | {"tokens": lambda longest: smallest(buckets(1000, 4), longest)}
    view = paths(result, group=1, prompts=1, **shapes)
    assert view.mask.shape == (1, 1, 750) and view.mask.sum() == 200 and view.tokens[0, 0, 500:600].tolist() == [3] * 100
    assert quarters_filled(np.asarray(view.token_mask), 1) == 4  # what lies between is read


def test_without_others_all_that_is_there_is_trained():
    result = node(prompts(1), 0, [1, 2], uid=0)
    view = paths(result, group=1, prompts=1, **SAME)
    assert view.role is None and view.present.sum() == 2 and "completion/present" not in forests.metrics(result)


def packed_of(view):
    return packing.pack(*packing.of_groups(view.prompt_tokens, view.prompt_mask, view.tokens, view.mask), view.mask, [16])


def test_packed_rows_hold_the_tokens_of_the_view():
    """The index has every trained token of a path, and shared turns are computed once."""
    result = conversation()
    view = paths(result, group=2, prompts=2, **SAME)
    packed = packed_of(view)
    assert (packed.index >= 0).tolist() == view.mask.tolist()
    assert packed.rows.tokens.reshape(-1)[packed.index][view.mask].tolist() == view.tokens[view.mask].tolist()
    assert (packed.node >= 0).sum() == len(result.tokens) and packed.index[0, 0, 0] == packed.index[0, 1, 0]


def test_packed_rows_hold_all_contexts_of_a_trajectory():
    result = node(node(prompts(1), 0, [1, 2], uid=4), 0, [3], uid=4, reward=1.0)
    view = contexts(result, group=2, prompts=1, **SAME)
    packed = packed_of(view)
    assert (packed.node >= 0).sum() == 1 + 2 + 1 and packed.rows.tokens.reshape(-1)[packed.index[0, 1, 0]] == 3


def test_what_follows_a_turn_is_that_of_its_trajectory():
    """Two trajectories go on from one turn: the environment answers "room A" in the first, and "room B" in the second."""
    result = node(prompts(1, turns=True), 0, [1], uid=0, text="open")
    for uid, room in enumerate("AB"):
        result = node(result, 1, [5 + uid], uid=uid, role=Role.ENVIRONMENT, text=f"room {room}")
        result = node(result, len(result.uid) - 1, [9], uid=uid, text="look", paid=0.5)
    extras = paths(result, 2, group=2, prompts=1, **SAME).extras
    assert extras["obs"].tolist() == [[[0, 1], [0, 2]]] and extras["act"].tolist() == [[[0, 1], [0, 1]]]
    assert extras["next_obs"].tolist() == [[[0, 1], [2, 1]]]  # rooms A and B; both end with the same reward


def test_contexts_of_one_trajectory_share_its_number():
    """A trajectory whose context was rewritten: a second chain from the prompt with the same uid."""
    result = node(node(prompts(1), 0, [1, 2], uid=4), 0, [3], uid=4, reward=1.0)
    result = node(result, 0, [5], uid=9)
    view = contexts(result, group=3, prompts=1, **SAME)
    assert view.extras["traj"].tolist() == [[0, 0, 1]] and view.mask.sum(-1).tolist() == [[2, 1, 1]]


def test_missing_prompts_are_copies_without_valid_rollouts():
    result = rollouts.check(paths(conversation(), group=4, prompts=3, **SAME))
    assert result.valid.sum(1).tolist() == [2, 1, 0] and result.prompt_mask.any(1).all()
    for name in ("tokens", "prompt_tokens", "prompt_ids", "mask"):
        np.testing.assert_array_equal(getattr(result, name)[2], getattr(result, name)[0])
    assert not result.token_mask[~result.valid].any()
    with pytest.raises(ValueError, match="a prompt has 2 rollouts, more than the group of 1"):
        paths(conversation(), group=1, prompts=2, **SAME)


def test_lengths_come_from_those_who_compile():
    shapes = SAME | {"tokens": lambda longest: 10 if longest == 7 else None, "prompt_tokens": lambda longest: 4 * longest}
    result = paths(conversation(), group=2, prompts=2, **shapes)
    assert result.mask.shape == (2, 2, 10) and result.prompt_mask.shape == (2, 8)


def test_a_reward_that_reads_no_answers():
    silent = conversation(answers=False)
    assert "answers" not in paths(silent, group=2, prompts=2, **SAME).extras
    assert select(silent, np.array([True, False])).answers is None and join([silent, silent]).answers is None


def test_the_first_component_says_what_is_correct_not_the_total():
    result = conversation()
    result = result.with_columns(rewards=np.where(result.rewards > 0, np.float32(0.4), np.float32(0.9)))
    view = paths(result, group=2, prompts=2, **SAME)
    assert view.correct.tolist() == [[True, False], [False, False]]


def test_selecting_and_joining_keep_everything_together():
    both = join([select(conversation(), np.array([False, True])), conversation(), prompts(1, first_id=5, draw=3)])
    assert [p.id for p in both.problems] == [1, 0, 1, 5] and both.draw.tolist() == [0, 0, 0, 3]
    result = paths(select(both, np.array([True, True, True, False])), group=2, prompts=3, **SAME)
    for row, was in ((0, 1), (1, 0), (2, 1)):
        alone = paths(conversation(), group=2, prompts=2, **SAME)
        for name in ("tokens", "mask", "behavior_logprobs", "rewards", "valid"):
            np.testing.assert_array_equal(getattr(result, name)[row], getattr(alone, name)[was])
    assert both.failures == {"exact/error": 10}
    assert both.texts[both.ends].tolist() == ["text 2", "text 0", "text 1", "text 2"]
    nothing = select(both, np.zeros(4, bool))
    assert not nothing.problems and not len(nothing.ends) and not len(nothing.tokens)


def test_facts_of_prompts_are_selected_joined_and_seen():
    one = conversation().with_facts({"expected": np.float32([0.25, 0.5])})
    both = join([one, select(one, np.array([False, True]))])
    np.testing.assert_array_equal(both.facts["expected"], np.float32([0.25, 0.5, 0.5]))
    np.testing.assert_array_equal(paths(both, group=2, prompts=4, **SAME).extras["prior"], np.float32([0.25, 0.5, 0.5, 0.25]))


def test_outcomes():
    rewards, valid = outcomes(conversation(), 3)
    assert rewards.tolist() == [[1, 0, 0], [0.25, 0, 0]] and valid.tolist() == [[True, True, False], [True, False, False]]


def test_metrics_by_hand():
    """Prompts count the same however often they were sampled; only the policy's tokens count as its own."""
    result = forests.metrics(conversation())
    assert result["reward/mean"] == result["reward/exact"] == pytest.approx((0.5 + 0.25) / 2)
    assert result["prompt/length"] == 1.5
    assert result["completion/tokens"] == 6  # each once, though the first turn is part of two trajectories
    assert result["completion/length"] == pytest.approx((3 + 4 + 1) / 3)
    assert result["completion/present"] == pytest.approx((6 + 7 + 1) / 3)
    assert result["completion/truncated"] == pytest.approx(1 / 3)
    assert result["groups/all_equal"] == 0.5 and result["groups/largest"] == 2 and result["reward_failures/exact/error"] == 5


def test_durations_of_calls_are_joined():
    one = grow(prompts(1), [], [], dict(role=Role.POLICY, length=[], stopped=[], rewards=[], components=np.zeros((0, 2)),
               texts=[], answers=[], tokens=[], logprobs=[], entropies=[], version=[]), seconds=[1.0, 4.0])
    both = join([dataclasses.replace(conversation(), seconds=(0.5, 0.5)), one])
    result = forests.metrics(select(both, np.array([True, True, False])))
    assert result["environment/seconds"] == 1.5 and result["environment/slowest"] == 4.0
    assert "environment/seconds" not in forests.metrics(conversation())


def test_equal_answers_get_equal_numbers_within_a_prompt():
    owner, answers = np.array([0, 0, 0, 0, 1, 1, 1]), ["12", "7", "12", None, "7", "5", "7"]
    assert forests.equal_answers(answers, owner).tolist() == [0, 1, 0, -1, 0, 1, 0]


RANKS = Column("ranks", "token", np.int16, (2,), fill=-1, to="extras")
MORE = (RANKS, Column("judged", "node", np.float32, fill=-2, to="extras", shown_as="verdicts"),
        Column("level", "prompt", np.int32, fill=3, to="extras"), Column("note", "node", object, fill=()))


def with_more(forest, parent, ids, uid, **more):
    """The forest with one node whose tokens have the ranks (id, 2 id)."""
    ids = np.asarray(ids)
    return grow(forest, [parent], [uid], dict(
        role=Role.POLICY, length=[len(ids)], stopped=[True], rewards=[0.0], components=[[0, 0]], texts=[""], tokens=ids,
        logprobs=ids, entropies=ids, version=ids, **{"ranks": np.stack([ids, 2 * ids], 1), "judged": [uid / 4], "note": ["n"]}
        | more))


def test_declared_columns_go_wherever_a_forest_goes():
    one = with_more(with_more(prompts(2, answers=False, columns=MORE), 0, [5, 6], uid=1), 1, [7], uid=2)
    two = select(join([one, with_more(one, 0, [8], uid=3)]), np.array([False, True, True, False]))  # their uids: 2; 1, 3
    kept = forests.graft(forests.trim(two, np.array([True, False, True])), forests.trim(one, np.array([True, False])), [0, 0])
    view = paths(kept, group=2, prompts=3, **SAME)
    none = [-1, -1]
    assert view.extras["ranks"].dtype == np.int16 and view.extras["ranks"].tolist() == [
        [[[7, 14], none], [[5, 10], [6, 12]]], [[[8, 16], none], [none, none]], [[[7, 14], none], [[5, 10], [6, 12]]]]
    assert view.extras["verdicts"].tolist() == [[0.5, 0.25], [0.75, -2], [0.5, 0.25]]
    assert view.extras["level"].tolist() == [3, 3, 3]
    assert "note" not in view.extras and kept.columns["note"].tolist() == [(), "n", (), "n", "n"]


def test_columns_that_do_not_fit():
    with pytest.raises(ValueError, match="two columns have the name 'ranks'; give each"):
        prompts(1, columns=(RANKS, RANKS))
    with pytest.raises(ValueError, match="two columns have the name 'entropies' in rollouts"):
        prompts(1, columns=(dataclasses.replace(RANKS, to="field", shown_as="entropies"),))
    with pytest.raises(ValueError, match="column 'note' has objects, which rollouts cannot have"):
        prompts(1, columns=(dataclasses.replace(MORE[-1], to="extras"),))
    whole = prompts(1, answers=False, columns=MORE)
    with pytest.raises(ValueError, match="forest keeps the token column 'ranks', and it is not among those given: answers"):
        node(whole, 0, [1], uid=0)
    with pytest.raises(ValueError, match=r"column 'ranks' has shape \[2, 1\]; give \[2, 2\], an entry for each new token"):
        with_more(whole, 0, [1, 2], 0, ranks=[[1], [2]])
    with pytest.raises(ValueError, match="joined differ in the columns judged, level, note, ranks"):
        join([whole, prompts(1, answers=False)])
    shown = with_more(prompts(1, answers=False, columns=(dataclasses.replace(RANKS, shown_as="correct"),)), 0, [1], 0)
    with pytest.raises(ValueError, match="column 'ranks' has the name of what rollouts have already"):
        paths(shown, group=1, prompts=1, **SAME)


def test_random_forests_equal_a_walk_from_each_end_to_its_prompt():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        result = prompts(int(rng.integers(1, 4)), turns=True)
        for uid in range(int(rng.integers(1, 15))):
            parent = int(rng.integers(0, len(result.uid)))
            role = Role.POLICY if rng.random() < 0.6 else Role.ENVIRONMENT
            result = node(result, parent, rng.integers(1, 99, rng.integers(0, 5)), uid, role=role, reward=float(uid),
                          text=f"text {uid % 4}", paid=float(uid % 2), stopped=uid % 3 > 0)
        keep = rng.random(len(result.problems)) < 0.7
        keep[0] = True
        for forest in (result, select(result, keep), join([result, select(result, keep)])):
            if not len(forest.ends):
                continue
            P = len(forest.problems)
            view = paths(forest, 15, group=20, prompts=P, **SAME)
            seen, next_obs = [0] * P, [{} for _ in range(P)]  # the number of each state
            for end in forest.ends:
                p, ids, trained, at, below = forest.prompt[end], [], [], end, None
                found = view.extras["next_obs"][p, seen[p]]
                turn = count = view.extras["turns"][p, seen[p]]
                while forest.role[at] != Role.PROMPT:
                    if forest.role[at] == Role.POLICY:
                        turn -= 1
                        state = (forest.stopped[at], forest.turn_rewards[at]) if below is None else forest.texts[below]
                        assert next_obs[p].setdefault(state, found[turn]) == found[turn] >= 0
                        assert view.extras["step_rewards"][p, seen[p], turn] == forest.turn_rewards[at]
                    below = at
                    ids = [*forest.tokens[forest.offset[at]:][:forest.length[at]], *ids]
                    trained = [forest.role[at] == Role.POLICY] * forest.length[at] + trained
                    at = forest.parent[at]
                assert view.tokens[p, seen[p], :len(ids)].tolist() == ids and not view.tokens[p, seen[p], len(ids):].any()
                assert view.mask[p, seen[p], :len(ids)].tolist() == trained and not view.mask[p, seen[p], len(ids):].any()
                assert view.rewards[p, seen[p]] == forest.rewards[end] and view.valid[p, seen[p]]
                assert turn == 0 and (found[count:] == -1).all()
                seen[p] += 1
            assert view.valid.sum(1).tolist() == seen
            assert all(len(set(numbers.values())) == len(numbers) for numbers in next_obs)  # other states, other numbers
            nodes, rows = chains(forest, forest.ends)
            assert (np.diff(rows) >= 0).all() and len(nodes) >= len(forest.ends)
