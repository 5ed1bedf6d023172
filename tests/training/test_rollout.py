"""Stop strings, length buckets, short batches, selecting and joining; completions are written out by hand."""
import numpy as np
import pytest

from jaxrl_llm import rewards, rollouts
from jaxrl_llm.generation import Completions
from jaxrl_llm.rewards import Scores
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.training import rollout
from jaxrl_llm.training.metrics import PhaseTimer
from jaxrl_llm.training.uids import Uids

BYTES, EOS = ByteTokenizer(), 258


def completions(groups, T=8):
    """`Completions` of texts; a text that ends in `$` ends with the stop token, others were cut."""
    P, G = len(groups), len(groups[0])
    tokens, mask, stopped = np.zeros((P, G, T), np.int32), np.zeros((P, G, T), bool), np.zeros((P, G), bool)
    for p, g in np.ndindex(P, G):
        text = groups[p][g]
        stopped[p, g] = text.endswith("$")
        ids = [*text.removesuffix("$").encode(), *([EOS] if stopped[p, g] else [])]
        tokens[p, g, :len(ids)], mask[p, g, :len(ids)] = ids, True
    return Completions(tokens, mask, np.where(mask, -0.5, 0).astype(np.float32), np.where(mask, 1.5, 0).astype(np.float32),
                       stopped, np.int32(T))


def sampled(groups, answers=None, first_id=0, prompts=None, T=8):
    """A batch made by the real `sample` from completions that are known beforehand."""
    answers = answers or ["12"] * len(groups)
    problems = [Problem(f"q{first_id + p}", answers[p], first_id + p) for p in range(len(groups))]
    rows = [(problem, [10 + p, 20]) for p, problem in enumerate(problems)]
    prompts = prompts or len(groups)
    seen = {}

    def generate(tokens, mask, keys):
        seen.update(tokens=tokens, mask=mask, keys=keys)
        return completions(groups + [groups[0]] * (prompts - len(groups)), T)

    found = rollout.sample(generate, rows, _key(), Uids(7).take(len(rows), len(groups[0])), prompt_tokens=4, prompts=prompts,
                           tokenizer=BYTES, reward=rewards.combine(["exact"]), timer=PhaseTimer())
    return found, seen


def _key():
    import jax
    return jax.random.key(0)


def test_texts_leave_the_stop_token_out_and_rewards_follow_rows():
    found, seen = sampled([["12$", "13$"], ["12", " 12 $"]])
    assert found.texts == ["12", "13", "12", " 12 "]
    np.testing.assert_array_equal(found.rewards, [[1, 0], [1, 1]])
    np.testing.assert_array_equal(seen["tokens"], [[10, 20, 0, 0], [11, 20, 0, 0]])
    assert seen["keys"].shape == (2, 2)
    facts = rollout.metrics_of(found)
    assert facts["reward/mean"] == 0.75 and facts["reward/exact"] == 0.75
    assert facts["completion/length"] == (3 + 3 + 2 + 5) / 4 and facts["completion/truncated"] == 0.25
    assert facts["groups/all_equal"] == 0.5


@pytest.mark.parametrize("text, stops, kept, wanted", (
    ("12\n\n3", ("\n\n",), 4, "12"), ("12\n\n3$", ("\n\n",), 4, "12"), ("12\n3$", ("\n\n",), 5, "12\n3"),
    ("a.b;c", (";", "."), 2, "a"), ("a;;b", (";;", ";"), 2, "a"), ("stop", ("stop",), 4, ""), ("é.x", (".",), 3, "é")))
def test_stop_strings_cut_tokens_after_and_text_before(text, stops, kept, wanted):
    cut, texts = rollout.decode(completions([[text]]), BYTES, stops)
    assert texts == [wanted]
    assert cut.mask[0, 0].sum() == kept and cut.mask[0, 0, :kept].all()
    assert bool(cut.stopped[0, 0]) == (text.endswith("$") or any(s in text for s in stops))


def test_a_stop_string_that_no_byte_prefix_decodes_early():
    rows = [np.array([*text.encode()]) for text in ("ab→c", "→", "a→→bcdef")]
    assert rollout.cut_at_stop_strings(rows, BYTES, ["→"]).tolist() == [5, 3, 4]  # all three bytes of the arrow stay
    assert rollout.cut_at_stop_strings([], BYTES, ["→"]).tolist() == []


def test_decoding_leaves_the_given_completions_alone():
    given = completions([["ab;c"]])
    rollout.decode(given, BYTES, (";",))
    assert given.mask.sum() == 4 and not given.stopped.any()


def test_buckets():
    assert rollout.buckets(32) == [8, 16, 24, 32]
    assert rollout.buckets(6) == [2, 3, 5, 6]
    assert rollout.buckets(1) == [1]
    assert [rollout.bucket_of(n, 6) for n in (1, 2, 3, 4, 5, 6)] == [2, 2, 3, 5, 5, 6]
    for limit in range(1, 40):
        assert rollout.buckets(limit)[-1] == limit and rollout.bucket_of(limit, limit) == limit


def test_quarters_of_the_slots_that_are_filled():
    mask = np.arange(8) < np.array([[8, 8], [1, 0], [4, 2], [0, 0]])[..., None]
    assert [rollout.quarters_filled(mask, n) for n in (1, 2, 4)] == [4, 3, 2]  # 16 of 16, 22 of 32, 23 of 64
    assert rollout.quarters_filled(mask[1:2], 1) == rollout.quarters_filled(mask[3:], 1) == 1
    mask[3, 1, 7] = True  # whatever comes before a token that counts is read by it
    assert rollout.quarters_filled(mask[3:], 1) == 2
    random = np.random.default_rng(0)
    for _ in range(20):
        mask = np.arange(12) < random.integers(0, 13, (8, 3, 1))
        part = mask[random.permutation(8)[:4]]
        assert part.sum() <= rollout.quarters_filled(mask, 2) / 4 * part.size


def test_a_short_batch_is_filled_and_the_filling_dropped():
    found, seen = sampled([["12$", "1$"]], prompts=3)
    assert seen["tokens"].shape == (3, 4) and seen["mask"].any(1).all()  # no row without a real token
    np.testing.assert_array_equal(seen["tokens"], [[10, 20, 0, 0]] * 3)
    assert len(found.problems) == 1 and len(found.texts) == 2 and found.completions.tokens.shape == (1, 2, 8)
    assert found.prompts.ids.tolist() == [0]


def test_rollouts_are_trimmed_to_a_bucket_and_missing_prompts_are_invalid():
    found, _ = sampled([["12$", "1"], ["1$", "12$"]])
    batch = rollouts.check(rollout.to_rollouts(found, max_tokens=8, prompts=4, version=3))
    assert batch.mask.shape == (4, 2, 4) == batch.tokens.shape == batch.behavior_logprobs.shape
    assert batch.valid.tolist() == [[True, True], [True, True], [False, False], [False, False]]
    assert (batch.policy_version == 3).all()
    np.testing.assert_array_equal(batch.rewards[:2], [[1, 0], [0, 1]])
    np.testing.assert_array_equal(batch.extras["truncated"][:2], [[False, True], [False, False]])
    assert batch.prompt_mask.any(1).all()  # filled rows are real prompts: attention over nothing is never asked for
    np.testing.assert_array_equal(np.asarray(batch.lengths), [[3, 1], [2, 3], [0, 0], [0, 0]])


def test_extras_of_every_batch():
    found, _ = sampled([["12$", "1"], ["7$", "12$"]])
    extras = rollout.to_rollouts(found, max_tokens=8, prompts=3, version=5).extras
    np.testing.assert_array_equal(extras["correct"], [[True, False], [False, True], [True, False]])  # the last is filling
    np.testing.assert_array_equal(extras["task"], [0, 0, 0])
    np.testing.assert_array_equal(extras["current_version"], [5, 5, 5])
    assert {name: x.dtype for name, x in extras.items()} == {
        "truncated": bool, "correct": bool, "task": np.int32, "current_version": np.int32, "answers": np.int32}


def test_a_format_bonus_does_not_make_an_answer_correct():
    found, _ = sampled([["12$", "1"]])
    scores = found.scores._replace(total=np.float32([0.4, 0.9]))  # components stay: the first is the accuracy
    batch = rollout.to_rollouts(rollout.dataclasses.replace(found, scores=scores), max_tokens=8, prompts=1, version=0)
    assert batch.correct.tolist() == [[True, False]]
    assert batch.replace(extras={}).correct.tolist() == [[False, True]]


def test_equal_answers_get_equal_numbers():
    found, _ = sampled([[" 12 $", "7$", "12$", "$"], ["7$", "7$", "5$", "12$"]])
    assert found.answers == ["12", "7", "12", None, "7", "7", "5", "12"]
    batch = rollout.to_rollouts(found, max_tokens=8, prompts=2, version=0)
    np.testing.assert_array_equal(batch.extras["answers"], [[0, 1, 0, -1], [0, 0, 1, 2]])
    twice = rollout.concatenate([rollout.select(found, np.array([False, True])), found])
    np.testing.assert_array_equal(rollout.answer_ids(twice.answers, 4), [[0, 0, 1, 2], [0, 1, 0, -1], [0, 0, 1, 2]])
    silent = rollout.dataclasses.replace(found, answers=None)
    assert "answers" not in rollout.to_rollouts(rollout.select(silent, np.array([True, False])), 8, 2, 0).extras
    assert rollout.concatenate([silent, silent]).answers is None


def test_selecting_and_joining_keep_rows_together():
    first, _ = sampled([["12$", "0$"], ["1$", "2$"], ["12$", "12$"]])
    second, _ = sampled([["7$", "8$"]], first_id=10)
    picked = rollout.select(first, np.array([True, False, True]))
    assert [p.id for p in picked.problems] == [0, 2] == picked.prompts.ids.tolist()
    assert picked.texts == ["12", "0", "12", "12"]
    np.testing.assert_array_equal(picked.rewards, [[1, 0], [1, 1]])
    joined = rollout.concatenate([picked, second])
    assert [p.id for p in joined.problems] == [0, 2, 10] == joined.prompts.ids.tolist()
    assert joined.texts == ["12", "0", "12", "12", "7", "8"]
    np.testing.assert_array_equal(joined.rewards, [[1, 0], [1, 1], [0, 0]])
    np.testing.assert_array_equal(joined.completions.tokens[2, 1, :2], [ord("8"), EOS])
    assert joined.completions.decode_steps == 16
    nothing = rollout.select(first, np.zeros(3, bool))
    assert len(nothing.problems) == 0 and nothing.rewards.shape == (0, 2)


def test_joining_adds_failures_up():
    found, _ = sampled([["1$", "2$"]])
    broken = [rollout.dataclasses.replace(found, scores=Scores(*found.scores[:3], failures))
              for failures in ({"code/timeout": 2}, {}, {"code/timeout": 1, "code/crash": 4})]
    assert rollout.concatenate(broken).scores.failures == {"code/timeout": 3, "code/crash": 4}
    assert rollout.metrics_of(rollout.concatenate(broken))["reward_failures/code/timeout"] == 3


def test_problems_that_do_not_fit():
    problems = [Problem("abc", "", 0), Problem("abcdefgh", "", 1), Problem("x", "", 2)]
    ids = lambda policy: [p.id for p, _ in rollout.fitting_problems(problems, BYTES, 5, policy)]  # noqa: E731
    assert ids("skip") == [0, 2] and ids("truncate") == [0, 1, 2]
    assert rollout.fitting_problems(problems, BYTES, 5, "truncate")[1][1] == [*b"defgh"]
    with pytest.raises(ValueError, match="prompt 1 has 9 tokens"):
        ids("fail")


def test_processes_that_read_in_turns_all_get_the_batch_in_order(monkeypatch):
    """Two of three read: each its problems, of which those that do not fit are left out afterwards."""
    problems = [Problem("abcdefgh"[:n], "", i) for i, n in enumerate((1, 8, 3, 2, 8, 4))]
    one_alone = rollout.fitting_problems(problems, BYTES, 5, "skip")
    sent = []
    for reader in range(2):
        monkeypatch.setattr(rollout.parallel, "gather_objects", lambda mine: sent.append(mine) or [mine] * 3)
        rollout.fitting_problems(problems[reader::2], BYTES, 5, "skip", processes=2)
    monkeypatch.setattr(rollout.parallel, "gather_objects", lambda mine: [*sent, "read nothing"])
    for reader in range(3):
        assert rollout.fitting_problems(problems[reader % 2::2], BYTES, 5, "skip", processes=2) == one_alone
    assert [problem.id for problem, _ in one_alone] == [0, 2, 3, 5]


def test_prompt_buckets_are_quarters_in_multiples_of_64_and_hold_the_longest():
    assert rollout.prompt_buckets(40) == [40] and rollout.prompt_buckets(64) == [64]
    assert rollout.prompt_buckets(200) == [64, 128, 192, 200]
    assert rollout.prompt_buckets(1000) == [256, 512, 768, 1000]
