"""Low-rank adapters: W + (alpha / rank) A B with A and B trained and W frozen (LoRA, arXiv 2106.09685).

An adapter tree is separate from the parameters and is passed beside them: `model.hidden_states(params, ..., lora=lora)`.
"""
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxrl_llm.tools import key_values
from jaxrl_llm.tools.registry import Conflict

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@jax.tree_util.register_pytree_with_keys_class
class Adapters(dict[str, Any]):
    """`{target: {'a': f32[L, in, rank], 'b': f32[L, rank, out]}}`, added to the matrices as `scale` A B.

    A pytree with the paths of this dict. The scale is no leaf: it is constant in compiled programs, no optimiser moves it, and
    trees of another scale have another structure.
    """

    def __init__(self, matrices: Mapping[str, Any] | Iterable[tuple[str, Any]], scale: float):
        super().__init__(matrices)
        self.scale = scale

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[tuple[str, ...], float]]:
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], (names, self.scale)

    @classmethod
    def tree_unflatten(cls, structure: tuple[tuple[str, ...], float], children: Iterable[Any]) -> Self:
        names, scale = structure
        return cls(zip(names, children, strict=True), scale)


def init(key: jax.Array, params: Any, rank: int, alpha: float, targets: Sequence[str] | None = None) -> Adapters:
    """Adapters with the scale `alpha / rank` that change nothing yet (b = 0).

    A is normal with standard deviation 1 / sqrt(in); that of PEFT is uniform with 1 / sqrt(3 in). Without `targets`, all
    matrices except those of a mixture's experts get adapters; experts cannot have any. Raises ValueError for an unknown target,
    one that the model lacks, or a rank below 1.
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
    lora = Adapters({}, alpha / rank)
    for target, target_key in zip(targets, jax.random.split(key, len(targets)), strict=True):
        layers, fan_in, fan_out = params["layers"][target]["kernel"].shape
        a = jax.random.normal(target_key, (layers, fan_in, rank), jnp.float32) * fan_in**-0.5
        lora[target] = {"a": a, "b": jnp.zeros((layers, rank, fan_out), jnp.float32)}
    return lora


def scaled(lora: Adapters | None) -> dict[str, dict[str, Any]] | None:
    """The matrices with the scale in A, so that A B is the whole update; None of None."""
    return None if lora is None else {target: {"a": lora.scale * one["a"], "b": one["b"]} for target, one in lora.items()}


def joined(first: Adapters, second: Adapters) -> Adapters:
    """One adapter with the updates of both, `[A1 A2]` and `[B1; B2]`, of scale 1; 0 for a target that one of them lacks."""
    def part(tree, target, shapes):
        rank = max(one["a"].shape[-1] for one in tree.values())
        one = tree.get(target, {"a": jnp.zeros((*shapes[0], 0)), "b": jnp.zeros((shapes[1][0], 0, shapes[1][1]))})
        missing = rank - one["a"].shape[-1]
        return jnp.pad(one["a"], ((0, 0), (0, 0), (0, missing))), jnp.pad(one["b"], ((0, 0), (0, missing), (0, 0)))

    trees, both = (scaled(first) or {}, scaled(second) or {}), Adapters({}, 1.0)
    for target in {**first, **second}:
        like = first.get(target) or second[target]
        shapes = like["a"].shape[:2], like["b"].shape[::2]
        (a1, b1), (a2, b2) = (part(tree, target, shapes) for tree in trees)
        both[target] = {"a": jnp.concatenate([a1, a2], axis=2), "b": jnp.concatenate([b1, b2], axis=1)}
    return both


def merge(params: Any, lora: Adapters) -> Any:
    """Parameters with every adapter added into its matrix; the model then runs and is saved without them."""
    layers = dict(params["layers"])
    for target, adapter in (scaled(lora) or {}).items():
        kernel = layers[target]["kernel"]
        update = jnp.einsum("lir,lro->lio", adapter["a"], adapter["b"])
        layers[target] = layers[target] | {"kernel": (kernel + update).astype(kernel.dtype)}
    return params | {"layers": layers}


_OF_WEIGHTS = "method {method!r} updates the reference from full weights; LoRA does not change them", (
    "set lora.rank=0, or take another method")
CONFLICTS = tuple(Conflict(("config.lora.rank", knob), *_OF_WEIGHTS) for knob in ("knobs.reference", "knobs.reset"))


def keys(c: ConfigDict) -> None:
    """Low-rank adapters on frozen weights."""
    c.lora = ConfigDict()              # low-rank adapters on frozen weights
    c.lora.rank = 0                    # rank of the adapters; 0: all weights are trained
    c.lora.alpha = 16.0                # W + alpha / rank A B; the first A is normal, with standard deviation 1 / sqrt(in)


def check_keys(config: ConfigDict) -> Iterator[str]:
    """A line for each value that cannot work."""
    yield from key_values.at_least(config, 0, "lora.rank")
    if not 0 < config.lora.alpha < float("inf"):
        yield f"config.lora.alpha is {config.lora.alpha}; give a finite number above 0"
