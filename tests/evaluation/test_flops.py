"""Counted operations: published numbers, the compiler's own count, and a packed group against plain rows."""
import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.evaluation import flops
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer

SMALL = ModelConfig(vocab_size=1000, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=192)


def test_parameters_of_two_models():
    assert flops.matmul_parameters(SMALL) == 162_304
    qwen = ModelConfig(vocab_size=151_936, hidden_size=896, num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64,
                       mlp_size=4864)
    assert flops.matmul_parameters(qwen) == 493_961_216


def test_a_step_by_hand():
    """Two prompts of 8 and 12 tokens with completions [4, 6, 10, 5] and [7, 7, 3, 9]."""
    assert flops.prefill_flops(SMALL, [8, 12]) == 6_550_528
    groups = ((8, (4, 6, 10, 5)), (12, (7, 7, 3, 9)))
    assert sum(flops.decode_flops(SMALL, p, n) for p, lengths in groups for n in lengths) == 14_259_712


def test_a_group_of_one_equals_a_plain_row_but_for_the_prompts_logits():
    plain = flops.forward_flops(SMALL, 8 + 5)
    assert flops.packed_flops(SMALL, 8, [5]) == plain - 2 * 1000 * 64 * 8
    assert flops.update_flops(SMALL, 8, [5, 5]) < 2 * flops.update_flops(SMALL, 8, [5])


def test_the_compiler_counts_the_same_for_one_layer():
    """XLA counts the body of a scan once and all of a causal square: one layer, and attention counted as a square."""
    config = ModelConfig(vocab_size=512, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=16, mlp_size=192)
    model, tokens = Transformer(config), jnp.zeros((1, 64), jnp.int32)
    params = model.init(jax.random.key(0))
    def forward(p):
        return model.logits(p, model.hidden_states(p, tokens, tokens == 0)[0])
    result = jax.jit(forward).lower(params).compile().cost_analysis()["flops"]
    square = 2 * flops.matmul_parameters(config) * 64 + 4 * 64 * 64 * 64
    assert result == pytest.approx(square, rel=0.07)
