"""Text that is sent while tokens arrive."""
import numpy as np
import pytest

from jaxrl_llm.serving.spelling import Spelling
from jaxrl_llm.tokenizers import ByteTokenizer

TEXT = "naïve 🙂 ab\nabc end"


def pieces(text, sizes, stops=()):
    ids, one, result = ByteTokenizer().encode(text), Spelling(ByteTokenizer(), stops), []
    cuts = [0, *np.cumsum(sizes), len(ids)]
    for start, end in zip(cuts, cuts[1:]):
        result.append(one.feed(ids[start:end], last=end == len(ids)))
    return result, one


@pytest.mark.parametrize("stops", [(), ("abc",), ("🙂 a", "zz"), ("nothing",), ("\nabd", " end")])
def test_pieces_are_the_whole_cut_before_the_first_stop_text(stops):
    whole = TEXT[:min([TEXT.index(stop) for stop in stops if stop in TEXT], default=len(TEXT))]
    random = np.random.default_rng(0)
    for _ in range(50):
        sizes = random.integers(0, 5, 12)
        result, _ = pieces(TEXT, sizes[np.cumsum(sizes) < len(TEXT.encode())], stops)
        assert "".join(result) == whole


def test_what_may_be_the_beginning_of_a_stop_text_is_held_back():
    result, one = pieces("xabab!", [3, 1, 1], ("abc", "b!"))
    assert result == ["x", "ab", "", "a"] and one.ended and one.held == "b!"
    assert pieces("xab", [2], ("abc",))[0] == ["x", "ab"]  # the end shows that it is none


def test_long_stop_texts_are_compared_with_few_letters():
    class Counted(str):
        compared = 0

        def startswith(self, *given):
            Counted.compared += 1
            return super().startswith(*given)

    stops = [Counted(letter + "z" * 250_000) for letter in "abcdefghijklmnop"]
    one = Spelling(ByteTokenizer(), stops)
    assert one.feed(ByteTokenizer().encode("xyc")) == "xy" and one.held == "c"
    assert one.feed(ByteTokenizer().encode("zq")) == "czq" and Counted.compared <= 6 * len(stops)


def test_letters_come_whole():
    assert pieces("é🙂", [1, 1, 2])[0] == ["", "é", "", "🙂"]
    assert pieces("é", [1])[0] == ["", "é"]
    one = Spelling(ByteTokenizer())
    assert one.feed([0xC3], last=True) == "\N{REPLACEMENT CHARACTER}"
