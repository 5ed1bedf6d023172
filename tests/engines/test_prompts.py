"""From problems to padded prompts: templates, limits, padding."""
import numpy as np
import pytest

from jaxrl_llm.engines.prompts import encode_problem, fit, longest, pad
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
    assert fit([1, 2, 3], problem, 3, "fail", ByteTokenizer()) == [1, 2, 3]
    assert fit([1, 2, 3, 4], problem, 3, "skip", ByteTokenizer()) is None
    assert fit([1, 2, 3, 4], problem, 3, "truncate", ByteTokenizer()) == [2, 3, 4]  # the end holds the question
    assert fit([257, *range(20)], problem, 8, "truncate", ByteTokenizer()) == [257, 13, 14, 15, 16, 17, 18, 19]  # and BOS stays
    with pytest.raises(ValueError, match=r"prompt 7 has 4 tokens, the limit is prompts.max_tokens=3: 'abcdef'.*overlong"):
        fit([1, 2, 3, 4], problem, 3, "fail", ByteTokenizer())


def test_of_a_chat_that_is_too_long_the_words_are_cut_and_not_the_markup():
    tokenizer = ByteTokenizer("<|bos|>" + TEMPLATE)
    problem = Problem(({"role": "system", "content": "be"}, {"role": "user", "content": "é0123456789"}), "x", 7)
    ids = encode_problem(problem, tokenizer)
    assert len(ids) == 34  # BOS, 8 + 2, 6 + 12, 5

    def cut(length):
        return tokenizer.decode(fit(ids, problem, length, "truncate", tokenizer), skip_special=False)

    assert cut(33) == "<|bos|>[system]be[user]0123456789[bot]"  # no half of a character
    assert cut(26) == "<|bos|>[system]be[user]6789[bot]"
    assert cut(22) == "<|bos|>[system]e[user]9[bot]"  # both have one letter left
    assert cut(20) == "<|bos|>r]é0123456789[bot]"  # the markup has 20 tokens itself
    continued = Problem((problem.prompt[1], {"role": "assistant", "content": "So:"}), "x", 8)
    assert tokenizer.decode(fit(encode_problem(continued, tokenizer), continued, 25, "truncate", tokenizer)) == (
        "[user]6789[assistant]So:")


def test_a_prompt_that_ends_with_the_assistants_words_is_continued():
    spoken = Problem(({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "So:\n<think>"}), "2", 0)
    assert encode_problem(spoken, ByteTokenizer(TEMPLATE)) == list(b"[user]1+1?[assistant]So:\n<think>")


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
