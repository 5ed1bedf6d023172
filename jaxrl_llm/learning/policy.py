"""Log-probs of completions under a policy: one function shared by the update, the pass before it and the reference."""
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.data.packing import PackedRows
from jaxrl_llm.data.rollouts import SEEDS, Rollouts
from jaxrl_llm.models.logprobs import logit_gradients, most_likely, token_logprobs
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.models.unpadding import moved, unpadding
from jaxrl_llm.parallel import indexed, over_rows
from jaxrl_llm.values import features


@dataclasses.dataclass(frozen=True)
class Capture:
    """The states of a forward pass that value models read, see `values.features`.

    Attributes:
      layer: index of the block whose output is pooled; a tuple for several at once, to search among them.
      pool: n, the number of last prompt tokens and reasoning tokens that are averaged.
      marker: token ids that end the reasoning; () if completions have no such mark.
      call: token ids that open and close a call of a tool, which may quote the marker.
    """

    layer: int | tuple[int, ...]
    pool: int = 10
    marker: tuple[int, ...] = ()
    call: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


@dataclasses.dataclass(frozen=True)
class Policy:
    """A model and its sampling temperature, as a function of its parameters.

    Attributes:
      model: the transformer.
      temperature: the sampler's, so that learner and sampler describe the same distribution (over the whole vocabulary: tokens
        that top-k, top-p or min-p remove count here, and show as mismatch/kl in the metrics). Rollouts with their own
        temperature (`Rollouts.temperature`) are computed at that.
      chunk: number of rows of logits in memory at a time, on each device.
      mesh: the mesh of parameters and rollouts; None: one device.
      replays: the entry of extras with the experts i[P, G, T, L, k] that completion tokens take, where they are not negative,
        instead of those that the routers choose; "": the routers choose.
      slopes: whether entropies carry a gradient, as the loss of a bonus for them needs it.
      position: a function of the logits at one position that is measured with each log-prob, see `Objective.position`; its
        seeds are those of the extra `token_seeds`, 0 without it. None: nothing else is measured.
    """

    model: Transformer
    temperature: float = 1.0
    chunk: int = 512
    mesh: Mesh | None = None
    replays: str = ""
    slopes: bool = False
    position: Callable | None = None

    def logprobs(self, params, lora, rollouts: Rollouts) -> tuple[jax.Array, jax.Array]:
        """Log-prob of every completion token and entropy at its position: `(f32[P, G, T], f32[P, G, T])`, nats.

        If rollouts have roles, both are 0 for most tokens of others, whose logits are not computed.
        """
        return self._forward(params, lora, rollouts)[:2]

    def logprobs_and_loads(self, params, lora, rollouts: Rollouts) -> tuple[Any, ...]:
        """As `logprobs`, with the loads of a mixture's experts from the rollouts of each prompt, f32[P, L, E]; None without.

        With a `position` its values f32[P, G, T] stand behind them.
        """
        experts = self.model.config.experts is not None
        logprobs, entropies, _, loads, *values = self._forward(params, lora, rollouts, return_loads=experts)
        return logprobs, entropies, loads, *values

    def logprobs_and_values(self, params, lora, rollouts: Rollouts) -> tuple[jax.Array, ...]:
        """As `logprobs`, with the values f32[P, G, T] of a `position` behind them."""
        logprobs, entropies, _, _, *values = self._forward(params, lora, rollouts)
        return logprobs, entropies, *values

    def logprobs_and_features(self, params, lora, rollouts: Rollouts, capture: Capture):
        """As `logprobs`, with `phi f32[P, G, 2D + 3]` of the chosen block from the same pass (`[P, G, K, 2D + 3]` for K).

        States are pooled inside the pass: no array of shape `[tokens, D]` is kept of a layer.
        """
        r = rollouts
        spans = features.spans(r.tokens, r.token_mask, capture.marker, capture.call)
        last = features.last_tokens(r.prompt_mask, capture.pool), features.last_tokens(spans.reasoning, capture.pool)
        logprobs, entropies, pooled, *_ = self._forward(params, lora, rollouts, last)
        means = features.mean_entropies(entropies, r.token_mask, spans)
        def of_layer(i):
            return features.phi(pooled[0][:, i], pooled[1][:, i], means)
        if isinstance(capture.layer, int):
            return logprobs, entropies, of_layer(capture.layer)
        return logprobs, entropies, jnp.stack([of_layer(i) for i in capture.layer], axis=2)

    def _forward(self, params, lora, rollouts: Rollouts, last=None, return_loads: bool = False):
        """Log-probs, entropies, for every layer `[P, L, ...]` the means over the `last` tokens, see `features`, loads, values.

        They are NaN if `rollouts.filled` promised too much: skipping an update is better than missing tokens.
        """
        def forward(params, lora, rows, whole):
            prompt_tokens, prompt_mask, tokens, mask, last, temperature, experts, seeds = rows
            pool = None if last is None else (lambda *states: tuple(map(features.pooled, states, last)))
            slots = unpadding(mask, r.filled)
            states, *of_layers = self.model.packed_states(
                params, prompt_tokens, prompt_mask, tokens, mask=mask, filled=r.filled, lora=lora, pool=pool, whole=whole,
                return_loads=return_loads, experts=experts)
            pooled, loads = of_layers if return_loads else (*of_layers, None)
            remove, restore = (lambda x: x.reshape(-1, *x.shape[3:])), (lambda x: x.reshape(tokens.shape))
            if slots is not None:
                remove, restore = slots.remove, lambda x: jnp.where(slots.fits, slots.restore(x), jnp.nan)
            if temperature is not None:
                temperature = remove(jnp.broadcast_to(temperature[:, None, None], tokens.shape))
            numbers = self._of_trained(params, remove(states), remove(tokens), None if r.role is None else remove(mask),
                                       temperature, None if seeds is None else remove(seeds))
            logprobs, entropies, *values = map(restore, numbers)
            return logprobs, entropies, *jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (pooled, loads)), *values

        r = rollouts
        rows = (r.prompt_tokens, r.prompt_mask, r.tokens, r.token_mask, last, r.temperature, self.given(r), self.seeds(r))
        return over_rows(forward, self.mesh, self.model.dtype, params, lora, rows)

    def seeds(self, rollouts: Rollouts) -> jax.Array | None:
        """The seeds u32[P, G, T] that a `position` reads; None if it reads none."""
        return None if self.position is None else rollouts.extras.get(SEEDS)

    def given(self, rollouts: Rollouts) -> jax.Array | None:
        """The experts that tokens take, see `replays`; None if the routers choose, as of texts without the entry."""
        return rollouts.extras.get(self.replays)

    def routes(self, params, lora, rollouts: Rollouts) -> jax.Array:
        """The experts i16[P, G, T, L, k] that the routers choose for completion tokens; -1 for the last, which nobody reads."""
        def forward(params, lora, rows, whole):
            prompt_tokens, prompt_mask, tokens = rows
            *_, experts = self.model.packed_states(params, prompt_tokens, prompt_mask, tokens, lora=lora, whole=whole,
                                                   return_experts=True)
            return jnp.moveaxis(experts, 0, -2)

        r = rollouts
        chosen = over_rows(forward, self.mesh, self.model.dtype, params, lora, (r.prompt_tokens, r.prompt_mask, r.tokens))
        less = r.tokens.shape[2] - chosen.shape[2]
        return jnp.pad(chosen, ((0, 0), (0, 0), (0, less), (0, 0), (0, 0)), constant_values=-1)

    def likeliest(self, params, lora, rollouts: Rollouts, at=None) -> tuple[jax.Array, ...]:
        """The most likely token at each position, i32[P, G, T], or the tokens `at`, and their log-probs f32[P, G, T], nats."""
        def numbers(params, states, at, temperature):
            chosen = most_likely(states, self.model.unembedding(params), chunk=self.chunk) if at is None else at
            return chosen, self._of_tokens(params, states, chosen, temperature=temperature)[0]

        chosen, logprobs = self._of_positions(params, lora, rollouts, numbers, at)
        return chosen, logprobs

    def logit_gradients(self, params, lora, rollouts: Rollouts) -> jax.Array:
        """Squared norm of the gradient of each token's log-prob with respect to the logits, f32[P, G, T]."""
        def numbers(params, states, tokens, temperature):
            config, temperature = self.model.config, self.temperature if temperature is None else temperature
            return (logit_gradients(states, self.model.unembedding(params), tokens, temperature=temperature,
                                    divisor=config.logit_divisor, softcap=config.logit_softcap, chunk=self.chunk),)

        return self._of_positions(params, lora, rollouts, numbers, rollouts.tokens)[0]

    def _of_positions(self, params, lora, rollouts: Rollouts, numbers: Callable, at) -> tuple[jax.Array, ...]:
        """`numbers(params, states [n, D], at i32[n], temperature f32[n] or None) -> [n] each` of all positions, [P, G, T] each.

        The states are those that predict the token of each position. `at` is i32[P, G, T] or None.
        """
        def forward(params, lora, rows, whole):
            prompt_tokens, prompt_mask, tokens, at, temperature = rows
            states, _ = self.model.packed_states(params, prompt_tokens, prompt_mask, tokens, lora=lora, whole=whole)
            states, at = states.reshape(-1, states.shape[-1]), None if at is None else at.reshape(-1)
            if temperature is not None:
                temperature = jnp.broadcast_to(temperature[:, None, None], tokens.shape).reshape(-1)
            return tuple(x.reshape(tokens.shape) for x in numbers(params, states, at, temperature))

        r = rollouts
        rows = (r.prompt_tokens, r.prompt_mask, r.tokens, at, r.temperature)
        return over_rows(forward, self.mesh, self.model.dtype, params, lora, rows)

    def _of_trained(self, params, states, tokens, trained, temperature, seeds=None):
        """As `_of_tokens`; the others of `trained bool[n]` are moved to the end, where whole chunks of them cost nothing."""
        if trained is None:
            return self._of_tokens(params, states, tokens, temperature=temperature, seeds=seeds)
        order = jnp.argsort(~trained, stable=True)
        back = jnp.argsort(order)
        if temperature is not None:
            temperature = temperature[order]
        numbers = self._of_tokens(params, moved(states, order, back), tokens[order], trained[order], temperature,
                                  None if seeds is None else seeds[order])
        return tuple(moved(x, back, order) for x in numbers)

    def _of_tokens(self, params, states, tokens, wanted=None, temperature=None, seeds=None):
        """Log-probs and entropies `f32[n]` of `tokens i32[n]`, from the normalised states `[n, D]` that predict them.

        Values of a `position` with the `seeds u32[n]` stand behind them. `temperature f32[n]` is that of each token; None: the
        policy's.
        """
        config, temperature = self.model.config, self.temperature if temperature is None else temperature
        if self.position is not None and self.mesh is not None and self.mesh.shape["tensor"] > 1:
            # Sums along a vocabulary in pieces may be collectives of all devices, each of which would skip other chunks.
            wanted = None
        return token_logprobs(states, self.model.unembedding(params), tokens, temperature=temperature,
                              divisor=config.logit_divisor, softcap=config.logit_softcap, chunk=self.chunk, wanted=wanted,
                              slopes=self.slopes, position=self.position, seeds=seeds)

    def packed_logprobs(self, params, lora, rows: PackedRows, index) -> tuple[Any, ...]:
        """As `logprobs` and the loads of `logprobs_and_loads`, from rows that compute each node of a tree once.

        Args:
          rows: some rows, `[R, N]`, see `packing`; R divides over data x fsdp, N over seq.
          index: `i32[P, G, T]`, the slots of the tokens of trajectories in these rows, counted through `[R, N]`.
        Returns:
          `(logprobs, entropies, loads)`: `f32[P, G, T]`, 0 where the index is outside these rows; the loads of all rows
          together, `f32[1, L, E]`, None without experts. Values of a `position` stand behind them, as log-probs do.
        """
        logprobs, entropies, loads, _, *values = self._of_rows(params, lora, rows, index)
        return logprobs, entropies, loads, *values

    def packed_features(self, params, lora, rows: PackedRows, index, last, layer: int):
        """`(logprobs, entropies)` as of `packed_logprobs`, and the sums of the states of these rows in the slots `last`.

        `last` is a tree of `i32[..., n]`, counted like the index; the sums `f32[..., D]` are of states behind block `layer`.
        """
        logprobs, entropies, _, sums, *_ = self._of_rows(params, lora, rows, index, last, layer)
        return logprobs, entropies, sums

    def _of_rows(self, params, lora, rows: PackedRows, index, last=None, layer: int | None = None):
        """`(logprobs, entropies, loads, sums, *values)` of `packed_logprobs` and `packed_features`."""
        experts, axis, (R, N) = self.model.config.experts is not None, indexed.cut_axis(self.mesh), rows.tokens.shape
        rows, number = jax.tree.map(jnp.asarray, rows), None if last is None else indexed.numbered(R, N)

        def forward(params, others, rows, whole):
            (lora, last), (rows, number) = others, rows
            def pool(x):
                return jax.tree.map(functools.partial(indexed.sums, x, number, N), last)
            outputs = self.model.tree_states(
                params, rows.tokens, rows.positions, rows.end, lora=lora, whole=whole, return_loads=experts, axis=axis,
                experts=rows.experts, pool=None if last is None else pool, only=layer)
            states, *more = outputs if experts or last is not None else (outputs,)
            loads, sums = more[0] if experts else None, None if last is None else more[-1]
            if axis is not None:  # the state that predicts a token may be on another device
                states = jax.lax.all_gather(states, axis, axis=1, tiled=True)
            # Wanted tokens come first: chunks of logits without wanted tokens are skipped.
            wanted = None if rows.wanted is None else rows.wanted.reshape(-1)
            order = jnp.arange(rows.tokens.size) if wanted is None else jnp.argsort(~wanted)
            before = rows.before + states.shape[1] * jnp.arange(rows.tokens.shape[0])[:, None]
            temperature = None if rows.temperature is None else rows.temperature.reshape(-1)[order]
            states = states.reshape(-1, states.shape[-1])[before.reshape(-1)[order]]
            seeds = None if rows.seeds is None else rows.seeds.reshape(-1)[order]
            tokens = rows.tokens if rows.targets is None else rows.targets
            numbers = self._of_tokens(params, states, tokens.reshape(-1)[order],
                                      None if wanted is None else wanted[order], temperature, seeds)
            def back(x):
                return jnp.zeros_like(x).at[order].set(x, unique_indices=True).reshape(rows.tokens.shape)
            loads = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), loads)
            logprobs, entropies, *values = map(back, numbers)
            return logprobs, entropies, loads if axis is None else jax.tree.map(lambda x: x[:, None], loads), sums, *values

        logprobs, entropies, loads, sums, *values = over_rows(
            forward, self.mesh, self.model.dtype, params, (lora, last), (rows, number), cut=True)
        if axis is not None:  # [R, seq, L, E], loads of each device's slots
            loads = jax.tree.map(lambda x: x.sum(1), loads)
        loads, sums = jax.tree.map(lambda x: x.sum(0, keepdims=True), loads), jax.tree.map(lambda x: x.sum((0, 1)), sums)
        seen = [indexed.seen(x, index) for x in (logprobs, entropies, *values)]
        return *seen[:2], loads, sums, *seen[2:]
