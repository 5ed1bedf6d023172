"""Buckets of lengths, and how full a batch is."""
import numpy as np

from jaxrl_llm.training.shapes import bucket_of, buckets, prompt_bucket_of, prompt_buckets, quarters_filled


def test_buckets():
    assert buckets(32) == [8, 16, 24, 32]
    assert buckets(6) == [2, 3, 5, 6]
    assert buckets(1) == [1]
    assert [bucket_of(n, 6) for n in (1, 2, 3, 4, 5, 6)] == [2, 2, 3, 5, 5, 6]
    for limit in range(1, 40):
        assert buckets(limit)[-1] == limit and bucket_of(limit, limit) == limit


def test_prompt_buckets_are_quarters_in_multiples_of_64_and_hold_the_longest():
    assert prompt_buckets(40) == [40] and prompt_buckets(64) == [64]
    assert prompt_buckets(200) == [64, 128, 192, 200]
    assert prompt_buckets(1000) == [256, 512, 768, 1000]
    assert [prompt_bucket_of(n, 200) for n in (1, 64, 65, 193, 200)] == [64, 64, 128, 200, 200]


def test_quarters_of_the_slots_that_are_filled():
    mask = np.arange(8) < np.array([[8, 8], [1, 0], [4, 2], [0, 0]])[..., None]
    assert [quarters_filled(mask, n) for n in (1, 2, 4)] == [4, 3, 2]  # 16 of 16, 22 of 32, 23 of 64
    assert quarters_filled(mask[1:2], 1) == quarters_filled(mask[3:], 1) == 1
    mask[3, 1, 7] = True  # whatever comes before a token that counts is read by it
    assert quarters_filled(mask[3:], 1) == 2
    random = np.random.default_rng(0)
    for _ in range(20):
        mask = np.arange(12) < random.integers(0, 13, (8, 3, 1))
        part = mask[random.permutation(8)[:4]]
        assert part.sum() <= quarters_filled(mask, 2) / 4 * part.size
