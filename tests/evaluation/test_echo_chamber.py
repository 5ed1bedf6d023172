"""Shares, accuracy and diversity of formats in worked numbers."""
import json

import numpy as np
import pytest

from jaxrl_llm.diagnostics.echo_chamber import numbers
from jaxrl_llm.evaluation import echo_chamber as echo
from jaxrl_llm.evaluation.pass_at_k import count_votes, majority_at_k, pass_at_k

CORRECT = np.array([[1, 0, 0, 0], [1, 1, 0, 1]])
FORMATS = np.array([[0, 1, 1, 0], [0, 0, 1, 0]])


def test_a_worked_example():
    right = CORRECT.sum(1)
    assert [pass_at_k(4, right, k).mean() for k in (1, 2, 4)] == pytest.approx([0.5, 0.75, 1])
    answers = [[5, 3, 3, None], [2, 2, 7, 2]]
    assert np.mean([majority_at_k(count_votes(a, c), 4) for a, c in zip(answers, CORRECT)]) == 0.5
    result = echo.shares(FORMATS, 2)
    np.testing.assert_array_equal(result, [0.625, 0.375])
    np.testing.assert_allclose(echo.accuracy(CORRECT, FORMATS, 2), [0.8, 0])
    assert echo.mixture_entropy(result) == pytest.approx(0.661563, abs=5e-7)
    assert echo.distinct_correct(CORRECT, [[1, 2, 3, 4], [5, 5, 6, 7]]) == [(0, 1), (1, 5), (1, 7)]


def test_an_unused_format():
    assert np.isnan(echo.accuracy(CORRECT, FORMATS, 3)[2]) and echo.shares(FORMATS, 3)[2] == 0
    assert echo.mixture_entropy(np.array([1.0, 0])) == 0 and echo.shares(FORMATS, 3).sum() == 1


def test_the_first_format_that_fits_the_whole_text():
    formats = (r"plain=\d+", r"worked=[\d ]+", "code=def .*")
    assert [echo.format_of(text, formats) for text in ("12", "1 2 12", "def f():\n  return 1", "12 ?", "")] == [
        "plain", "worked", "code", "other", "other"]
    with pytest.raises(ValueError, match="write name=regular expression"):
        echo.format_of("x", ["plain"])
    with pytest.raises(ValueError, match="'bad'.*no regular expression"):
        echo.format_of("x", ["bad=("])


def test_a_page_whose_texts_hold_separators_of_lines(tmp_path):
    """Only "\\n" ends a line of JSON: U+2028 and U+0085 may stand in its texts."""
    rows = [{"completion_index": g, "solved": g == 0, "completion": "7\u2028\x85"} for g in range(2)]
    (tmp_path / "page.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    result = numbers(tmp_path / "page.jsonl", [r"plain=\d+\s*"], ["plain", "other"])
    assert (result["group"], result["shares"], result["pass_at_1"]) == (2, [1.0, 0.0], 0.5)
