"""The compiled sampler on a tiny real model: parity with a full forward pass, replay of a row, early stop, masks."""
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.engines import Sampling, generate, row_keys, sampler
from jaxrl_llm.engines.compaction import half, holds
from jaxrl_llm.engines.sampler import chunk_of, halvings, stages
from jaxrl_llm.kernels.products import reads_transposed
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models import ModelConfig, Transformer

V, P, G, S, T = 64, 3, 4, 5, 12
MODEL = Transformer(ModelConfig(vocab_size=V, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                                mlp_size=48, tie_embeddings=False))
SEED = jax.random.key(7)
STOP = 7  # drawn now and then: the random model below is close to uniform over 64 tokens


@functools.cache
def params():
    fresh = MODEL.init(jax.random.key(0))
    louder = jax.tree.map(lambda x: x * 8 if x.ndim == 3 else x, fresh["layers"])  # so that the context matters
    return fresh | {"layers": louder, "embed": fresh["embed"] * 30, "unembed": fresh["unembed"] * 8}  # logits of spread 1


def prompts():
    mask = np.ones((P, S), bool)
    mask[0, :2], mask[1, 3:] = False, False  # left and right padding
    return np.random.default_rng(5).integers(0, V, (P, S)).astype(np.int32), mask


def run(tokens=None, mask=None, rows=None, *, temperature=0.8, stop_ids=(STOP, 9), max_tokens=T, chunk=5, **options):
    default = prompts()
    rows = np.arange(P * G).reshape(P, G) if rows is None else np.asarray(rows)
    tokens, mask = (default[0] if tokens is None else tokens), (default[1] if mask is None else mask)
    sampling = Sampling(np.float32(temperature), **options)
    return jax.device_get(generate(MODEL, params(), tokens, mask, row_keys(SEED, rows), sampling, max_tokens=max_tokens,
                                   stop_ids=tuple(stop_ids), chunk=chunk))


@functools.cache
def reference():
    return run()


def rollouts_of(found):
    tokens, mask = prompts()
    return Rollouts(mask=found.mask, valid=np.ones(found.mask.shape[:2], bool), tokens=found.tokens, prompt_tokens=tokens,
                    prompt_mask=mask)


def full_logits(p, completion):
    """Logits before each completion token, from one plain forward pass over the unpadded sequence."""
    tokens, mask = prompts()
    prompt = tokens[p][mask[p]]
    row = np.zeros((1, S + T), np.int32)
    row[0, :len(prompt) + len(completion)] = [*prompt, *completion]
    states, _, _ = jax.jit(MODEL.hidden_states)(params(), row, np.arange(S + T)[None] < len(prompt) + len(completion))
    logits = np.asarray(MODEL.logits(params(), states)[0], np.float64)
    return logits[len(prompt) - 1:len(prompt) + len(completion) - 1]


def test_cached_decoding_draws_from_the_distribution_of_a_full_forward_pass():
    found = reference()
    for p in range(P):
        for g in (0, G - 1):
            length = found.mask[p, g].sum()
            completion = found.tokens[p, g, :length]
            z = full_logits(p, completion) / 0.8
            logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
            np.testing.assert_allclose(found.logprobs[p, g, :length], logp[np.arange(length), completion], atol=1e-4)
            np.testing.assert_allclose(found.entropies[p, g, :length], -(np.exp(logp) * logp).sum(-1), atol=1e-4)


@pytest.mark.slow
def test_greedy_tokens_are_those_of_a_full_forward_pass():
    found = run(temperature=0.0, stop_ids=())
    assert found.mask.all() and not found.stopped.any()
    for p in range(P):
        assert (found.tokens[p] == found.tokens[p, 0]).all()
        assert found.tokens[p, 0].tolist() == full_logits(p, found.tokens[p, 0]).argmax(-1).tolist()


def test_sampler_and_learner_give_the_same_logprobs():
    found = reference()
    logprobs, entropies = jax.jit(Policy(MODEL, temperature=0.8, chunk=50).logprobs)(params(), None, rollouts_of(found))
    np.testing.assert_allclose(np.where(found.mask, logprobs, 0), found.logprobs, atol=1e-4)
    np.testing.assert_allclose(np.where(found.mask, entropies, 0), found.entropies, atol=1e-4)


def test_masks_run_to_the_stop_token_and_nothing_follows():
    found = reference()
    lengths = found.mask.sum(-1)
    assert found.stopped.any() and (~found.stopped).any()  # both endings occur in this batch
    for p, g in np.ndindex(P, G):
        length, row = lengths[p, g], found.tokens[p, g]
        assert found.mask[p, g].tolist() == [True] * length + [False] * (T - length)
        hits = np.flatnonzero(np.isin(row[:length], (STOP, 9)))
        assert hits.tolist() == ([length - 1] if found.stopped[p, g] else [])  # counted, and only ever the last one
        assert found.stopped[p, g] or length == T
        for values in (row, found.logprobs[p, g], found.entropies[p, g]):
            assert not values[length:].any()
        assert (found.logprobs[p, g, :length] < 0).all()


def test_a_row_drawn_alone_is_the_row_drawn_in_its_batch():
    found, (tokens, mask) = reference(), prompts()
    p, g = 1, 2
    alone = run(tokens[p:p + 1], mask[p:p + 1], [[p * G + g]])
    np.testing.assert_array_equal(alone.tokens[0, 0], found.tokens[p, g])
    np.testing.assert_allclose(alone.logprobs[0, 0], found.logprobs[p, g], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("side", ("left", "right"))
def test_padding_of_the_prompt_changes_nothing(side):
    found, (tokens, mask) = reference(), prompts()
    wide, wide_mask = np.full((P, S + 4), 63, np.int32), np.zeros((P, S + 4), bool)
    for p in range(P):
        real = tokens[p][mask[p]]
        place = slice(S + 4 - len(real), None) if side == "left" else slice(len(real))
        wide[p, place], wide_mask[p, place] = real, True
    again = run(wide, wide_mask)
    np.testing.assert_array_equal(again.tokens, found.tokens)
    np.testing.assert_allclose(again.logprobs, found.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("added", (2, 20))
def test_another_order_of_prompts_and_a_larger_group_keep_every_row(added):
    assert reads_transposed(P * (G + 20), T) and not reads_transposed(P * (G + 2), T)  # both orders of the matrix products
    found, (tokens, mask) = reference(), prompts()
    order = [2, 0, 1]
    rows = np.concatenate([np.arange(P * G).reshape(P, G)[order], 100 + np.arange(P * added).reshape(P, added)], axis=1)
    again = run(tokens[order], mask[order], rows)
    np.testing.assert_array_equal(again.tokens[:, :G], found.tokens[order])
    np.testing.assert_array_equal(again.stopped[:, :G], found.stopped[order])
    np.testing.assert_allclose(again.logprobs[:, :G], found.logprobs[order], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", (1, 4, 12, 64))
def test_chunk_size_does_not_change_samples(chunk):
    found, again = reference(), run(chunk=chunk)
    for name in ("tokens", "mask", "stopped"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))
    np.testing.assert_allclose(again.logprobs, found.logprobs, atol=1e-5)


@pytest.mark.slow
def test_decoding_ends_with_the_longest_row():
    one = run(stop_ids=range(V))
    assert one.decode_steps == 0 and (one.mask.sum(-1) == 1).all() and one.stopped.all()  # the prefill's token stops
    half = run(stop_ids=range(0, V, 2), chunk=1)
    longest = half.mask.sum(-1).max()
    assert half.decode_steps == longest - 1 and 2 < longest < T
    assert run(stop_ids=range(0, V, 2), chunk=11).decode_steps == T - 1  # one chunk of all steps
    assert reference().decode_steps == T - 1  # some row was cut


@pytest.mark.slow
def test_one_token_and_lengths_that_the_chunk_does_not_divide():
    first = run(max_tokens=1)
    np.testing.assert_array_equal(first.tokens[:, :, 0], reference().tokens[:, :, 0])
    assert first.tokens.shape == (P, G, 1) and first.mask.all() and first.decode_steps == 0
    seven = run(max_tokens=7, chunk=4)
    np.testing.assert_array_equal(seven.tokens, reference().tokens[:, :, :7])
    np.testing.assert_array_equal(seven.mask, reference().mask[:, :, :7])
    np.testing.assert_array_equal(seven.stopped, reference().stopped & (reference().mask.sum(-1) <= 7))
    assert seven.decode_steps == 6


@pytest.mark.slow
@pytest.mark.parametrize("length, stop_ids", ((128, (STOP,)), (2048, (STOP, 9))))
def test_lengths_of_any_size_are_decoded_in_chunks(length, stop_ids):
    """127 and 2047 steps have no divisor up to 16: the tokens of step by step, by chunks of 16 and one step too many."""
    found, steps = (run(max_tokens=length, stop_ids=stop_ids, chunk=chunk) for chunk in (16, 1))
    assert found.tokens.shape == (P, G, length)
    for name in ("tokens", "mask", "stopped"):
        np.testing.assert_array_equal(getattr(found, name), getattr(steps, name))
    np.testing.assert_allclose(found.logprobs, steps.logprobs, atol=1e-5)
    assert found.decode_steps == min(16 * -(-steps.decode_steps // 16), length - 1)
    assert length > 128 or not found.stopped.all()  # and nobody who goes on beyond the last token counts as stopped


@pytest.mark.slow
@pytest.mark.parametrize("length", (128, 2048, 8192))
def test_chunks_have_the_size_that_is_asked_for(length):
    sample = jax.jit(functools.partial(generate, MODEL, max_tokens=length, stop_ids=(STOP,)))
    program = sample.trace(params(), *prompts(), row_keys(SEED, np.arange(P * G).reshape(P, G)), Sampling()).jaxpr
    lengths = set(map(int, re.findall(r"\blength=(\d+)", str(program))))
    assert 16 in lengths and not lengths & set(range(3, 16)) and 1 not in lengths  # 2: the layers of the prefill


def test_no_more_steps_are_run_than_fill_the_last_chunk():
    for steps in range(1, 400):
        for chunk in (1, 2, 5, 16, 64):
            size, divisors = chunk_of(steps, chunk), [n for n in range(1, min(chunk, steps) + 1) if steps % n == 0]
            assert min(chunk, steps) / 2 < size <= min(chunk, steps)
            assert -steps % size <= -steps % min(chunk, steps)
            if 2 * divisors[-1] > min(chunk, steps):
                assert size == divisors[-1]  # none at all
    assert [chunk_of(steps, 16) for steps in (0, 1, 17, 31, 127, 2047, 8191)] == [1, 1, 9, 16, 16, 16, 16]


@pytest.mark.slow
def test_caches_grow_on_the_way_of_long_completions():
    """66 slots are two stages: rows end in either, and every log-prob is the learner's, who knows of no stages."""
    assert stages(66, 11) == ((55, 64), (66, 96))
    found = run(max_tokens=67, chunk=11, stop_ids=(STOP,))
    lengths = found.mask.sum(-1)
    assert (lengths <= 55).any() and (lengths > 56).any()
    logprobs, entropies = jax.jit(Policy(MODEL, temperature=0.8, chunk=300).logprobs)(params(), None, rollouts_of(found))
    np.testing.assert_allclose(np.where(found.mask, logprobs, 0), found.logprobs, atol=1e-4)
    np.testing.assert_allclose(np.where(found.mask, entropies, 0), found.entropies, atol=1e-4)
    np.testing.assert_array_equal(found.tokens[:, :, :T], run(stop_ids=(STOP,)).tokens)
    assert run(max_tokens=67, chunk=11, stop_ids=range(V)).decode_steps == 0
    early = run(max_tokens=67, chunk=11, stop_ids=range(0, V, 2))
    longest = early.mask.sum(-1).max()
    assert early.decode_steps == 11 * -(-(longest - 1) // 11) <= 22  # later stages run no step


@pytest.mark.slow
def test_finished_rows_are_left_out_of_long_completions():
    """Every row of a batch that is halved twice is the row of a batch too small for that, and its log-probs the learner's."""
    many, length = 12, 67
    assert halvings(P * many, length - 1) == 2 and halvings(many, length - 1) == 0
    rows, (tokens, mask) = 72 + np.arange(P * many).reshape(P, many), prompts()  # of which some are long
    options = dict(max_tokens=length, chunk=3, stop_ids=(STOP, 9, 11))
    found = run(rows=rows, **options)
    def alive(t):
        return found.mask.sum(-1) > t
    halved = next(t for t in range(1, length, 3) if holds(alive(t)))  # counted in tokens, at the ends of chunks
    part = half(alive(halved))
    again = next(t for t in range(halved, length, 3) if holds(part.take(alive(t))))
    assert halved < again < found.mask.sum(-1).max() and alive(again).any(1).all()  # rows of all prompts go on after both
    for p in range(P):
        few = run(tokens[p:p + 1], mask[p:p + 1], rows[p:p + 1], **options)
        for name in ("tokens", "mask", "stopped"):
            np.testing.assert_array_equal(getattr(few, name)[0], getattr(found, name)[p])
        np.testing.assert_allclose(few.logprobs[0], found.logprobs[p], atol=1e-5)
        np.testing.assert_allclose(few.entropies[0], found.entropies[p], atol=1e-5)
    logprobs, _ = jax.jit(Policy(MODEL, temperature=0.8, chunk=300).logprobs)(params(), None, rollouts_of(found))
    np.testing.assert_allclose(np.where(found.mask, logprobs, 0), found.logprobs, atol=1e-4)


@pytest.mark.slow
def test_decoding_does_leave_for_the_half(monkeypatch):
    rows = np.arange(P * 12).reshape(P, 12)
    options = dict(rows=rows, max_tokens=67, stop_ids=(STOP, 9, 11))
    found = run(chunk=3, **options)
    monkeypatch.setattr(sampler, "half", lambda alive: half(~alive))  # finished rows go on, the others end there
    lost = run(chunk=2, **options)
    assert lost.mask.sum() < found.mask.sum() and lost.decode_steps < found.decode_steps


@pytest.mark.parametrize("slots,chunk,expected", [
    (1, 1, ((1, 1),)), (15, 5, ((15, 15),)), (16, 16, ((16, 32),)), (23, 1, ((23, 32),)), (31, 1, ((31, 32),)),
    (42, 14, ((42, 64),)), (64, 16, ((32, 32), (64, 64))),
    (66, 11, ((55, 64), (66, 96))), (127, 1, ((32, 32), (64, 64), (96, 96), (127, 128))),
    (2047, 1, ((512, 512), (1024, 1024), (1536, 1536), (2047, 2048))),
    (4095, 15, ((1020, 1024), (2040, 2048), (3060, 3072), (4095, 4096)))])
def test_stages_of_a_cache(slots, chunk, expected):
    assert stages(slots, chunk) == expected


def test_every_stage_has_room_for_its_steps_and_grows():
    for slots in range(1, 700):
        for chunk in (n for n in range(1, 17) if slots % n == 0):
            steps, rooms = zip(*stages(slots, chunk))
            assert steps[-1] == slots and all(n % chunk == 0 for n in steps)
            assert all(n <= room for n, room in zip(steps, rooms))
            assert list(steps) == sorted(set(steps)) and list(rooms) == sorted(set(rooms))


@pytest.mark.slow
def test_a_stop_token_with_id_zero_counts_although_padding_is_zero_too():
    found = run(rows=4 + np.arange(P * G).reshape(P, G), stop_ids=(0,) + tuple(range(1, V, 3)), chunk=1)
    ends = np.take_along_axis(found.tokens, found.mask.sum(-1, keepdims=True) - 1, axis=2)[..., 0]
    assert ((ends == 0) & found.stopped).any()  # the case occurs
    assert found.stopped[ends == 0].all()


@pytest.mark.slow
def test_top_k_restricts_tokens_and_logprobs_describe_the_restricted_distribution():
    found = run(top_k=2, stop_ids=())
    z = full_logits(0, found.tokens[0, 0]) / 0.8
    best = np.sort(z, axis=-1)[:, -2:]
    chosen = z[np.arange(T), found.tokens[0, 0]]
    assert (chosen >= best[:, 0] - 1e-5).all()
    np.testing.assert_allclose(found.logprobs[0, 0], chosen - np.log(np.exp(best).sum(-1)), atol=1e-4)


def test_row_keys_depend_on_the_row_id_alone():
    def data(rows):
        return jax.random.key_data(row_keys(SEED, jnp.asarray(rows)))
    np.testing.assert_array_equal(data([[0, 1], [2, 3]])[1, 0], data([[2]])[0, 0])
    assert len(np.unique(data(np.arange(100)[None])[0], axis=0)) == 100


@pytest.mark.parametrize("limit", (1, 3, 5, T, 2 * T))
def test_completions_end_at_a_limit_of_their_own(limit):
    """The first tokens of the same draws; a row that ends there has not stopped unless its last token stops."""
    default, whole = prompts(), reference()
    rows = row_keys(SEED, np.arange(P * G).reshape(P, G))
    cut = jax.device_get(generate(MODEL, params(), *default, rows, Sampling(np.float32(0.8), max_tokens=np.int32(limit)),
                                  max_tokens=T, stop_ids=(STOP, 9), chunk=5))
    mask = whole.mask & (np.arange(T) < limit)
    np.testing.assert_array_equal(cut.mask, mask)
    np.testing.assert_array_equal(cut.tokens, np.where(mask, whole.tokens, 0))
    np.testing.assert_allclose(cut.logprobs, np.where(mask, whole.logprobs, 0), atol=1e-6)
    np.testing.assert_array_equal(cut.stopped, whole.stopped & (whole.mask.sum(-1) <= limit))
