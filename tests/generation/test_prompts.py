"""From problems to padded prompts: templates, limits, padding."""
import numpy as np
import pytest

from jaxrl_llm.generation.prompts import encode_problem, fit, longest, pad
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tokenizers.byte import ByteTokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"


def test_plain_text_gets_one_bos_and_chat_only_what_its_template_writes():
    plain = Problem("7+5=", "12", 0)
    assert encode_problem(plain, ByteTokenizer()) == [257, *b"7+5="]
    chat = Problem(({"role": "user", "content": "7+5"},), "12", 0)
    assert encode_problem(chat, ByteTokenizer(chat_template=TEMPLATE)) == list(b"[user]7+5[bot]")


def test_a_prompt_that_cannot_be_encoded_is_named():
    limited = ByteTokenizer(chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="prompt 7: the chat template cannot render .* no system role"):
        encode_problem(Problem(({"role": "system", "content": "x"},), "", 7), limited)


def test_policies_for_prompts_that_are_too_long():
    problem = Problem("abcdef", "x", 7)
    assert fit([1, 2, 3], problem, 3, "fail") == [1, 2, 3]
    assert fit([1, 2, 3, 4], problem, 3, "skip") is None
    assert fit([1, 2, 3, 4], problem, 3, "truncate") == [2, 3, 4]  # the end holds the question
    with pytest.raises(ValueError, match=r"prompt 7 has 4 tokens, the limit is prompts.max_tokens=3: 'abcdef'.*overlong"):
        fit([1, 2, 3, 4], problem, 3, "fail")


def test_longest_looks_at_every_prompt_and_rounds_up():
    problems = [Problem("a" * n, "", n) for n in (3, 7, 20)]
    assert longest(problems, ByteTokenizer()) == 24  # 20 bytes and BOS
    assert longest(problems, ByteTokenizer(), multiple=1) == 21
    many = [Problem("ab", "", n) for n in range(3000)] + [Problem("a" * 100, "", 3000), Problem("é" * 60, "", 3001)]
    assert longest(many, ByteTokenizer(), multiple=1) == 121  # by tokens, not by characters


def test_padding_is_on_the_right_and_masked():
    prompts = pad([[5, 6], [7, 8, 9]], [40, 41], 4)
    np.testing.assert_array_equal(prompts.tokens, [[5, 6, 0, 0], [7, 8, 9, 0]])
    np.testing.assert_array_equal(prompts.mask, [[1, 1, 0, 0], [1, 1, 1, 0]])
    assert prompts.ids.tolist() == [40, 41] and prompts.tokens.dtype == np.int32 and prompts.mask.dtype == bool
