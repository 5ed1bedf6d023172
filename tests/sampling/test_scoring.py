"""Texts of completions: stop tokens, stop strings; completions are written out by hand."""
import dataclasses

import numpy as np
import pytest
import streams
from streams import BYTES

from jaxrl_llm import rewards
from jaxrl_llm.sampling.one_turn import OneTurn
from jaxrl_llm.sampling.scoring import cut_and_spelled
from jaxrl_llm.sampling.trajectory import Trajectory
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools.timer import PhaseTimer


def ended(node, stops):
    """`(number of tokens, whether it stopped, text)` of a completion in the forest."""
    partner, problems = OneTurn(rewards.combine(["exact"]), BYTES, 1, 1, 24, stops), [Problem("?", "", 0)]
    partner.begin({0: Trajectory([1], 0)}, problems, PhaseTimer())
    assert partner.hear({0: node}, True, PhaseTimer()) == {0: None}
    forest = partner.grown(partner.plant(problems, [[1]], 0), {0: 0}, 0)
    end = forest.ends[0]
    assert forest.tokens[forest.offset[end]:].tolist() == node.tokens[:forest.length[end]].tolist()
    return int(forest.length[end]), bool(forest.stopped[end]), str(forest.texts[end])


@pytest.mark.parametrize("text, stops, kept, wanted", (
    ("12\n\n3", ("\n\n",), 4, "12\n\n"), ("12\n\n3$", ("\n\n",), 4, "12\n\n"), ("12\n3$", ("\n\n",), 5, "12\n3"),
    ("a.b;c", (";", "."), 2, "a."), ("a;;b", (";;", ";"), 2, "a;"), ("stop", ("stop",), 4, "stop"), ("é.x", (".",), 3, "é."),
    ("a-->b", ("-->", "->"), 4, "a-->"), ("abcd", ("abc", "b"), 2, "ab")))
def test_stop_strings_cut_tokens_and_text_behind_them(text, stops, kept, wanted):
    stopped = text.endswith("$") or any(s in text for s in stops)
    assert ended(streams.node(0, text), stops) == (kept, stopped, wanted)


def test_a_stop_string_that_no_byte_prefix_decodes_early():
    rows = [np.array(list(text.encode())) for text in ("ab→c", "→", "aaaa→")]
    assert cut_and_spelled(rows, BYTES, ["→"])[0].tolist() == [5, 3, 7]  # all three bytes of the arrow stay


def test_decoding_leaves_the_given_completions_alone():
    given = streams.node(0, "ab;c")
    assert ended(given, (";",))[0] == 3
    assert given.tokens.tolist() == [*b"ab;c"] and given.finish == "limit"


def test_rewards_read_the_stop_string():
    score = rewards.make("format", pattern="<answer>.*</answer>")
    _, _, texts = cut_and_spelled([np.array([*b"<answer>5</answer> junk"])], BYTES, ("</answer>",))
    assert texts == ["<answer>5</answer>"] and rewards.combine([score])(texts, ["5"]).total.tolist() == [1.0]


def test_a_stop_string_that_is_one_token_stays_in_the_text():
    given = dataclasses.replace(streams.node(0, "ab;"), finish="stop")  # the sampler ended it at the token of `;`
    assert ended(given, (";",)) == (3, True, "ab;")
