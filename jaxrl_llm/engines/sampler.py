"""Rollouts in one compiled program: prefill each prompt once, then decode its whole group against the shared cache."""
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.engines import measures
from jaxrl_llm.engines.compaction import half, holds
from jaxrl_llm.engines.sampling import Draw, Sampling, draw, spread_out
from jaxrl_llm.engines.shards import pieces_of
from jaxrl_llm.kernels.products import reads_transposed, row_matmul
from jaxrl_llm.models import views
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.parallel.mesh import batch_sharding


class Completions(flax.struct.PyTreeNode):
    """What the sampler returns for P prompts and G completions each, at most T tokens long.

    Attributes:
      tokens: `i32[P, G, T]`, 0 beyond the end.
      mask: `bool[P, G, T]`, sampled tokens, the stop token included. Set when tokens are sampled, never derived from ids.
      logprobs: `f32[P, G, T]`, log-prob of each token under the distribution it was drawn from.
      entropies: `f32[P, G, T]`, entropy of that distribution, nats.
      stopped: `bool[P, G]`, ended by a stop token (False: cut at T, or at `Sampling.max_tokens`).
      decode_steps: `i32[]`, decode steps run until the last row stopped, T - 1 at most; the first token needs none. On a
        mesh `i32[N]`, one number for each of the N shards of the batch, which stop independently.
      columns: further columns of tokens by name, `[P, G, T, ...]`, see `engines.measures`.
    """

    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    entropies: jax.Array
    stopped: jax.Array
    decode_steps: jax.Array
    columns: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)


class Rows(flax.struct.PyTreeNode):
    """The key of each of the rows `[P, G]`, and its `limits` and `drawn` `i32[P, G]`, see `generate`; None: no row has one."""

    keys: jax.Array
    limits: jax.Array | np.ndarray | None = None
    drawn: jax.Array | np.ndarray | None = None


def row_keys(key: jax.Array, uids: np.ndarray) -> jax.Array:
    """One key per trajectory, a function of its uid alone: any trajectory can be drawn again without its batch.

    `uids` is a host array, i64[P, G]. `fold_in` takes 32 bits, which a run of 4096 trajectories a step uses up in a million
    steps: the key is `fold_in(fold_in(key, uid >> 32), uid mod 2^32)`.
    """
    flat = np.asarray(uids, np.int64).reshape(-1)
    return fold_in_halves(key, (flat >> 32).astype(np.uint32), flat.astype(np.uint32)).reshape(np.shape(uids))


def threefry(key: jax.Array) -> jax.Array:
    """The key, or for one of another implementation that of threefry with its first words.

    Keys of rows have two words, and draws of `rbg` keys under `vmap` depend on each other.
    """
    if jax.random.key_impl(key) == "threefry2x32":
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key)[..., :2], impl="threefry2x32")


@jax.jit
@functools.partial(jax.vmap, in_axes=(None, 0, 0))
def fold_in_halves(key, high, low):
    """The keys `[N]` of trajectories, from the halves of their uids, `u32[N]` each, see `row_keys`."""
    return jax.random.fold_in(jax.random.fold_in(key, high), low)


def generate(model: Transformer, params, prompt_tokens, prompt_mask, keys, sampling: Sampling, *,
             max_tokens: int, stop_ids: tuple[int, ...], chunk: int = 16, lora=None, mesh: Mesh | None = None,
             limits=None, drawn=None, columns: tuple[str, ...] = ()) -> Completions:
    """Samples a group of completions for every prompt.

    Token t of a row is drawn with `fold_in(row key, drawn + t)`. Decoding runs in chunks of `chunk` steps (`lax.scan`) inside a
    `while_loop` that ends as soon as every row has stopped; finished rows are inert. For long completions caches grow during
    decoding (`stages`) and finished rows are dropped (`halvings`), with one loop for each size.

    Args:
      model, params, lora: the policy.
      prompt_tokens, prompt_mask: `i32[P, S]`, `bool[P, S]`, padded on either side, one real token at least.
      keys: typed PRNG keys `[P, G]`, see `row_keys`.
      sampling: distribution to draw from.
      max_tokens: `T`.
      stop_ids: tokens that end a completion; an empty tuple decodes T tokens in every row.
      chunk: maximum number of decode steps between two checks whether all rows have stopped, see `chunk_of`.
      mesh: mesh that the arrays are sharded over; None: one device. Prompts are sharded over `data` x `fsdp`; each of these
        shards decodes in its own loop. `params` are best sharded as by `parallel.reshard`: matrices and key/value heads stay
        sharded over `tensor`, if it divides these heads (else every device works with all of them); the rest is gathered.
      limits: `i32[P]`, maximum tokens of each prompt's completions beside those of `sampling`; None: no others.
      drawn: `i32[P]`, how many tokens of these completions the prompt has already: random numbers follow on; None: 0.
      columns: names of further token columns to measure, see `engines.measures`; ValueError for one that the model has not.
    """
    chex.assert_rank([prompt_tokens, prompt_mask], 2)
    copied = reads_transposed(keys.size, max_tokens - 1)  # whether or not layers are arrays of their own
    layers = None if copied else views.of_layers(params["layers"], model.dtype)
    return _generate(model, params, layers, prompt_tokens, prompt_mask, keys, sampling, max_tokens=max_tokens,
                     stop_ids=stop_ids, chunk=chunk, lora=lora, mesh=mesh, limits=limits, drawn=drawn, columns=columns)


@functools.partial(jax.jit, static_argnames=("model", "max_tokens", "stop_ids", "chunk", "mesh", "columns"))
def _generate(model: Transformer, params, layers, prompt_tokens, prompt_mask, keys, sampling: Sampling, *, max_tokens: int,
              stop_ids: tuple[int, ...], chunk: int, lora, mesh: Mesh | None, limits, drawn,
              columns: tuple[str, ...]) -> Completions:
    """As `generate`, in one program; `layers`: see `views.of_layers`."""
    pieces = pieces_of(mesh, model.config.num_kv_heads)
    sample = functools.partial(_sample, model, max_tokens=max_tokens, stop_ids=stop_ids, chunk=chunk, pieces=pieces,
                               columns=columns)
    each = Rows(keys, *(None if x is None else jnp.broadcast_to(x[:, None], keys.shape) for x in (limits, drawn)))
    if mesh is None or mesh.size == 1:
        return sample(params, lora, prompt_tokens, prompt_mask, each, sampling, layers=layers)

    def shard(*arguments):
        # Not summed here: shards that are done would wait for the others, which CPUs take for a hang after 40 seconds.
        completions = sample(*arguments)
        return completions.replace(decode_steps=completions.decode_steps[None])

    rows, same = batch_sharding(mesh).spec, PartitionSpec()
    axes = {*mesh.axis_names} - ({"tensor"} if pieces > 1 else set())
    return jax.shard_map(shard, mesh=mesh, axis_names=axes, in_specs=(same, same, rows, rows, rows, same), out_specs=rows,
                         check_vma=False)(params, lora, prompt_tokens, prompt_mask, each, sampling)


def stages(slots: int, chunk: int) -> tuple[tuple[int, int], ...]:
    """The successive lengths of a cache, `(steps after which it is full, positions allocated)`; the last has `slots` steps.

    Attention reads all positions of its cache, filled or not: four lengths read 5/8 as many as one. Every length is a loop to
    compile, so none is added for fewer than 32 positions. Steps are multiples of `chunk`; positions are multiples of 32 from 16
    slots on, for which CPUs take about half as long with products and exponentials as for one less.
    """
    if slots < 16:
        return ((slots, slots),)
    count = min(4, (slots + 16) // 32)
    rooms = [-(-slots * k // (count * 32)) * 32 for k in range(1, count + 1)]
    return tuple((min(slots, room // chunk * chunk), room) for room in rooms)


def halvings(rows: int, slots: int) -> int:
    """How many times decoding may continue with half of its rows (`engines.compaction`) once the others are finished.

    Each halving is one more loop to compile, so there is none for fewer than 64 steps. With 8 rows a step takes as long as
    reading the weights.
    """
    return 0 if slots < 64 else sum(rows >= least for least in (16, 32))


def chunk_of(steps: int, chunk: int) -> int:
    """The number of steps in a chunk: `chunk`, or down to half of it if fewer steps of the last chunk are then superfluous.

    The last chunk is as long as the others, since one loop is compiled for all. Of equally good lengths the longest is taken.
    """
    most = max(min(chunk, steps), 1)
    return min(range(most, most // 2, -1), key=lambda size: -steps % size)


class Decoder(NamedTuple):
    """The constants of all decode steps of a batch and of its halves.

    Attributes:
      model, params: the policy.
      layers: its layers as decoding reads them, see `Transformer.unstack_layers`; `transposed` says in which order.
      unembedding: `[V, D]`.
      stops: `i32[N]`, tokens that end a completion.
      sampling: distribution to draw from.
      pieces: number of devices over which the compiler shards matrices and heads, `tensor`.
      chunk: steps between two checks whether all rows have stopped.
      last: T - 1, the number of steps; further steps fill the last chunk, and what they draw is dropped.
      columns: names of further token columns, see `engines.measures`.
    """

    model: Transformer
    params: Any
    layers: Any
    unembedding: jax.Array
    stops: jax.Array
    sampling: Sampling
    pieces: int
    transposed: bool
    chunk: int
    last: int
    columns: tuple[str, ...] = ()


def _sample(model: Transformer, params, lora, prompt_tokens, prompt_mask, rows: Rows, sampling: Sampling, *, max_tokens: int,
            stop_ids: tuple[int, ...], chunk: int, pieces: int, layers=None,
            columns: tuple[str, ...] = ()) -> Completions:
    """As `generate`, for rows that stop together; the compiler shards matrices and heads over `pieces` devices, `tensor`."""
    P, G = rows.keys.shape
    # The first token comes from the prefill; the others in chunks of equal size.
    last = max_tokens - 1
    chunk = chunk_of(last, chunk)
    slots = max(-(-last // chunk), 1) * chunk
    transposed = pieces == 1 and reads_transposed(P * G, last)
    layers = model.unstack_layers(params, lora, transposed=transposed, layers=layers)
    prompt, before = model.prefill(params, prompt_tokens, prompt_mask, lora=lora)
    decoder = Decoder(model, params, layers, model.unembedding(params).astype(model.dtype), jnp.asarray(stop_ids, jnp.int32),
                      sampling, pieces, transposed, chunk, last, columns)
    before = jnp.broadcast_to(before[:, None], (P, G, before.shape[-1]))
    first, alive = _draw_tokens(decoder, before, rows, 0, jnp.ones((P, G), bool))
    buffers = jax.tree.map(lambda x: jnp.zeros((P, G, slots + 1, *x.shape[2:]), x.dtype).at[:, :, 0].set(x), first)
    lengths = stages(slots, chunk)
    # Prompts that have tokens of completions already leave fewer slots to fill; whoever counts them knows the longest row.
    longest = None if rows.drawn is None else prompt_tokens.shape[1]
    start = jnp.int32(0), first[0], model.empty_completions(prompt, G, lengths[0][1], most=slots, longest=longest), alive
    steps, alive, buffers = _decode_rows(decoder, rows, prompt, (start, buffers), lengths, halvings(P * G, last))
    tokens, mask, logprobs, entropies, measured = jax.tree.map(lambda b: b[:, :, :max_tokens], buffers)
    # A row that continues beyond T may draw a stop token there; a row that ends at the limit has none.
    stopped = ~alive & jnp.isin(jnp.take_along_axis(tokens, mask.sum(-1, keepdims=True) - 1, 2)[:, :, 0], decoder.stops)
    return Completions(tokens, mask, logprobs, entropies, stopped, jnp.minimum(steps, last) if slots > last else steps,
                       measures.settled(columns, model.config, measured, mask))


def _draw_tokens(d: Decoder, normed, rows: Rows, t, alive, read=None):
    """Token t of every row from the state before it: `((token, mask, logprob, entropy, columns), alive)`, each `[P, G]`.

    `read`: what the pass that made the state kept of routers, see `measures.drawn`.
    """
    keys = rows.keys
    logits = logits_of(normed, d.unembedding, d.pieces)
    places = jnp.broadcast_to(t if rows.drawn is None else rows.drawn + t, keys.shape)
    step_keys = jax.vmap(jax.random.fold_in)(keys.reshape(-1), places.reshape(-1))
    logits = d.model.finished(logits).reshape(keys.size, -1)
    if d.sampling.spread is not None and isinstance(t, int):  # the first tokens, of rows in one state each
        if d.pieces > 1:
            raise NotImplementedError("sampling.spread needs the whole vocabulary on one device; set sampling.tensor=1")
        drawn = spread_out(step_keys.reshape(keys.shape), logits.reshape(*keys.shape, -1)[:, 0], d.sampling)
    else:
        drawn = drawn_over(d.pieces, step_keys, logits, d.sampling)
    flat = jax.tree.map(lambda x: x.reshape(keys.size, *x.shape[2:]), read)
    columns = jax.tree.map(lambda x: x.reshape(*keys.shape, *x.shape[1:]),
                           measures.drawn(d.columns, d.model.config, logits, drawn[0], flat))
    token, logprob, entropy = (x.reshape(keys.shape) for x in drawn)
    out = (jnp.where(alive, token, 0), alive, jnp.where(alive, logprob, 0.0), jnp.where(alive, entropy, 0.0), columns)
    alive = alive & ~jnp.isin(token, d.stops)
    if rows.limits is not None:
        alive = alive & (t + 1 < rows.limits)
    return out, alive if d.sampling.max_tokens is None else alive & (t + 1 < d.sampling.max_tokens)


def decode(d: Decoder, rows: Rows, prompt, carry, _):
    """One step of a `lax.scan`; the carry is `(steps done, last token, cache, alive)`."""
    t, token, cache, alive = carry
    normed, cache, *read = d.model.decode_step(d.params, d.layers, token, t, prompt, cache, transposed=d.transposed,
                                               tally=measures.tally(d.columns, d.model.config))
    out, alive = _draw_tokens(d, normed, rows, t + 1, alive, *read)
    return (t + 1, out[0], cache, alive), out


def _decode_chunk(d: Decoder, rows: Rows, prompt, loop):
    """A chunk of steps, whose draws go into the buffers `[P, G, slots + 1]`; `loop` is `(carry, buffers)`."""
    carry, buffers = loop
    start = carry[0] + 1
    carry, outs = jax.lax.scan(functools.partial(decode, d, rows, prompt), carry, None, length=d.chunk)

    def write(buffer, out):
        return jax.lax.dynamic_update_slice_in_dim(buffer, jnp.moveaxis(out, 0, 2), start, axis=2)

    return carry, jax.tree.map(write, buffers, outs)


def _unfinished(d: Decoder, full: int, shrinks: int, loop):
    """Whether to decode another chunk of this shape: some rows continue, the cache has room, and half the rows are too few."""
    (t, _, _, alive), _ = loop
    more = (t < min(full, d.last)) & alive.any()
    return more & ~holds(alive) if shrinks else more


def _decode_rows(d: Decoder, rows: Rows, prompt, loop, lengths, shrinks: int):
    """Decodes to the end: through caches of all `lengths`, and `shrinks` times with half of the rows from then on."""
    chunk = functools.partial(_decode_chunk, d, rows, prompt)
    c = d.model.config
    for full, room in lengths:
        (steps, token, cache, alive), buffers = loop
        # Half of the rows continue with a cache of all positions, so not while this cache has fewer than half of them.
        goes_on = functools.partial(_unfinished, d, full, shrinks if 2 * room >= lengths[-1][1] else 0)
        loop = jax.lax.while_loop(goes_on, chunk, ((steps, token, cache.lengthened(c.places(room, c.window)), alive), buffers))
    (steps, token, cache, alive), buffers = loop
    if not shrinks:
        return steps, alive, buffers
    part = half(alive)
    rest = (steps, part.take(token), cache.of_rows(*part), part.take(alive)), jax.tree.map(part.take, buffers)
    of_prompts = jax.tree.map(lambda x: x[part.prompts], prompt)
    steps, *decoded = _decode_rows(d, jax.tree.map(part.take, rows), of_prompts, rest, lengths[-1:], shrinks - 1)
    return steps, *jax.tree.map(part.put, (alive, buffers), tuple(decoded))


def logits_of(normed, unembedding, pieces: int) -> jax.Array:
    """`f32[..., V]` from states `[..., D]`; `pieces`: see `Decoder`."""
    if pieces == 1:
        return row_matmul(normed, unembedding, jnp.float32)
    return jnp.einsum("...d,vd->...v", normed, unembedding, preferred_element_type=jnp.float32)  # see `unstack_layers`


def drawn_over(pieces: int, keys, logits, sampling: Sampling) -> Draw:
    """As `draw`, from logits sharded over `tensor`, whose devices exchange parts of the vocabulary for parts of the rows.

    Each row is then drawn by one device, from the whole vocabulary. Left alone, the partitioner would permute between
    neighbours, for which CPUs wait for every device of the mesh, including those whose shard has stopped; and it would cut
    distributions of rows, in which layout the slot engine's next chunk would compile again.
    """
    if pieces == 1:
        return draw(keys, logits, sampling)

    def lay(x, *axes):
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))
    rows, vocab = ("tensor" if size % pieces == 0 else None for size in logits.shape)
    return lay(draw(lay(keys), lay(lay(logits, None, vocab), rows), jax.tree.map(lay, sampling)))
