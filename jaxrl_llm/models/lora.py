"""Low-rank adapters: W + A B with A and B trained and W frozen (LoRA, arXiv 2106.09685).

An adapter tree is separate from the parameters and is passed beside them: `model.hidden_states(params, ..., lora=lora)`.
"""
import difflib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


def init(key: jax.Array, params: Any, rank: int, alpha: float, targets: Sequence[str] | None = None) -> dict:
    """Adapters `{target: {'a': f32[L, in, rank], 'b': f32[L, rank, out]}}` that change nothing yet (b = 0).

    The paper's scale alpha/rank is folded into the initial A, whose standard deviation is (alpha/rank) / sqrt(in): the product
    A B is then the whole update, and only the tree has to be kept. Without `targets`, all matrices except those of a mixture's
    experts get adapters; experts cannot have any. Raises ValueError for an unknown target, one that the model lacks, or a rank
    below 1.
    """
    if rank < 1:
        raise ValueError(f"rank={rank}; it must be at least 1")
    targets = [target for target in TARGETS if target in params["layers"]] if targets is None else targets
    for target in targets:
        if target not in TARGETS:
            near = difflib.get_close_matches(target, TARGETS, n=1, cutoff=0.0)
            raise ValueError(f"unknown LoRA target {target!r}; allowed: {', '.join(TARGETS)}; nearest: {near[0]!r}")
        if target not in params["layers"]:
            raise ValueError(f"LoRA target {target!r} is a layer of experts in this model, which have no adapters; allowed: "
                             f"{', '.join(name for name in TARGETS if name in params['layers'])}")
    lora = {}
    for target, target_key in zip(targets, jax.random.split(key, len(targets)), strict=True):
        layers, fan_in, fan_out = params["layers"][target]["kernel"].shape
        a = jax.random.normal(target_key, (layers, fan_in, rank), jnp.float32) * (alpha / rank * fan_in**-0.5)
        lora[target] = {"a": a, "b": jnp.zeros((layers, rank, fan_out), jnp.float32)}
    return lora


def merge(params: Any, lora: Any) -> Any:
    """Parameters with every adapter added into its matrix, W + A B; the model then runs and is saved without them."""
    layers = dict(params["layers"])
    for target, adapter in lora.items():
        kernel = layers[target]["kernel"]
        update = jnp.einsum("lir,lro->lio", adapter["a"], adapter["b"])
        layers[target] = layers[target] | {"kernel": (kernel + update).astype(kernel.dtype)}
    return params | {"layers": layers}
