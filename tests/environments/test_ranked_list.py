"""Ranked lists: hits by rank, the rank of each token, and their use in a run."""
import chatter
import numpy as np
import pytest

from jaxrl_llm import environments
from jaxrl_llm.audits import environments as audit
from jaxrl_llm.data import turn_info
from jaxrl_llm.environments import base
from jaxrl_llm.setup import setup
from jaxrl_llm.tokenizers import ByteTokenizer


@pytest.fixture(scope="module")
def environment():
    return environments.make("ranked_list", ranks=3, brief=True)


def played(environment, text):
    problem = next(p for p in environment.task.train if p.extra["liked"] == ["alibi", "heist"])
    state, opening = base.begin(environment, problem, 0)
    assert opening.messages == [{"role": "user", "content": "I liked alibi and heist."}]
    return base.advance(environment, state, {"role": "assistant", "content": text})


@pytest.fixture(scope="module")
def alibi():
    return environments.make("ranked_list", brief=True, size=204, heldout=20)


@pytest.mark.parametrize("text, hits, spans", [
    ("motive\ncomet\n3. Decoy", [1, 0, 1], [[0, 6, 0], [7, 12, 1], [13, 22, 2]]),
    ("motive\n\nmotive\nheist", [1, 0, 0], [[0, 6, 0], [8, 14, 1], [15, 21, 2]]),  # once each, and none that was named
    ("ransom\ncipher\nwitness\ndecoy", [1, 1, 1], [[0, 6, 0], [7, 13, 1], [14, 21, 2], [22, 28, 3]]),
    ("", [0, 0, 0], []), (" \n", [0, 0, 0], []), ("motive and decoy", [0, 0, 0], [[0, 17, 0]]),
])
def test_hits_and_parts_of_a_list(alibi, text, hits, spans):
    turn = played(alibi, text)
    assert turn.done and turn.info["hits"] == hits and turn.info["ranks"] == spans
    gains = [1, 0.63092975, 0.5]
    assert turn.reward == pytest.approx(np.dot(hits, gains) / sum(gains), abs=1e-8)


def test_spans_become_numbers_of_tokens(alibi):
    tokenizer, text = ByteTokenizer(), "no\nva"
    ids = [*tokenizer.encode(text), tokenizer.eos_id]
    starts = [len(tokenizer.decode(ids[:place], skip_special=False)) for place in range(len(ids))]
    info = turn_info.of_tokens(alibi.facts, played(alibi, text).info, starts, True)
    assert info["ranks"] == [0, 0, -1, 1, 1, 1] and info["eos"] is True  # the stop token is one of the last item
    two = turn_info.of_tokens({"ranks": "spans"}, {"ranks": [[0, 4, 0], [2, 4, 7]]}, [0, 3, 4], False)
    assert two == {"ranks": [0, 7, -1]}


def test_names_that_there_are(environment):
    assert len({p.extra["kind"] for p in environment.task.train}) == 4
    with pytest.raises(ValueError, match="ranks=7, liked=2"):
        environments.make("ranked_list", ranks=7)
    with pytest.raises(ValueError, match="more than the 224 problems"):
        environments.make("ranked_list", size=200)
    for facts, info in (({"ranks": "spans"}, {"ranks": [[0, 1]]}), ({"hits": "list"}, {"hits": ["a"]})):
        with pytest.raises(ValueError, match="declares the fact"):
            turn_info.check(facts, info)


def test_audit():
    rows, checks = audit.audit(*(environments.make("ranked_list") for _ in range(2)), count=12, seed=0)
    assert not any(check.failed for check in checks.values()), checks


@pytest.mark.slow
def test_rollouts_have_the_ranks_of_their_tokens():
    config = chatter.get_config(environment="ranked_list(brief=True)", method="rank_grpo", **{
        "sampling.turn_tokens": 24, "prompts.max_tokens": 40})
    run, params = setup.build(config)
    finished = run.source.next(run.learner.publish(setup.initial_state(run, params)))
    rollouts, forest = finished.rollouts, finished.forest
    ranks, eos, tokens = (np.asarray(x) for x in (rollouts.extras["ranks"], rollouts.extras["eos"], rollouts.tokens))
    assert rollouts.extras["hits"].shape == (4, 4, 3) and ranks.dtype == np.int32 and eos.dtype == bool
    decode, stop = run.source.stream.tokenizer.decode, run.source.stream.tokenizer.eos_id
    for place, end in enumerate(forest.ends):
        row = np.unravel_index(place, rollouts.valid.shape)
        own = rollouts.mask[row]
        np.testing.assert_array_equal(eos[row], own & (tokens[row] == stop))
        lines = [line for line in forest.texts[end].split("\n") if line.strip()]
        assert max(ranks[row][own], default=-1) == len(lines) - 1
        for number, line in enumerate(lines):
            mine = own & (ranks[row] == number) & ~eos[row]
            assert decode(tokens[row][mine], skip_special=False).strip() in line or "�" in line
