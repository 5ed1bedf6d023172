"""Sample pages are readable by people and their JSON twins are exact."""

import json

import numpy as np
import pytest

from jaxrl_llm.runs import samples
from jaxrl_llm.runs.samples import per_token, write_samples

ARGUMENTS = {
    "prompts": ["What is 2+3?", "Say é\x1b[31m"],
    "answers": ["5", "é"],
    "completions": [["It is 5.", "6\nor 7"], ["\udc80\x00ok"]],
    "rewards": [[1.0, 0.0], [0.25]],
    "components": [[{"exact": 1.0, "format": 0.5}, {"exact": 0.0, "format": 0.5}], [{}]],
    "lengths": [[4, 64], [3]],
    "stop_reasons": [["stop", "length"], ["stop"]],
}

PAGE = """step 10: 2 prompts, 3 completions

{line}
prompt 1 of 2   answer: 5   mean reward: 0.500
{line}
What is 2+3?

--- completion 1 of 2   reward: 1.000   exact: 1.000   format: 0.500   4 tokens, stop ---
It is 5.

--- completion 2 of 2   reward: 0.000   exact: 0.000   format: 0.500   64 tokens, length ---
6
or 7

{line}
prompt 2 of 2   answer: é   mean reward: 0.250
{line}
Say é\\x1b[31m

--- completion 1 of 1   reward: 0.250   3 tokens, stop ---
\\udc80\\x00ok
"""


def test_page_and_twin(tmp_path):
    path = write_samples(tmp_path, 10, **ARGUMENTS)
    assert path == tmp_path / "samples" / "step_000010.txt"
    assert path.read_text(encoding="utf-8") == PAGE.format(line="=" * 100)
    rows = [json.loads(line) for line in path.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 3
    assert rows[1] == {
        "step": 10,
        "prompt_index": 0,
        "completion_index": 1,
        "prompt": "What is 2+3?",
        "answer": "5",
        "completion": "6\nor 7",
        "reward": 0.0,
        "components": {"exact": 0.0, "format": 0.5},
        "length": 64,
        "stop_reason": "length",
    }
    assert rows[2]["completion"] == "\udc80\x00ok"


def test_writing_a_step_again_replaces_it(tmp_path):
    write_samples(tmp_path, 10, **ARGUMENTS)
    path = write_samples(tmp_path, 10, *([[]] * 7))
    assert path.read_text() == "step 10: 0 prompts, 0 completions\n"
    assert path.with_suffix(".jsonl").read_text() == ""


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("answers", ["5"], "answers has 1 entries for 2 prompts"),
        ("rewards", [[1.0, 0.0]], "rewards has 1 entries for 2 prompts"),
        ("lengths", [[4], [3]], r"lengths\[0\] has 1 entries for 2 completions"),
        ("stop_reasons", [["stop", "length"], []], r"stop_reasons\[1\] has 0 entries for 1 completions"),
    ],
)
def test_sizes_that_disagree(tmp_path, name, value, message):
    with pytest.raises(ValueError, match=message):
        write_samples(tmp_path, 10, **{**ARGUMENTS, name: value})
    assert not (tmp_path / "samples").exists()


def spell(rows):
    return ["".join(map(chr, row)) for row in rows]


def test_numbers_per_token(tmp_path, monkeypatch):
    tokens, lengths = np.array([list(map(ord, row)) for row in ("42.", "x..", "abc", "...")]), [2, 1, 3, 0]
    numbers = {"entropies": np.array([[1 / 3, 2.0, 9.0], [0.5, 9.0, 9.0], [1.0, 2.0, 3.0], [9.0, 9.0, 9.0]])}
    mask = np.arange(3) < np.array(lengths)[:, None]
    result = per_token(tokens, mask, lengths, spell, numbers)
    assert result == [{"tokens": ["4", "2"], "entropies": [0.3333, 2.0]}, {"tokens": ["x"], "entropies": [0.5]},
                      {"tokens": ["a", "b", "c"], "entropies": [1.0, 2.0, 3.0]}, {"tokens": [], "entropies": []}]
    path = write_samples(tmp_path, 1, ["p"], ["a"], [["42", "x"]], [[1.0, 0.0]], [[{}, {}]], [[2, 1]], [["stop", "stop"]],
                         [result[:2]])
    rows = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert rows[0]["tokens"] == ["4", "2"] and rows[1]["entropies"] == [0.5] and rows[0]["completion"] == "42"
    monkeypatch.setattr(samples, "TOKENS_PER_PAGE", 3)
    assert per_token(tokens, mask, lengths, spell, numbers)[:3] == [*result[:2], {}]


def test_numbers_of_another_batch_are_refused(tmp_path):
    with pytest.raises(ValueError, match="tokens has 1 entries for 2 prompts"):
        write_samples(tmp_path, 1, **ARGUMENTS, tokens=[[{}]])


def test_tokens_of_others_are_spelled_without_numbers():
    tokens, mask = np.array([list(map(ord, "ab?c"))]), np.array([[True, True, False, True]])
    result = per_token(tokens, mask, [4], spell, {"advantages": np.array([[1.0, 2.0, np.nan, 3.0]])})
    assert result == [{"tokens": ["a", "b", "?", "c"], "advantages": [1.0, 2.0, None, 3.0],
                       "trained": [True, True, False, True]}]
