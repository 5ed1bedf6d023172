"""Single turns by the slot engine are those of the scan sampler, with fewer rows at a time."""
import functools

import jax
import numpy as np
import pytest
from engines import DENSE, KEY, STOPS, G, P, S, T, V, params, prompts

from jaxrl_llm.generation import Sampling, by_engine, generate, row_keys
from jaxrl_llm.generation.caches import widths_of
from jaxrl_llm.generation.requests import Node
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.training.groups import _joined
from jaxrl_llm.training.scoring import cut_at_stop_strings


def joined(*given, **settings):
    """All parts that the engine yields as one, in host arrays."""
    return _joined(*by_engine.generate(*given, **settings))


def asked(left=False):
    rows, mask = np.zeros((P, S), np.int32), np.zeros((P, S), bool)
    for i, ids in enumerate(prompts()):
        place = slice(S - len(ids), S) if left else slice(len(ids))
        rows[i, place], mask[i, place] = ids, True
    return rows, mask, row_keys(KEY, np.arange(2**33, 2**33 + P * G).reshape(P, G))


@pytest.mark.parametrize("left, most", (pytest.param(False, None, marks=pytest.mark.slow), (True, 9)))
def test_slots_sample_what_the_scan_samples(left, most):
    sampling = Sampling(np.float32(0.8), top_k=20, max_tokens=None if most is None else np.int32(most))
    both = [jax.device_get(f(DENSE, params(), *asked(left), sampling, max_tokens=T, stop_ids=STOPS))
            for f in (generate, functools.partial(joined, slots=4))]
    scan, slots = both
    for name in ("tokens", "mask", "stopped"):
        np.testing.assert_array_equal(getattr(slots, name), getattr(scan, name), err_msg=name)
    for name in ("logprobs", "entropies"):
        np.testing.assert_allclose(getattr(slots, name), getattr(scan, name), atol=1e-5, err_msg=name)
    assert slots.decode_steps == scan.mask.sum(-1).max() - 1 and len(set(scan.mask.sum(-1).flat)) > 2


def test_prompts_are_yielded_in_order_once_their_completions_ended():
    """The engine still decodes later prompts when it yields the first; a long one holds back those behind it."""
    nodes = [[3, 0], [1, 5], [2], [4]]  # uids of the completions that each call of `collect` returns, two of each prompt

    class Scripted:
        def collect(self):
            return [Node(uid, None, 4, *([x] * (uid + 1) for x in (7, -0.5, 0.1, 0)), "stop")
                    for uid in nodes.pop(0)]

    parts = by_engine.completed(Scripted(), 3, 2, max_tokens=8)
    first = next(parts)
    assert nodes == [[2], [4]] and first.mask.sum(-1).tolist() == [[1, 2]] and first.decode_steps == 1
    second, third = parts
    assert (second.mask.sum(-1).tolist(), third.mask.sum(-1).tolist()) == ([[3, 4]], [[5, 6]])
    assert (second.decode_steps, third.decode_steps) == (2, 2) and third.stopped.all()


@pytest.mark.slow
def test_stop_texts_end_completions_where_they_are_cut_else():
    tokenizer, sampling = ByteTokenizer(), Sampling(np.float32(0.8))
    whole = jax.device_get(generate(DENSE, params(), *asked(), sampling, max_tokens=T, stop_ids=()))
    stop = tokenizer.decode(whole.tokens[1, 2, 4:6].tolist())
    made = joined(DENSE, params(), *asked(), sampling, max_tokens=T, stop_ids=(), slots=4, stop_texts=(stop,),
                              tokenizer=tokenizer)
    cut = np.minimum(cut_at_stop_strings(list(whole.tokens.reshape(-1, T)), tokenizer, (stop,)), T)  # T + 1: not in it
    assert made.mask.sum(-1).reshape(-1).tolist() == cut.tolist() and cut.min() <= 6 and not made.stopped.any()
    np.testing.assert_array_equal(made.tokens[made.mask], whole.tokens[made.mask])


@pytest.mark.slow
def test_prompts_of_several_widths_are_read_whole():
    """100 and 70 tokens go into their caches in pieces, beside one that is there after the first."""
    assert [widths_of(n) for n in (1, 16, 17, 64, 65, 200)] == [(16,), (16,), (32,), (64,), (64, 16), (64, 64, 64, 16)]
    lengths, tokens = (100, 70, 3), np.random.default_rng(2).integers(0, V, (3, 100)).astype(np.int32)
    mask = np.arange(100) < np.array(lengths)[:, None]
    given = params(), tokens, mask, row_keys(KEY, np.arange(6).reshape(3, 2)), Sampling(np.float32(0.8))
    scan, slots = (jax.device_get(f(DENSE, *given, max_tokens=6, stop_ids=()))
                   for f in (generate, functools.partial(joined, slots=4)))
    np.testing.assert_array_equal(slots.tokens, scan.tokens)
    np.testing.assert_allclose(slots.logprobs, scan.logprobs, atol=1e-5)
