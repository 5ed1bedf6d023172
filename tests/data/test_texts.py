"""Texts as tokens: what they refuse, and which of them fit."""
import numpy as np
import pytest

from jaxrl_llm.data.texts import Text, fitting


def text(trained, prompt=1, **more):
    return Text(np.arange(len(trained), dtype=np.int32), np.array(trained, bool), prompt, **more)


def test_masks_and_log_probs_have_an_entry_for_each_token():
    with pytest.raises(ValueError, match=r"a.jsonl, line 3: 'logprobs' has 2 entries for a text of 3 tokens"):
        text([0, 1, 1], logprobs=np.zeros(2), place="a.jsonl, line 3")
    with pytest.raises(ValueError, match="'trained' has 2 entries for a text of 3 tokens"):
        Text(np.zeros(3, np.int32), np.array([False, True]), 1)


@pytest.mark.parametrize(("trained", "prompt"), [([0, 1, 1], 2), ([1, 1, 1], 0), ([0, 0], 3)])
def test_the_prompt_is_neither_empty_nor_trained(trained, prompt):
    with pytest.raises(ValueError, match=f"prompt={prompt} of a text of {len(trained)} tokens"):
        text(trained, prompt)


def test_texts_that_do_not_fit_are_counted_and_never_cut():
    rows = [text([0, 1, 1]), text([0, 1, 1, 1]), text([0, 0])]
    kept, out = fitting(rows, 3)
    assert [len(one.ids) for one in kept] == [3] and kept[0] is rows[0]
    assert out == {"too long": 1, "nothing trained": 1}
