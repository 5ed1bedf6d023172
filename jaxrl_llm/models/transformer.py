"""One decoder-only transformer for all families of `models.families`, as pure functions of its parameters.

Four ways through the same layers, all giving the same numbers:
  `hidden_states`  every token of `[B, N]` rows, causal; the plain reference, and the prefill that fills a cache.
  `packed_states`  a prompt and its G completions in one packed row, so that prompt tokens are computed once.
  `tree_states`    packed rows of any trees of tokens, so that each node is computed once for all that descends from it.
  `decode_step`    one new token per row against a cache, for sampling.
Parameters are one tree: `embed [V, D]`, `layers` (every leaf stacked over L), `final_norm`, and `unembed` if not tied.
"""
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_llm.kernels.attention import SAVED
from jaxrl_llm.kernels.int8 import Int8, int8
from jaxrl_llm.kernels.norm import rms_norm
from jaxrl_llm.kernels.products import transpose
from jaxrl_llm.models import moe
from jaxrl_llm.models.attention import (
    Rotations,
    apply_rotary,
    by_cudnn,
    group_by_cudnn,
    grouped_attention,
    held,
    in_blocks,
    in_window,
    rotations,
    tree_attention,
)
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.linear import Dense
from jaxrl_llm.models.logprobs import finished
from jaxrl_llm.models.lora import scaled
from jaxrl_llm.models.unpadding import Unpadding, through_last, unpadding

Params = Any


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (scale + offset) over the last axis, in float32; see `rms_norm`."""

    eps: float
    offset: float
    by_head: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.constant(1.0 - self.offset)
        scale = self.param("scale", init, (x.shape[-1],), jnp.float32)
        return rms_norm(x, scale, self.offset, self.eps, self.by_head)


class Block(nn.Module):
    """Attention and gated MLP (or a mixture) around a residual stream; the caller's `attend` computes attention."""

    config: ModelConfig
    dtype: Any
    transposed: bool = False
    kernels: str = "plain"

    @nn.compact
    def __call__(self, x, rotation, attend, experts=None):
        """`x [..., D]`, `rotation = (cos, sin)`, see `rotations`; `attend(q, k, v) -> (out, kept)`; returns `(x, kept)`.

        `experts`: those of a mixture to take instead of the router's, see `moe.Router`.
        """
        c = self.config
        def dense(features, name, bias=False):
            return Dense(features, self.dtype, bias, self.transposed, name=name)
        def norm(name, by_head=False):
            return RMSNorm(c.norm_eps, c.norm_offset, by_head, name=name)
        def heads(y, n):
            return y.reshape(*y.shape[:-1], n, c.head_dim)

        def projected(name, n, normed=False):
            y = dense(n * c.head_dim, name, c.qkv_bias)(h)
            return heads(norm(f"{name}_norm")(y) if normed else y, n)

        def added(out, name):
            out = norm(name)(out) if c.post_norms else out
            return x + (out if c.residual_scale == 1.0 else out * jnp.asarray(c.residual_scale, out.dtype))

        h = norm("attention_norm")(x) if c.pre_norms else x
        whole = c.qk_norm and c.qk_norm_whole
        q, k = projected("q", c.num_heads, whole), projected("k", c.num_kv_heads, whole)
        v = projected("v", c.num_kv_heads)
        if c.qk_norm and not whole:
            q, k = norm("q_norm", by_head=True)(q), norm("k_norm", by_head=True)(k)
        out, kept = attend(apply_rotary(q, *rotation), apply_rotary(k, *rotation), v)
        x = added(dense(c.hidden_size, "o", c.o_bias)(out.reshape(*out.shape[:-2], -1)), "attention_post_norm")

        h = norm("mlp_norm")(x) if c.pre_norms else x
        activation = nn.silu if c.activation == "silu" else nn.gelu  # whose default is the approximation by tanh
        if c.experts is None:
            out = activation(dense(c.mlp_size, "gate", c.mlp_bias)(h)) * dense(c.mlp_size, "up", c.mlp_bias)(h)
            out = dense(c.hidden_size, "down", c.mlp_bias)(out)
        else:
            out = moe.mixture(h, c.experts, activation, self.dtype, dense, self.kernels, experts)
        return added(out, "mlp_post_norm"), kept


def tallied(block: Block, tally, variables, *inputs):
    """`((x, kept), tallied)` of a block, with what `tally` keeps of its router's output, see `moe.Router`; None: nothing."""
    if tally is None:
        return block.apply(variables, *inputs), None
    out, seen = block.apply(variables, *inputs, mutable=["routing"])
    return out, tally(seen["routing"]["router"])


Cached = jax.Array | Int8  # keys or values of a layer in a cache, see `Transformer.int8_cache`
OneOf = TypeVar("OneOf", jax.Array, Int8)


def with_places(keys: Sequence[Cached], values: Sequence[Cached], places: Sequence[int]
                ) -> tuple[tuple[Cached, ...], tuple[Cached, ...]]:
    """Keys `[..., d, n]` and values `[..., n, d]` of each layer, filled up with zeros to its number of `places`."""
    def longer(axis, length, x):
        more = length - x.shape[axis]
        chex.assert_scalar_non_negative(more)
        return jnp.pad(x, [(0, more if i == x.ndim + axis else 0) for i in range(x.ndim)])

    return (tuple(jax.tree.map(functools.partial(longer, -1, n), x) for x, n in zip(keys, places, strict=True)),
            tuple(jax.tree.map(functools.partial(longer, -2, n), x) for x, n in zip(values, places, strict=True)))


class PromptCache(NamedTuple):
    """Keys and values of the prompts, per layer, shared by every completion of a prompt.

    keys: L arrays `[P, K, d, S]`, positions last, as products with few queries read them.  values: L arrays `[P, K, S, d]`.
      Those of sliding-window layers have n places, which hold the last real tokens: position p in place p mod n, see `held`.
    mask: `bool[P, S]`, of the other layers.  length: `i32[P]`, real tokens of each prompt.
    """

    keys: tuple[Cached, ...]
    values: tuple[Cached, ...]
    mask: jax.Array
    length: jax.Array


class CompletionCache(NamedTuple):
    """Keys `[P, K, G, d, T]` and values `[P, K, G, T, d]` of the completions so far: L arrays each, filled from the left.

    Sliding-window layers have no more places than their window: token t of n places is in place t mod n, see `held`.

    rotations: the rotary tables of all positions that decoding can reach, `[P, >= T, ...]`. They are computed before the decode
    loop: within it the compiler would compute the same cosines again in every layer and head.
    """

    keys: tuple[Cached, ...]
    values: tuple[Cached, ...]
    rotations: Rotations

    def lengthened(self, lengths: Sequence[int]) -> "CompletionCache":
        """The same cache with `lengths` places in its layers, see `ModelConfig.places`: attention's cost grows with them.

        A layer that becomes longer must not have overwritten its first tokens yet.
        """
        return CompletionCache(*with_places(self.keys, self.values, lengths), self.rotations)

    def of_rows(self, prompts: jax.Array, rows: jax.Array) -> "CompletionCache":
        """The cache of the `rows i32[P', G']` of `prompts i32[P']`."""
        chosen = jax.vmap(lambda x, prompt, row: x[prompt][:, row], in_axes=(None, 0, 0))
        def take(arrays):
            return jax.tree.map(lambda x: chosen(x, prompts, rows), arrays)
        return CompletionCache(take(self.keys), take(self.values), jax.tree.map(lambda x: x[prompts], self.rotations))


def positions_of(mask: jax.Array) -> jax.Array:
    """Position of each real token among the real tokens of its row: `i32[..., N]` from `mask bool[..., N]`."""
    return jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)


@functools.lru_cache(maxsize=64)
def _abstract_params(model: "Transformer") -> Params:
    return jax.eval_shape(model.init, jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A model: architecture, compute dtype and whether backward recomputes each layer. Parameters are always arguments.

    Attributes:
      config: the architecture.
      dtype: dtype of activations and matrix products; parameters are cast to it at use, norms and softmax stay float32.
      remat: recompute all of each layer in the backward pass; otherwise the results of its matrix products are stored.
      kernels: which ones compute attention and experts, see `kernels.choice`; "auto": those of the devices.
      int8_cache: whether decoding keeps keys and values in eight bits, see `kernels.int8`. What is computed in one pass, a
        prompt say, reads its own keys and values as they are.
    """

    config: ModelConfig
    dtype: Any = jnp.float32
    remat: bool = False
    kernels: str = "auto"
    int8_cache: bool = False

    @property
    def block(self) -> Block:
        return Block(self.config, self.dtype, kernels=self.kernels)

    def init(self, key: jax.Array) -> Params:
        """Fresh float32 parameters: normal(0, .02) matrices, residual outputs scaled by 1/sqrt(2L), unit norms."""
        c = self.config
        embed_key, layers_key, unembed_key = jax.random.split(key, 3)
        x, rotation = jnp.zeros((1, 1, c.hidden_size), self.dtype), rotations(c, jnp.zeros((1, 1), jnp.int32)).full
        def one_layer(k):
            return self.block.init(k, x, rotation, lambda q, k, v: (q, None))
        layers = jax.vmap(one_layer)(jax.random.split(layers_key, c.num_layers))["params"]
        for name in {"o", "down", "experts_down", "shared_down"} & layers.keys():
            layers[name]["kernel"] *= (2 * c.num_layers) ** -0.5
        def normal(k):
            return 0.02 * jax.random.normal(k, (c.vocab_size, c.hidden_size), jnp.float32)
        params = {"embed": normal(embed_key), "layers": layers,
                  "final_norm": {"scale": jnp.full((c.hidden_size,), 1.0 - c.norm_offset, jnp.float32)}}
        return params if c.tie_embeddings else params | {"unembed": normal(unembed_key)}

    def abstract_params(self) -> Params:
        """Shapes and dtypes of the parameters, without making them."""
        return jax.tree.map(lambda x: x, _abstract_params(self))  # dictionaries of the caller's own

    def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Token embeddings `[..., D]` of `tokens i32[...]`."""
        return params["embed"][tokens].astype(self.dtype) * jnp.asarray(self.config.embedding_scale, self.dtype)

    def normed(self, params: Params, x: jax.Array) -> jax.Array:
        """The final norm: what the unembedding reads."""
        norm = RMSNorm(self.config.norm_eps, self.config.norm_offset)
        return norm.apply({"params": params["final_norm"]}, x)  # type: ignore[return-value]

    def unembedding(self, params: Params) -> jax.Array:
        """The float32 matrix `[V, D]` whose product with a normed state gives the logits."""
        return params["embed" if self.config.tie_embeddings else "unembed"]

    def logits(self, params: Params, normed: jax.Array) -> jax.Array:
        """Float32 logits `[..., V]` of normed states `[..., D]`."""
        matrix = self.unembedding(params).astype(self.dtype)
        return self.finished(jnp.einsum("...d,vd->...v", normed, matrix, preferred_element_type=jnp.float32))

    def finished(self, products: jax.Array) -> jax.Array:
        """Logits from the products of normed states with the unembedding."""
        return finished(products, self.config.logit_divisor, self.config.logit_softcap)

    def check_length(self, tokens: int) -> None:
        """Raises ValueError for a sequence beyond the original context of a rope scaling that changes there."""
        for scaling in (self.config.rope_scaling, self.config.rope_local_scaling):
            most = scaling and scaling.longest_row
            if most and tokens > most:
                raise ValueError(f"a sequence of {tokens} tokens: the rope scaling of this model ({scaling.kind}) changes "
                                 f"beyond {most}, which is not supported; use prompts.max_tokens + sampling.max_tokens <= "
                                 f"{most}")

    def _scan_layers(self, params, lora, x, positions, attend, pool, whole=lambda layer: layer, tally=None, perturb=None,
                     experts=None, only=None):
        """Runs all layers over `x [B, N, D]`; `attend(q, k, v, local)`.

        Returns `(x, kept, pooled [L, ..., D] | None, tallied [L, ...] | None)`.

        `pool` (or None) maps a residual stream `[B, N, D]` to what is kept of it after each layer, or after the single layer of
        the number `only`, in which case pooled has no axis L; `whole` maps the given weights of a layer to those that are used;
        `tally` (or None) maps a router's output, see `moe.Router`, to what is kept of it; `perturb` (or None) maps `x` and the
        number of a layer to what that layer reads instead; `experts [B, N, L, k]` (or None) are taken instead of the routers'
        choice where they are not negative.
        """
        tables = rotations(self.config, positions)

        def layer(carry, inputs):
            x, pooled = carry
            weights, adapters, local, rotated, number, given = inputs
            weights = whole(weights)
            x = x if perturb is None else perturb(x, number)
            variables = {"params": weights} if adapters is None else {"params": weights, "lora": adapters}
            rotation = tables.of_layer(local, rotated)
            (x, kept), seen = tallied(self.block, tally, variables, x, rotation, lambda q, k, v: attend(q, k, v, local), given)
            if only is not None:
                pooled = jax.lax.cond(number == only, pool, lambda _: pooled, jax.lax.stop_gradient(x))
            every = None if pool is None or only is not None else pool(jax.lax.stop_gradient(x))
            return (x, pooled), (kept, every, seen)

        # Matrix products are worth storing for the backward pass; operations between them are cheaper to compute again.
        policies = jax.checkpoint_policies
        policy = policies.save_only_these_names(moe.CHOSEN) if self.remat else policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(SAVED, moe.SAVED, moe.CHOSEN))
        step = jax.checkpoint(layer, prevent_cse=False, policy=policy)
        rotated = None if all(self.config.rotary_layers) else jnp.asarray(self.config.rotary_layers)
        numbers = None if perturb is None and only is None else jnp.arange(self.config.num_layers)
        inputs = (params["layers"], scaled(lora), jnp.asarray(self.config.local_layers), rotated, numbers,
                  None if experts is None else jnp.moveaxis(experts, -2, 0))
        nothing = None if only is None else jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), jax.eval_shape(pool, x))
        (x, pooled), (kept, every, seen) = jax.lax.scan(step, (x, nothing), inputs)
        return x, kept, every if only is None else pooled, seen

    def hidden_states(self, params, tokens, mask, *, lora=None, pool=None, perturb=None):
        """Causal forward pass over plain rows.

        Args:
          params: parameter tree.
          tokens: `i32[B, N]`, padded on either side.
          mask: `bool[B, N]`, real tokens.
          lora: optional adapter tree (see `models.lora`).
          pool: optional function `[B, N, D] -> [...]` of each layer's residual stream.
          perturb: optional function `(x [B, N, D], layer i32[]) -> [B, N, D]` of what each layer reads.
        Returns:
          `(normed f32|bf16[B, N, D], kv, pooled)`: final normed states; keys and values, each `[L, B, K, N, d]`;
          pooled states `[L, ...]` or None.
        """
        chex.assert_rank([tokens, mask], 2)
        chex.assert_equal_shape([tokens, mask])
        self.check_length(tokens.shape[1])
        positions = positions_of(mask)
        order = jnp.arange(tokens.shape[1])
        causal = (order[:, None] >= order[None, :]) & mask[:, None, :]

        scaling = dict(scale=self.config.attention_scale, softcap=self.config.attention_softcap)

        def attend(q, k, v, local):
            if in_blocks(tokens.shape[1], self.kernels):
                k, v, end = heads_first(k), heads_first(v), jnp.where(mask, tokens.shape[1], 0)
                out = tree_attention(q, k, v, end, positions, self.config.window, local, kernels=self.kernels, **scaling)
                return out, (k, v)
            visible = causal & in_window(positions, positions, self.config.window, local)
            k, v = heads_first(k), heads_first(v)
            group = k[:, :, None], v[:, :, None], visible[:, None]  # a plain row is a group of one
            return grouped_attention(q[:, None], *group, **scaling)[:, 0], (k, v)

        x, kv, pooled, _ = self._scan_layers(params, lora, self.embed(params, tokens), positions, attend, pool, perturb=perturb)
        return self.normed(params, x), kv, pooled

    def packed_states(self, params, prompt_tokens, prompt_mask, tokens, *, mask=None, filled: int = 4, lora=None, pool=None,
                      whole=lambda layer: layer, return_loads: bool = False, experts=None, return_experts: bool = False):
        """States that predict each completion token, with every prompt computed once for its whole group.

        One packed row is `[prompt, completion_1, ..., completion_G]`; a completion sees the prompt and itself, and its
        positions continue from the prompt's end (arXiv 2506.05433). Values and gradients equal those of `P * G` plain rows.

        Args:
          prompt_tokens, prompt_mask: `[P, S]`, at least one real token each.
          tokens: `i32[P, G, T]`, padded behind.
          mask, filled: if `filled` is below 4 quarters, see `Rollouts.filled`, everything but attention computes only the
            tokens up to the last True of `mask bool[P, G, T]`, which must fit; states of others are 0.
          pool: optional function `(prompt [P, S, D], completions [P, G, T, D]) -> pytree` of each layer's stream. Without it
            last tokens are not computed, as nothing reads their states.
          whole: gathers the sharded weights of a layer, see `parallel.fsdp`.
          return_loads: for a mixture of experts, also return how each prompt with its completions loads the experts.
          experts: `i[P, G, T, L, k]`, experts of completion tokens to take instead of the routers' choice, where they are not
            negative; the routers weigh them.
          return_experts: also return those that were taken.
        Returns:
          `(normed [P, G, T, D], pooled)`: entry t is the state just before token t, the prompt's last one for t = 0; with
          `return_loads` also `moe.Loads`, f32[L, P, E]; with `return_experts` instead i16[L, P, G, T, k].
        """
        P, S = prompt_tokens.shape
        chex.assert_shape(prompt_mask, (P, S))
        predicting = tokens.shape[2] - 1
        if pool is None:
            tokens = tokens[:, :, :max(predicting, 1)]
        _, G, T = tokens.shape
        self.check_length(S + T)
        # Every token but the last is needed if a real one comes after it: the mask begins one token later.
        rows = _Groups(P, S, G, T, None if mask is None else unpadding(mask[:, :, -T:], filled))
        length = prompt_mask.sum(-1, dtype=jnp.int32)
        positions = positions_of(prompt_mask), jnp.broadcast_to(length[:, None, None] + jnp.arange(T), (P, G, T))

        real = jnp.ones((P, G, predicting + 1), bool) if mask is None else through_last(mask)
        counted = prompt_mask & real.any((1, 2))[:, None], jnp.pad(real[:, :, 1:], ((0, 0), (0, 0), (0, T - predicting)))
        tally = (lambda routing: moe.loads(routing, rows.split, *counted)) if return_loads else None
        if return_experts:
            def tally(routing):
                return rows.split(routing["experts"].astype(jnp.int16))[1]
        if experts is not None:
            experts = rows.packed(jnp.full((P, S, *experts.shape[3:]), -1, experts.dtype), experts[:, :, :T])

        x = self.embed(params, rows.packed(prompt_tokens, tokens))
        pool_packed = None if pool is None else (lambda x: pool(*rows.split(x)))
        attend = self._group_attention(rows, prompt_mask, *positions)
        x, _, pooled, loads = self._scan_layers(params, lora, x, rows.packed(*positions), attend, pool_packed, whole, tally,
                                                experts=experts)
        prompt, completions = rows.split(x)
        last = jnp.take_along_axis(prompt, last_index(prompt_mask)[:, None, None], axis=1)
        before = jnp.broadcast_to(last[:, None], (P, G, 1, x.shape[-1]))
        normed = self.normed(params, jnp.concatenate([before, completions[:, :, :predicting]], axis=2))
        return (normed, pooled, loads) if tally is not None else (normed, pooled)

    def _group_attention(self, rows: "_Groups", prompt_mask, prompt_positions, positions) -> Callable:
        """`attend(q, k, v, local)` of the packed `rows`, for `positions i32[P, G, T]` of completions."""
        P, S, G, T, _ = rows
        window, scaling = self.config.window, dict(scale=self.config.attention_scale, softcap=self.config.attention_softcap)
        def causal(n):
            return jnp.tril(jnp.ones((n, n), bool))

        def attend_as_tree(q, k, v, local):
            ends = jnp.broadcast_to(S + T * (jnp.arange(G) + 1)[:, None], (P, G, T))
            end = rows.whole(jnp.where(prompt_mask, S + G * T, 0), ends)
            q, k, v = (rows.whole(*rows.split(y)) for y in (q, k, v))
            out = tree_attention(q, heads_first(k), heads_first(v), end, rows.whole(prompt_positions, positions), window, local,
                                 kernels=self.kernels, **scaling)
            return rows.packed(out[:, :S], out[:, S:].reshape(P, G, T, *out.shape[2:])), None

        def attend_by_cudnn(q, k, v, local):
            (q_p, q_c), (k_p, k_c), (v_p, v_c) = map(rows.split, (q, k, v))
            end = jnp.where(prompt_mask, S, 0)
            out_p = tree_attention(q_p, heads_first(k_p), heads_first(v_p), end, prompt_positions, window, local,
                                   kernels=self.kernels, **scaling)
            out_c = group_by_cudnn(q_c, (k_c, v_c), (k_p, v_p), prompt_mask, scale=self.config.attention_scale)
            return rows.packed(out_p, out_c), None

        def attend(q, k, v, local):
            if by_cudnn(q, window, self.config.attention_softcap, self.kernels):
                return attend_by_cudnn(q, k, v, local)
            if in_blocks(T, self.kernels):
                return attend_as_tree(q, k, v, local)
            q_p, q_c = rows.split(q)
            (k_p, k_c), (v_p, v_c) = (map(heads_first, rows.split(y)) for y in (k, v))
            visible = causal(S) & prompt_mask[:, None, :] & in_window(prompt_positions, prompt_positions, window, local)
            out_p = grouped_attention(q_p[:, None], k_p[:, :, None], v_p[:, :, None], visible[:, None], **scaling)
            own = causal(T) & in_window(positions, positions, window, local)
            seen = prompt_mask[:, None, None, :] & in_window(positions, prompt_positions[:, None], window, local)
            out_c = grouped_attention(q_c, k_c, v_c, own, (k_p, v_p, seen), **scaling)
            return rows.packed(out_p[:, 0], out_c), None

        return attend

    def tree_states(self, params, tokens, positions, end, *, lora=None, whole=lambda layer: layer, return_loads: bool = False,
                    axis: str | None = None, experts=None, pool=None, only: int | None = None):
        """States of rows that hold trees of tokens in depth-first order, see `packing.PackedRows`.

        A token sees itself and its ancestors. Values and gradients equal those of one plain row for each path.

        Args:
          tokens, positions, end: `i32[R, N]`; the token in slot q sees that in slot k if `k <= q < end[k]`; 0 on padding.
            Rows may be longer than a rope scaling allows, positions may not: see `check_length` of the longest trajectory.
          whole, return_loads: as of `packed_states`.
          axis: a mesh axis over which rows are cut, so that each device gets only its own slots; None: rows are not cut. Keys
            and values of all slots are then gathered layer by layer, and their gradients scattered.
          experts: `i[R, N, L, k]`, as of `packed_states`.
          pool, only: optional function `[R, N, D] -> pytree` of the stream after the layer of this number.
        Returns:
          Normed states `[R, N, D]`; with `return_loads` also `moe.Loads`, f32[L, R, E]; with `pool` also its result.
        """
        chex.assert_rank([tokens, positions, end], 2)
        chex.assert_equal_shape([tokens, positions, end])
        c, begin = self.config, None
        def all_slots(x, slots: int):
            return x if axis is None else jax.lax.all_gather(x, axis, axis=slots, tiled=True)
        if axis is not None:
            begin = tokens.shape[1] * jax.lax.axis_index(axis)
        all_ends, all_positions = all_slots(end, 1), all_slots(positions, 1)

        def attend(q, k, v, local):
            k, v = all_slots(heads_first(k), 2), all_slots(heads_first(v), 2)
            return tree_attention(q, k, v, all_ends, all_positions, c.window, local, scale=c.attention_scale,
                                  softcap=c.attention_softcap, kernels=self.kernels, begin=begin), None

        tally = (lambda routing: moe.loads(routing, lambda y: (y,), end > 0)) if return_loads else None
        x, _, pooled, loads = self._scan_layers(params, lora, self.embed(params, tokens), positions, attend, pool, whole, tally,
                                                experts=experts, only=only)
        normed, more = self.normed(params, x), [loads] * return_loads + [pooled] * (pool is not None)
        return (normed, *more) if more else normed

    def prefill(self, params, prompt_tokens, prompt_mask, *, lora=None):
        """Fills the shared cache. Returns `(PromptCache, normed [P, D])`: the state that predicts the first token."""
        normed, (keys, values), _ = self.hidden_states(params, prompt_tokens, prompt_mask, lora=lora)
        last = jnp.take_along_axis(normed, last_index(prompt_mask)[:, None, None], axis=1)[:, 0]
        c, length, S = self.config, prompt_mask.sum(-1, dtype=jnp.int32), prompt_mask.shape[1]
        order = jnp.argsort(~prompt_mask, axis=-1, stable=True)  # real tokens first, wherever their padding is

        def near(x, places):  # [P, K, S, d], in which place p mod n of n is token p
            return jax.vmap(lambda x, order, p: x[:, order[p]])(x, order, jnp.maximum(held(length, places), 0))

        def kept(arrays):
            return tuple(near(x, n) if local else x for x, n, local in
                         zip(arrays, c.places(S, c.window), c.local_layers, strict=True))
        return PromptCache(*self.cached(tuple(map(swap_last, kept(keys))), kept(values)), prompt_mask, length), last

    def cached(self, keys: Sequence[jax.Array], values: Sequence[jax.Array]) -> tuple[tuple[Cached, ...], tuple[Cached, ...]]:
        """Keys `[..., d, n]` and values `[..., n, d]` as a cache holds them."""
        if not self.int8_cache:
            return tuple(keys), tuple(values)
        return tuple(int8(x, -2) for x in keys), tuple(int8(x, -1) for x in values)

    def zeros(self, heads: Sequence[int], places: Sequence[int]) -> tuple[tuple[Cached, ...], tuple[Cached, ...]]:
        """Keys `[*heads, d, n]` and values `[*heads, n, d]` of an empty cache, with each layer's number n of `places`."""
        d = self.config.head_dim
        return self.cached([jnp.zeros((*heads, d, n), self.dtype) for n in places],
                           [jnp.zeros((*heads, n, d), self.dtype) for n in places])

    def empty_completions(self, prompt: PromptCache, group: int, length: int, most: int | None = None,
                          longest: int | None = None) -> CompletionCache:
        """A completion cache of `length` slots for `group` rows of each prompt, to be `lengthened` to `most` of them.

        `longest`: tokens of the longest row; None: as many as slots.
        """
        c = self.config
        self.check_length(longest or prompt.mask.shape[1] + (most or length))
        heads, places = (len(prompt.length), c.num_kv_heads, group), c.places(length, c.window)
        tables = rotations(c, prompt.length[:, None] + jnp.arange(most or length))
        return CompletionCache(*self.zeros(heads, places), tables)

    def decode_step(self, params, layers, tokens, t, prompt: PromptCache, cache: CompletionCache, *, common=None,
                    begun=None, transposed: bool = True, tally=None):
        """Decodes one token for every row.

        Args:
          params: parameter tree (embedding and final norm are read from it).
          layers: per-layer parameters from `unstack_layers`, made once, outside the decode loop.
          tokens: `i32[P, G]`, token number `t` of each completion.
          t: `i32[]`, number of tokens of each completion before this one.
          prompt: shared cache.  cache: completion cache with tokens below `t`.
          common: None, or keys `[P/n, K, d, C]` and values `[P/n, K, C, d]` of the first C tokens of n consecutive prompts, L
            arrays each, None for sliding-window layers; in the other layers `prompt` then has only the tokens behind them,
            except that its length counts them.
          begun: `i32[P]`, where each prompt's completions begin in the cache: earlier tokens are of others, which are not read.
            None: all at the first. Models with sliding windows do not support it.
          transposed: whether `layers` were made transposed.
          tally: what to keep of each layer's router, see `tallied`; None: nothing.
        Returns:
          `(normed [P, G, D], cache)` with token `t`: the state that predicts token `t + 1`; with `tally` also what it kept,
          `[P, G, L, ...]`.
        """
        chex.assert_rank(tokens, 2)
        c, block = self.config, Block(self.config, self.dtype, transposed, self.kernels)
        positions = (prompt.length[:, None] + t)[:, :, None]
        tables = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, t, 1, axis=1)[:, None], cache.rotations)
        first = jnp.arange(0 if common is None else next((x.shape[2] for x in common[1] if x is not None), 0))
        prompt_positions = len(first) + positions_of(prompt.mask)
        read = functools.partial(self._read, t)

        x = self.embed(params, tokens)[:, :, None]
        kept, seen = [], []
        for i, (weights, adapters) in enumerate(layers):
            local, rotated, places = c.local_layers[i], None if c.rotary_layers[i] else False, cache.values[i].shape[3]

            def attend(q, k, v):
                (k,), (v,) = self.cached([swap_last(heads_first(k))], [heads_first(v)])
                own_k, own_v = written(cache.keys[i], k, t % places, 4), written(cache.values[i], v, t % places, 3)
                which = held(jnp.asarray(t + 1), places)
                own = (which >= 0) & in_window(positions, prompt.length[:, None, None] + which, c.window, local)
                own = own if begun is None else own & (which >= begun[:, None, None, None])
                there, real = prompt_positions, prompt.mask
                if local:
                    there = held(prompt.length, prompt.values[i].shape[2])
                    real = there >= 0
                seen = real[:, None, None, :] & in_window(positions, there[:, None], c.window, local)
                shared = [(*read(prompt.keys[i], prompt.values[i]), seen)]
                if common is not None and not local:
                    shared.append((*read(common[0][i], common[1][i]), jnp.ones((1, 1, 1, len(first)), bool)))
                out = grouped_attention(q, *read(own_k, own_v), own, *shared, scale=c.attention_scale,
                                        softcap=c.attention_softcap)
                return out, (own_k, own_v)

            variables = {"params": weights} if adapters is None else {"params": weights, "lora": adapters}
            (x, pair), one = tallied(block, tally, variables, x, tables.of_layer(local, rotated), attend)
            kept.append(pair)
            seen.append(one)
        keys, values = zip(*kept)
        done = self.normed(params, x[:, :, 0]), CompletionCache(keys, values, cache.rotations)
        return done if tally is None else (*done, of_layers(seen, 2))

    def _read(self, t, keys, values):
        """Cached keys `[..., n, d]` and values of a layer, read in step `t`."""
        if self.int8_cache:  # or the compiler keeps those that do not change as larger arrays beside the loop
            keys, values, _ = jax.lax.optimization_barrier((keys, values, t))
        return swap_last(keys), values

    def unstack_layers(self, params, lora=None, *, transposed: bool = True, layers=None):
        """Per-layer `(weights, adapters)` as a decode loop reads them: sliced, cast and transposed only once.

        Matrices that are sharded over a mesh must not be `transposed`: it pins their layout, which no partitioner cuts. The
        weights of layers that are given as arrays of their own, see `views.of_layers`, are not sliced from `params` again.
        """
        turn = transpose if transposed else (lambda kernel: kernel)

        def ready(path, w):
            if w.ndim == 1 or path[0].key == "router":  # a router stays in float32
                return w
            return turn(w.astype(self.dtype)) if w.ndim == 2 else w.astype(self.dtype)  # experts' have an axis more

        def sliced(tree, i):
            return jax.tree.map(lambda w: w[i], tree)

        adapters = scaled(lora)

        def of_layer(i):
            weights = sliced(params["layers"], i) if layers is None else layers[i]
            return tuple(None if tree is None else jax.tree.map_with_path(ready, tree)
                         for tree in (weights, None if adapters is None else sliced(adapters, i)))

        return [of_layer(i) for i in range(self.config.num_layers)]


def of_layers(seen: Sequence[Any], axis: int) -> Any:
    """What was kept of each layer `[..., 1, ...]` as one, the layers along the axis of the single token."""
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=axis), *seen)


def written(old: OneOf, new: OneOf, place, axis: int) -> OneOf:
    """The cached array with `new` from `place` on along an axis."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, place, axis), old, new)


class _Groups(NamedTuple):
    """Packed rows of `P` prompts of `S` tokens, each with `G` completions of `T`; `slots`: without their padding, or None."""

    P: int
    S: int
    G: int
    T: int
    slots: Unpadding | None

    def whole(self, prompts, completions):
        """`[P, S, ...]` and `[P, G, T, ...]` as `[P, S + G T, ...]`."""
        return jnp.concatenate([prompts, completions.reshape(self.P, self.G * self.T, *completions.shape[3:])], axis=1)

    def packed(self, prompts, completions):
        """`[P, S, ...]` and `[P, G, T, ...]` as rows `[P, S + G T, ...]`, or as one `[1, P S + slots, ...]`."""
        if self.slots is None:
            return self.whole(prompts, completions)
        return jnp.concatenate([prompts.reshape(self.P * self.S, *prompts.shape[2:]), self.slots.remove(completions)])[None]

    def split(self, rows):
        """The prompts and completions that `packed` made rows of."""
        P, S, G, T, slots = self
        if slots is None:
            return rows[:, :S], rows[:, S:].reshape(P, G, T, *rows.shape[2:])
        return rows[0, :P * S].reshape(P, S, *rows.shape[2:]), slots.restore(rows[0, P * S:])


def heads_first(y: jax.Array) -> jax.Array:
    """`[B, ..., heads, d] -> [B, heads, ..., d]`."""
    return jnp.moveaxis(y, -2, 1)


def swap_last(y: OneOf) -> OneOf:
    """`[..., a, b] -> [..., b, a]`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), y)


def last_index(mask: jax.Array) -> jax.Array:
    """Index of the last real token of each row, `i32[B]` from `mask bool[B, N]`."""
    return (mask.shape[-1] - 1 - jnp.argmax(mask[..., ::-1], axis=-1)).astype(jnp.int32)
