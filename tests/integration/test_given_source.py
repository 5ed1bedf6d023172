"""Given texts as forests and as a source: masks, roles, epochs, positions, shares of processes, refusals."""
import json

import given_texts
import jax
import numpy as np
import pytest
import tiny_config

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.sampling.given import TEXTS, in_turns
from jaxrl_llm.setup import given, setup
from jaxrl_llm.tokenizers import ByteTokenizer

SNAPSHOT = Snapshot(3, None, None, jax.random.key(0))


def source(method="sft", **changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"method": method, "rewards": "", "model.num_layers": 1, "texts.heldout": 5, **changes})
    return setup.opened(config)[0].source


def test_texts_become_rollouts_whose_trained_tokens_are_an_experts():
    r = given_texts.rollouts([(one,) for one in given_texts.TEXTS])
    E, N, P = Role.EXPERT, Role.ENVIRONMENT, Role.PADDING
    assert r.role[:, 0].tolist() == [[E, E, N, N, E, P, P, P, P], [E, E] + [P] * 7, [E] * 8 + [N]]
    assert r.mask.tolist() == (r.role == E).tolist() and r.valid.all()
    assert r.tokens[0, 0].tolist() == [3, 4, 5, 6, 7, 0, 0, 0, 0]
    assert r.prompt_tokens.tolist() == [[1, 2, 0], [1, 0, 0], [3, 1, 4]]
    assert r.prompt_mask.sum(1).tolist() == [2, 1, 3]
    assert r.extras["weight"].tolist() == [[0.5], [2.0], [1.0]]
    assert np.isnan(r.behavior_logprobs[0, 0, :5]).all() and r.behavior_logprobs[1, 0, :2].tolist() == [-0.5, -0.25]


def test_of_a_pair_the_first_text_is_the_chosen_one():
    forest, r = given_texts.forest(given_texts.PAIRS, first_uid=7), given_texts.rollouts(given_texts.PAIRS)
    assert r.extras["chosen"].tolist() == [[True, False]] * 2 and r.rewards.tolist() == [[1, 0]] * 2
    assert r.extras["correct"].tolist() == [[True, False]] * 2
    assert r.mask.sum(2).tolist() == [[2, 3], [1, 2]] and sorted({*forest.uid[len(forest.problems):].tolist()}) == [7, 8, 9, 10]
    assert forest.texts[forest.ends].tolist() == ["7 8", "7 9 4", "3", "6"]


def test_every_epoch_has_each_text_once_in_a_new_order():
    one = source()
    count = one.data.get_state()["problems"]
    epochs = np.array([p.id for _ in range(count // 2) for p in one.next(SNAPSHOT).forest.problems]).reshape(2, count)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(count)) and epochs[0].tolist() != epochs[1].tolist()
    assert one.next(SNAPSHOT).metrics["texts/epoch"] == 2 + 4 / count and one.position()["next_uid"] == 2 * count + 4


def test_a_position_continues_the_order_and_belongs_to_its_texts():
    first, again = source(), source()
    first.next(SNAPSHOT)
    again.set_position(first.position())
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, again.next(SNAPSHOT).rollouts, first.next(SNAPSHOT).rollouts)
    with pytest.raises(ValueError, match="restore with the same data"):
        source("dpo").set_position(first.position())


def test_texts_of_the_task_are_its_solutions_and_pairs_reject_that_of_another_problem():
    one = source("dpo")
    batch = one.next(SNAPSHOT)
    decode = one.stream.tokenizer.decode
    for problem in batch.forest.problems:
        chosen, rejected = problem.extra[TEXTS]
        a, b, c = (decode(x.tolist()) for x in (chosen.ids[:chosen.prompt], chosen.ids[chosen.prompt:], rejected.ids))
        assert eval(a.rstrip("=")) == int(b) and c.startswith(a) and c != a + b
    assert batch.rollouts.valid.shape == (4, 2) and (batch.rollouts.policy_version == 3).all()
    held = one.held_out_texts(0)
    assert [x.valid.any(1).sum() for x in held] == [4, 1]
    assert one.stream._engine is None  # nothing samples


def test_parts_of_processes_join_in_the_order_of_one_process():
    assert in_turns([[0, 3, 6], [1, 4, 7], [2, 5, 8]]) == list(range(9))


def test_a_packed_row_holds_many_short_texts_or_one_that_is_long():
    assert given.row_of(100, 64, 1) == 1024 and given.row_of(3000, 4, 1) == 3000 and given.row_of(16, 4, 1) == 64
    assert given.row_of(3001, 4, 8) == 3008
    one = source()
    assert one.ladders.rows == (one.row,) and source(**{"texts.pack": False}).ladders.rows == ()


def test_texts_that_do_not_fit_are_left_out_and_counted():
    kept, out = given.fits([(one,) for one in given_texts.TEXTS], 7)
    assert [group[0] for group in kept] == [given_texts.TURNS, given_texts.SHORT] and dict(out) == {"too long": 1}
    with pytest.raises(ValueError, match="solutions of the problems of config.task .*raise texts.max_tokens"):
        source(**{"texts.max_tokens": 2})


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"texts.path": str(path), "texts.options": "chat=False", "texts.heldout": 2, "prompts.per_step": 3}


def test_a_file_of_responses_is_learned_from_but_for_those_held_out(tmp_path):
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1), "weight": 1 + n} for n in range(8)]
    one = source(**written(tmp_path / "texts.jsonl", *rows, {"prompt": "0", "response": "x" * 99}), **{"texts.max_tokens": 20})
    assert one.left_out == {"too long": 1} and len(one.heldout) == 2 and one.data.get_state()["problems"] == 6
    batches = [one.next(SNAPSHOT).rollouts for _ in range(2)]
    seen = sorted(float(x) for batch in batches for x in batch.extras["weight"][:, 0])
    held = [float(x) for x in one.held_out_texts(0)[0].extras["weight"][:2, 0]]
    assert sorted([*seen, *held]) == [1, 2, 3, 4, 5, 6, 7, 8] and held == [1, 5]
    assert batches[0].mask.sum(2).tolist() == [[2]] * 3  # a digit and the end token


@pytest.mark.parametrize("rows, held", [(1, 0), (2, 1), (9, 4)])
def test_at_least_half_of_a_small_file_is_learned(tmp_path, rows, held):
    texts = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(rows)]
    one = source(**written(tmp_path / "texts.jsonl", *texts) | {"texts.heldout": 64})
    assert (len(one.heldout), one.data.get_state()["problems"]) == (held, rows - held)


def test_turns_of_a_conversation_are_held_out_together(tmp_path):
    """The template drops earlier thoughts, so that each turn is an example behind those before it."""
    template = ("{% for m in messages %}{{ m.role[0] + (m.content if loop.last else m.content.split(';')[-1]) }}{% endfor %}"
                "{% if add_generation_prompt %}a{% endif %}")
    turns = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "hm;3"}] * 2
    config = tiny_config.get_config()
    config.update_from_flattened_dict(written(tmp_path / "texts.jsonl", *[{"messages": turns}] * 4) | {"texts.options": ""})
    train, held, _ = given.groups_of(config, ByteTokenizer(template), None, False)
    places = [[group[0].place.rpartition(" ")[2] for group in side] for side in (train, held)]
    assert places == [["2", "2", "4", "4"], ["1", "1", "3", "3"]]


def test_texts_and_pairs_are_told_apart(tmp_path):
    changes = written(tmp_path / "pairs.jsonl", *[{"prompt": "a", "chosen": "b" * n, "rejected": "c"} for n in range(1, 8)])
    assert source("dpo", **changes).next(SNAPSHOT).rollouts.extras["chosen"].tolist() == [[True, False]] * 3
    with pytest.raises(ValueError, match="has pairs, and method 'sft' learns from texts"):
        source(**changes)


def test_pairs_that_teach_nothing_are_refused():
    with pytest.raises(ValueError, match="are equal"):
        given.check_pair((given_texts.SHORT, given_texts.SHORT))
    with pytest.raises(ValueError, match="different prompts"):
        given.check_pair((given_texts.SHORT, given_texts.LONG))


@pytest.mark.parametrize("changes, said", [
    ({"replay": "recent_groups"}, "is a replay"), ({"filters": "dynamic_sampling"}, "draws further prompts"),
    ({"schedule": "pipelined(lag=1)"}, "schedule='sync'"), ({"texts.heldout": -1}, "give 0 or more"),
    ({"texts.options": "turn='last'"}, "turns"), ({"texts.options": "chat=false"}, "chat='false'; give True or False")])
def test_parts_of_sampling_are_refused(changes, said):
    with pytest.raises((ValueError, NotImplementedError), match=said):
        source(**changes)
