"""Ladders of sizes, how full a batch is, and the number of programs that follow from both."""
import itertools

import numpy as np
import pytest

from jaxrl_llm.data.ladders import buckets, mean_rung, prompt_buckets, smallest
from jaxrl_llm.data.shapes import MAX_PROGRAMS, limits, padded, quarters_filled, row_lengths, unpadded


def test_buckets():
    assert buckets(32, 4) == (8, 16, 24, 32) and buckets(32, 1) == (32,)
    assert buckets(6, 4) == (2, 3, 5, 6)
    assert buckets(1, 4) == (1,)
    assert [smallest(buckets(6, 4), n) for n in (1, 2, 3, 4, 5, 6)] == [2, 2, 3, 5, 5, 6]
    for limit in range(1, 40):
        assert buckets(limit, 4)[-1] == limit and smallest(buckets(limit, 4), limit) == limit


def test_prompt_buckets_are_quarters_in_multiples_of_64_and_hold_the_longest():
    assert prompt_buckets(40) == (40,) and prompt_buckets(64) == (64,)
    assert prompt_buckets(200) == (64, 128, 192, 200)
    assert prompt_buckets(1000) == (256, 512, 768, 1000) and prompt_buckets(1000, 2) == (512, 1000)
    assert [smallest(prompt_buckets(200), n) for n in (1, 64, 65, 193, 200)] == [64, 64, 128, 200, 200]


def test_the_mean_of_what_holds_a_need():
    for ladder in ((7,), (2, 3, 5, 6), (64, 128, 192, 200)):
        assert mean_rung(ladder) == pytest.approx(np.mean([smallest(ladder, n) for n in range(1, ladder[-1] + 1)]))


@pytest.mark.parametrize("sizes", (limits, padded, unpadded))
def test_few_programs_hold_every_batch(sizes):
    for S, T, G, groups in itertools.product((8, 512, 9000), (1, 32, 32_768), (1, 8), (1, 2, 8)):
        value = sizes(S, T, G, groups)
        assert 1 <= value.programs <= MAX_PROGRAMS == 8
        assert [ladder[-1] for ladder in value[:3]] == [S, T, groups]
        assert all(list(ladder) == sorted({*ladder}) for ladder in value[:3])
        shapes = itertools.product(value.prompt_tokens, value.groups, value.tokens)
        assert value.programs == len({(*shape, filled) for shape in shapes for filled in range(value.filled_of(shape[-1]), 5)})


def test_sizes_are_spent_on_what_fills_most_slots():
    assert padded(8, 32, 8, 1)[:2] == ((8,), (8, 16, 24, 32))  # short prompts: quarters of the completions alone
    assert padded(512, 1024, 8, 1)[:2] == ((256, 512), (256, 512, 768, 1024))
    assert padded(8192, 64, 8, 1)[:2] == ((2048, 4096, 6144, 8192), (32, 64))
    assert unpadded(512, 1024, 8, 1) == ((512,), (256, 512, 1024), (1,), (3, 3, 1), ())
    assert unpadded(8192, 64, 8, 1) == ((4096, 8192), (64,), (1,), (1,), ())
    assert unpadded(512, 1024, 8, 4) == ((512,), (1024,), (2, 4), (1,), ())
    assert limits(512, 1024, 8, 4) == ((512,), (1024,), (4,), (4,), ())
    assert [unpadded(512, 1024, 8, 1).filled_of(T) for T in (100, 512, 513)] == [3, 3, 1]


def test_packed_rows_hold_one_completion_of_long_ones_and_the_group_of_short_ones():
    assert row_lengths(512, 32_768, 8) == (11_136, 22_208, 33_280)  # 1.4% more slots than with each prompt once
    assert row_lengths(4096, 64, 8)[-1] == 4096 + 8 * 64
    assert row_lengths(512, 1024, 8)[-1] == 512 + 4 * 1024
    assert row_lengths(512, 4096, 8)[-1] == 512 + 2 * 4096  # one in each row would be 10.8% more slots
    assert row_lengths(8, 6, 1) == (14,)
    for S, T, G in itertools.product((5, 300, 4000), (1, 70, 9000), (1, 3, 8)):
        longest = row_lengths(S, T, G)[-1]
        held = (longest - S) // T
        assert longest == S + held * T and 1 <= held <= G
        assert -(-G // held) * longest <= 1.1 * (S + G * T)


def test_quarters_of_the_slots_that_are_filled():
    mask = np.arange(8) < np.array([[8, 8], [1, 0], [4, 2], [0, 0]])[..., None]
    assert [quarters_filled(mask, n) for n in (1, 2, 4)] == [4, 3, 2]  # 16 of 16, 22 of 32, 23 of 64
    assert quarters_filled(mask[1:2], 1) == quarters_filled(mask[3:], 1) == 1
    mask[3, 1, 7] = True  # a token that counts reads everything before it
    assert quarters_filled(mask[3:], 1) == 2
    random = np.random.default_rng(0)
    for _ in range(20):
        mask = np.arange(12) < random.integers(0, 13, (8, 3, 1))
        part = mask[random.permutation(8)[:4]]
        assert part.sum() <= quarters_filled(mask, 2) / 4 * part.size
