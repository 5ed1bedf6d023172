"""Texts of completions: stop tokens, stop strings; completions are written out by hand."""
import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.generation import Completions
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.training.scoring import cut_at_stop_strings, decode

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


@pytest.mark.parametrize("text, stops, kept, wanted", (
    ("12\n\n3", ("\n\n",), 4, "12\n\n"), ("12\n\n3$", ("\n\n",), 4, "12\n\n"), ("12\n3$", ("\n\n",), 5, "12\n3"),
    ("a.b;c", (";", "."), 2, "a."), ("a;;b", (";;", ";"), 2, "a;"), ("stop", ("stop",), 4, "stop"), ("é.x", (".",), 3, "é."),
    ("a-->b", ("-->", "->"), 4, "a-->"), ("abcd", ("abc", "b"), 2, "ab")))
def test_stop_strings_cut_tokens_and_text_behind_them(text, stops, kept, wanted):
    cut, texts = decode(completions([[text]]), BYTES, stops)
    assert texts == [wanted]
    assert cut.mask[0, 0].sum() == kept and cut.mask[0, 0, :kept].all()
    assert bool(cut.stopped[0, 0]) == (text.endswith("$") or any(s in text for s in stops))


def test_a_stop_string_that_no_byte_prefix_decodes_early():
    rows = [np.array(list(text.encode())) for text in ("ab→c", "→", "aaaa→")]
    assert cut_at_stop_strings(rows, BYTES, ["→"]).tolist() == [5, 3, 7]  # all three bytes of the arrow stay


def test_decoding_leaves_the_given_completions_alone():
    given = completions([["ab;c"]])
    decode(given, BYTES, (";",))
    assert given.mask.sum() == 4 and not given.stopped.any()


def test_rewards_read_the_stop_string():
    score = rewards.make("format", pattern="<answer>.*</answer>")
    _, texts = decode(completions([["<answer>5</answer> junk"]], T=24), BYTES, ("</answer>",))
    assert texts == ["<answer>5</answer>"] and rewards.combine([score])(texts, ["5"]).total.tolist() == [1.0]


def test_a_stop_string_that_is_one_token_stays_in_the_text():
    given = completions([["ab;"]])  # the sampler ended it at the token of `;`
    cut, texts = decode(given.replace(stopped=np.array([[True]])), BYTES, (";",))
    assert texts == ["ab;"] and cut.mask.sum() == 3 and cut.stopped.all()
