"""Floating-point operations of training and sampling, counted over useful tokens: padding and recomputation are not work.

Conventions of arXiv 2510.13786 and of the usual model FLOP utilisation: 2 operations per multiply-add, 3 forward passes for a
training pass, no count for norms, activations and the embedding look-up.
"""
from collections.abc import Sequence

from jaxrl_llm.models.config import ModelConfig


def matmul_parameters(c: ModelConfig, *, unembedding: bool = True, experts: int | None = None) -> int:
    """Weights that a token is multiplied with: `N = L (d h (2 n_q + 2 n_kv) + 3 d m) + V d`.

    A mixture of experts has `3 d m k + d E` instead of `3 d m`, and `3 d m_s + d` for an expert that all tokens share.
    `experts` replaces k: `experts=c.experts.count` counts all weights of the model.
    """
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    mlp, e = 3 * c.hidden_size * c.mlp_size, c.experts
    if e is not None:
        mlp = c.hidden_size * (3 * e.size * (e.per_token if experts is None else experts) + e.count)
        mlp += c.hidden_size * (3 * e.shared_size + 1) if e.shared_size else 0
    return c.num_layers * (attention + mlp) + (c.vocab_size * c.hidden_size if unembedding else 0)


def attention_flops(c: ModelConfig, queries: int, before: int = 0) -> int:
    """Scores and weighted values of `queries` causal tokens that follow `before` others: `4 L d_a sum of contexts`."""
    contexts = queries * before + queries * (queries + 1) // 2
    return 4 * c.num_layers * c.num_heads * c.head_dim * contexts


def forward_flops(c: ModelConfig, tokens: int) -> int:
    """One causal pass over a sequence: `2 N s + 4 L d_a s (s + 1) / 2`."""
    return 2 * matmul_parameters(c) * tokens + attention_flops(c, tokens)


def prefill_flops(c: ModelConfig, prompts: Sequence[int]) -> int:
    """Prompts of the given lengths, each once for its whole group; logits of every position are counted."""
    return sum(forward_flops(c, length) for length in prompts)


def decode_flops(c: ModelConfig, prompt: int, completion: int) -> int:
    """Decoding `completion` tokens after a prompt; the last one is not fed back."""
    steps = completion - 1
    return 2 * matmul_parameters(c) * steps + attention_flops(c, steps, before=prompt)


def packed_flops(c: ModelConfig, prompt: int, completions: Sequence[int]) -> int:
    """Log-probs of a group whose prompt is computed once: layers over all tokens, logits at completion tokens only."""
    tokens = prompt + sum(completions)
    attention = attention_flops(c, prompt) + sum(attention_flops(c, n, before=prompt) for n in completions)
    layers = 2 * matmul_parameters(c, unembedding=False) * tokens
    return layers + 2 * c.vocab_size * c.hidden_size * sum(completions) + attention


def update_flops(c: ModelConfig, prompt: int, completions: Sequence[int]) -> int:
    """Forward and backward pass of one group: three times its forward pass."""
    return 3 * packed_flops(c, prompt, completions)
