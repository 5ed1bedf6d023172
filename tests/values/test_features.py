"""Spans of completions, pooling and the feature vector; captured by the model's own pass as from plain hidden states."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning.policy import Capture, Policy
from jaxrl_llm.learning.step import in_parts
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.values import features

CONFIG = ModelConfig(vocab_size=11, hidden_size=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, mlp_size=16)
MODEL = Transformer(CONFIG)


def test_pooling_takes_the_last_tokens_that_count():
    states = np.arange(1.0, 6.0)[:, None]  # rows 1..5, the first three real
    mask = np.array([True, True, True, False, False])
    for n, wanted in ((2, 2.5), (10, 2.0), (1, 3.0)):
        span = features.last_tokens(mask, n)
        assert features.pooled(states, span).tolist() == [wanted]
    holes = features.last_tokens(np.array([True, False, True, True, False]), 2)
    assert holes.tolist() == [False, False, True, True, False]
    assert features.pooled(np.full((3, 2), np.nan), np.zeros(3, bool)).tolist() == [0, 0]


def test_layers_by_number_and_by_depth():
    assert features.layer_index(19, 36) == 19 and features.layer_index(-1, 36) == 35
    assert features.layer_index(0.55, 36) == 19  # 20 of 36 blocks applied
    assert features.layer_index(1.0, 4) == 3 and features.layer_index(0.01, 4) == 0
    for wrong in (36, -37, 0.0, 1.5):
        with pytest.raises(ValueError, match="layer="):
            features.layer_index(wrong, 36)


def bits(mask):
    return "".join(str(int(x)) for x in np.asarray(mask))


@pytest.mark.parametrize("tokens, mask, reasoning, thinking, answer", [
    ("1789781234", "1111111111", "1111110000", "1111000000", "0000001111"),  # the last marker decides; it belongs to reasoning
    ("1234512345", "1111111100", "1111111100", "1111111100", "0000000000"),  # no marker: all of it
    ("1781200078", "1111100000", "1110000000", "1000000000", "0001100000"),  # one in the padding does not count
    ("7812345678", "1111111111", "1111111111", "1111111100", "0000000000"),  # at the very end: no answer
    ("7878000000", "1111000000", "1111000000", "1100000000", "0000000000"),
    ("1718000000", "1111000000", "1111000000", "1111000000", "0000000000"),  # its tokens must be neighbours
])
def test_spans_of_a_marker(tokens, mask, reasoning, thinking, answer):
    ids, real = np.array([int(c) for c in tokens]), np.array([c == "1" for c in mask])
    result = features.spans(ids[None, None], real[None, None], (7, 8))
    assert [bits(x[0, 0]) for x in result] == [reasoning, thinking, answer]


@pytest.mark.parametrize("tokens, reasoning", [
    ("1782378456", "1110000000"),  # 3 ... 4 is a call that quotes the marker
    ("3784378456", "1111111111"),  # no other marker: all of it
    ("3783784256", "1110000000"),  # a thought that opens a call and does not close it, then a call
    ("1342785555", "1111110000"), ("1378555555", "1111000000")])
def test_markers_that_a_call_quotes_end_no_thought(tokens, reasoning):
    ids, real = np.array([int(c) for c in tokens]), np.ones(10, bool)
    result = features.spans(ids[None, None], real[None, None], (7, 8), ((3,), (4,)))
    assert bits(result.reasoning[0, 0]) == reasoning


def test_without_a_marker_or_with_one_that_cannot_fit_all_is_reasoning():
    mask = np.array([[True, True, False]])
    for marker in ((), (1, 2, 3, 4)):
        result = features.spans(np.ones((1, 3), int), mask, marker)
        assert bits(result.reasoning[0]) == bits(result.thinking[0]) == "110" and bits(result.answer[0]) == "000"


def test_entropies_of_the_parts():
    entropies, mask = jnp.array([1.0, 2.0, 6.0, 5.0, 9.0]), np.array([True, True, True, True, False])
    result = features.mean_entropies(entropies, mask, features.spans(np.array([1, 2, 7, 4, 0]), mask, (7,)))
    assert result.tolist() == [3.5, 1.5, 5.0]
    nothing = features.mean_entropies(entropies, ~(mask | True), features.spans(np.zeros(5, int), ~(mask | True), (7,)))
    assert nothing.tolist() == [0, 0, 0]


def test_phi_repeats_the_prompt_for_its_rollouts():
    prompt, states, u = jnp.ones((2, 4)), 2 * jnp.ones((2, 3, 4)), 3 * jnp.ones((2, 3, 3))
    result = features.phi(prompt, states, u)
    assert result.shape == (2, 3, features.feature_size(4)) and result[1, 2].tolist() == [1] * 4 + [2] * 4 + [3] * 3


@pytest.fixture(scope="module")
def scored():
    rng = np.random.default_rng(0)
    P, G, S, T = 4, 3, 5, 7
    prompt_mask = np.arange(S) < rng.integers(1, S + 1, (P, 1))
    rollouts = Rollouts(mask=np.arange(T) < rng.integers(1, T + 1, (P, G, 1)), valid=np.ones((P, G), bool),
                        tokens=rng.integers(0, 3, (P, G, T)), prompt_tokens=rng.integers(0, 11, (P, S)),
                        prompt_mask=prompt_mask)
    params, policy, capture = MODEL.init(jax.random.key(0)), Policy(MODEL, 0.7), Capture(1, pool=2, marker=(2,))
    result = jax.jit(lambda r: policy.logprobs_and_features(params, None, r, capture))(rollouts)
    return rollouts, params, policy, capture, result


def test_captured_features_are_those_of_plain_rows(scored):
    rollouts, params, policy, capture, (logprobs, entropies, result) = scored
    alone = jax.jit(policy.logprobs)(params, None, rollouts)
    np.testing.assert_allclose(logprobs, alone[0], rtol=1e-5, atol=1e-5)
    pairs = list(np.ndindex(rollouts.valid.shape))
    parts = [(rollouts.prompt_tokens[p][rollouts.prompt_mask[p]], rollouts.tokens[p, g][rollouts.mask[p, g]]) for p, g in pairs]
    rows = np.zeros((len(parts), 12), int)
    for row, part in zip(rows, parts):
        row[:len(part[0]) + len(part[1])] = np.concatenate(part)
    real = np.arange(12) < [[len(prompt) + len(tokens)] for prompt, tokens in parts]
    streams = jax.jit(lambda rows: MODEL.hidden_states(params, rows, real, pool=lambda x: x)[2])(rows)  # [L, B, N, D]
    for (p, g), (prompt, tokens), stream in zip(pairs, parts, np.asarray(streams[1])):
        end = np.flatnonzero(tokens == 2)[-1] + 1 if (tokens == 2).any() else len(tokens)
        marked = (tokens == 2).any()
        own = np.asarray(entropies[p, g][:len(tokens)])
        def mean(x):
            return x.mean() if len(x) else 0.0
        u = [own.mean(), mean(own[:end - marked]), mean(own[end:]) if marked else 0.0]
        wanted = [*stream[:len(prompt)][-2:].mean(0), *stream[len(prompt):len(prompt) + end][-2:].mean(0), *u]
        np.testing.assert_allclose(result[p, g], wanted, rtol=1e-4, atol=1e-5)


def test_several_layers_at_once_and_in_parts(scored):
    rollouts, params, policy, capture, (_, _, result) = scored
    several = Capture((0, 1), pool=2, marker=(2,))
    def whole(params, lora, r):
        return policy.logprobs_and_features(params, lora, r, several)
    both = jax.jit(in_parts(whole, 2))(params, None, rollouts)[2]
    assert both.shape == (4, 3, 2, 19)
    np.testing.assert_allclose(both[:, :, 1], result, rtol=1e-5, atol=1e-5)
    assert np.abs(both[:, :, 0] - result).max() > 1e-3


def test_padding_changes_no_feature(scored):
    rollouts, params, policy, capture, (_, _, result) = scored
    wide = rollouts.replace(
        prompt_tokens=np.pad(rollouts.prompt_tokens, ((0, 0), (3, 0))),
        prompt_mask=np.pad(rollouts.prompt_mask, ((0, 0), (3, 0))),
        tokens=np.pad(rollouts.tokens, ((0, 0), (0, 0), (0, 2)), constant_values=2),
        mask=np.pad(rollouts.mask, ((0, 0), (0, 0), (0, 2))))
    again = jax.jit(lambda r: policy.logprobs_and_features(params, None, r, capture))(wide)[2]
    np.testing.assert_allclose(again, result, rtol=1e-4, atol=1e-5)


def test_no_state_of_every_token_leaves_the_pass(scored):
    rollouts, params, policy, capture, _ = scored
    P, G, T = rollouts.mask.shape
    shapes = jax.eval_shape(lambda r: policy.logprobs_and_features(params, None, r, capture), rollouts)
    assert [x.shape for x in shapes] == [(P, G, T), (P, G, T), (P, G, 19)]
