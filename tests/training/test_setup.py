"""What is refused before anything is loaded, and the supervised warm-up's batches."""
import dataclasses

import numpy as np
import pytest

from jaxrl_llm import methods
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.training import setup
from jaxrl_llm.training.config import default_config
from jaxrl_llm.training.warmup import demonstrations


def test_methods_that_need_what_nobody_records_are_refused():
    method, parts = methods.get("grpo"), methods.build("grpo")
    setup.check_method(method, *parts)
    for change, words in ((dict(needs=("teacher_logprobs",)), "'grpo' needs teacher_logprobs, which"),
                          (dict(filters=("unheard_of",)), "needs filter 'unheard_of'"),
                          (dict(controllers=("curriculum",)), "needs controller 'curriculum'")):
        with pytest.raises(NotImplementedError, match=words):
            setup.check_method(dataclasses.replace(method, **change), *parts)
    with pytest.raises(NotImplementedError, match="needs values"):
        setup.check_method(method, parts[0]._replace(needs=("rewards", "values")), parts[1])


def test_the_prompt_length_covers_held_out_problems_too():
    config = default_config()
    config.task.level, config.task.chat = "digit", False
    config.model.hidden_size, config.model.num_layers = 32, 1
    run, _ = setup.build(config)
    assert run.prompt_tokens == 8  # BOS and "7+5=", rounded up to a multiple of 8
    assert run.needs <= setup.RECORDED


def test_demonstrations_are_answers_with_the_end_token():
    problems = [Problem("7+5=", "12", 3), Problem("99999+1=", "100000", 4)]
    rows = demonstrations(problems, ByteTokenizer(), prompt_tokens=10, max_tokens=4, overlong="fail")
    np.testing.assert_array_equal(rows.tokens[:, 0], [[*b"12", 258, 0], [*b"100", 258]])
    assert rows.mask.sum(-1).tolist() == [[3], [4]] and rows.prompt_mask.sum(-1).tolist() == [5, 9]


def test_demonstrations_of_prompts_that_are_too_long():
    problems = [Problem("99999+1=", "100000", 4), Problem("7+5=", "12", 3)]
    make = lambda policy: demonstrations(problems, ByteTokenizer(), 6, 4, policy)  # noqa: E731
    with pytest.raises(ValueError, match="prompt 4 has 9 tokens, the limit is prompts.max_tokens=6"):
        make("fail")
    skipped = make("skip")  # the shape stays: the one that fits stands in
    np.testing.assert_array_equal(skipped.prompt_tokens, [[257, *b"7+5=", 0]] * 2)
    np.testing.assert_array_equal(make("truncate").prompt_tokens[0], [*b"999+1="])
    with pytest.raises(ValueError, match="no prompt of a warm-up batch fits"):
        demonstrations(problems[:1], ByteTokenizer(), 6, 4, "skip")
