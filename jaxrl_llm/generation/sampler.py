"""Rollouts in one compiled program: prefill each prompt once, then decode its whole group against the shared cache."""
import functools

import chex
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.generation.compaction import half, holds
from jaxrl_llm.generation.sampling import Draw, Sampling, draw
from jaxrl_llm.models.linear import row_matmul
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.parallel.mesh import batch_sharding
from jaxrl_llm.rollouts import Role


class Completions(flax.struct.PyTreeNode):
    """What the sampler returns for P prompts and G completions each, at most T tokens long.

    Attributes:
      tokens: `i32[P, G, T]`, 0 beyond the end.
      mask: `bool[P, G, T]`, sampled tokens, the stop token included. Made where tokens are made, never from ids.
      role: `i8[P, G, T]`, who wrote each token (`rollouts.Role`), where others than the policy did; None: all is sampled.
      logprobs: `f32[P, G, T]`, log-prob of each token under the distribution it was drawn from.
      entropies: `f32[P, G, T]`, entropy of that distribution, nats.
      stopped: `bool[P, G]`, ended by a stop token (False: cut at T).
      decode_steps: `i32[]`, decode steps run until the last row stopped; the first token needs none. On a mesh `i32[N]`,
        one number for each of the N shards of the batch, which stop by themselves.
    """

    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    entropies: jax.Array
    stopped: jax.Array
    decode_steps: jax.Array
    role: jax.Array | None = None

    @property
    def present(self) -> jax.Array:
        """`bool[P, G, T]`: all real tokens, sampled or not."""
        return self.mask if self.role is None else self.role != Role.PADDING


def row_keys(key: jax.Array, row_ids: jax.Array) -> jax.Array:
    """One key per row, a function of the row's id alone: any row can be drawn again without its batch."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(row_ids.reshape(-1)).reshape(row_ids.shape)


@functools.partial(jax.jit, static_argnames=("model", "max_tokens", "stop_ids", "chunk", "mesh"))
def generate(model: Transformer, params, prompt_tokens, prompt_mask, keys, sampling: Sampling, *,
             max_tokens: int, stop_ids: tuple[int, ...], chunk: int = 16, lora=None, mesh: Mesh | None = None) -> Completions:
    """Samples a group of completions for every prompt.

    Token t of a row is drawn with `fold_in(row key, t)`. Decoding runs in chunks of `chunk` steps (`lax.scan`) inside a
    `while_loop` that ends as soon as every row has stopped; finished rows are inert. Of long completions caches grow on the
    way (`stages`) and finished rows are left out (`halvings`), a loop for each size.

    Args:
      model, params, lora: the policy.
      prompt_tokens, prompt_mask: `i32[P, S]`, `bool[P, S]`, padded on either side, one real token at least.
      keys: typed PRNG keys `[P, G]`, see `row_keys`.
      sampling: distribution to draw from.
      max_tokens: `T`.
      stop_ids: tokens that end a completion; an empty tuple decodes T tokens in every row.
      chunk: decode steps between two checks whether all rows have stopped, at most; it is lowered to a divisor of T - 1.
      mesh: where the arrays lie; None: on one device. Prompts are spread over `data` x `fsdp`; each of these shards decodes in
        a loop of its own. `params` lie best as `parallel.reshard` lays them: matrices and key/value heads stay in pieces over
        `tensor`, if it divides these heads (else every device works with all of them); what is in other pieces is gathered.
    """
    chex.assert_rank([prompt_tokens, prompt_mask], 2)
    pieces = 1 if mesh is None or model.config.num_kv_heads % mesh.shape["tensor"] else mesh.shape["tensor"]
    sample = functools.partial(_sample, model, max_tokens=max_tokens, stop_ids=stop_ids, chunk=chunk, pieces=pieces)
    if mesh is None or mesh.size == 1:
        return sample(params, lora, prompt_tokens, prompt_mask, keys, sampling)

    def shard(*arguments):
        # Not summed here: shards that are done would wait for the others, which CPUs take for a hang after 40 seconds.
        found = sample(*arguments)
        return found.replace(decode_steps=found.decode_steps[None])

    rows, same = batch_sharding(mesh).spec, PartitionSpec()
    axes = {*mesh.axis_names} - ({"tensor"} if pieces > 1 else set())
    return jax.shard_map(shard, mesh=mesh, axis_names=axes, in_specs=(same, same, rows, rows, rows, same), out_specs=rows,
                         check_vma=False)(params, lora, prompt_tokens, prompt_mask, keys, sampling)


def stages(slots: int, chunk: int) -> tuple[tuple[int, int], ...]:
    """The lengths of a cache one after another: `(steps after which it is full, positions allocated)`, `slots` steps at last.

    Attention reads all positions of its cache, filled or not: with four lengths, 5/8 of those of one. Every length is a loop to
    compile, so none is added for fewer than 32 positions. Steps are multiples of `chunk`; positions are multiples of 32 from 16
    slots on, for which CPUs take about half as long with products and exponentials as for one less.
    """
    if slots < 16:
        return ((slots, slots),)
    count = min(4, (slots + 16) // 32)
    rooms = [-(-slots * k // (count * 32)) * 32 for k in range(1, count + 1)]
    return tuple((min(slots, room // chunk * chunk), room) for room in rooms)


def halvings(rows: int, slots: int) -> int:
    """How many times decoding may go on with half of its rows (`generation.compaction`), the others being finished.

    Every time is a loop to compile, so not for fewer than 64 steps. With 8 rows a step takes as long as reading the weights.
    """
    return 0 if slots < 64 else sum(rows >= least for least in (16, 32))


def reads_transposed(rows: int, slots: int) -> bool:
    """Whether decode steps of `rows` rows read kernels as `[out, in]`, see `models.linear.row_matmul`.

    With fewer than 64 rows some CPUs gain a fifth from it and others nothing; transposing takes as long as two or three steps.
    """
    return rows >= 64 or slots >= 64


def _sample(model: Transformer, params, lora, prompt_tokens, prompt_mask, keys, sampling: Sampling, *, max_tokens: int,
            stop_ids: tuple[int, ...], chunk: int, pieces: int) -> Completions:
    """As `generate`, for rows that stop together; the compiler spreads matrices and heads over `pieces` devices, `tensor`."""
    P, G = keys.shape
    # The first token comes from the prefill; the others in chunks of equal size, so that no step runs in vain.
    slots = max(1, max_tokens - 1)
    chunk = max(n for n in range(1, chunk + 1) if slots % n == 0)
    transposed = pieces == 1 and reads_transposed(P * G, slots)
    layers = model.unstack_layers(params, lora, transposed=transposed)
    prompt, last = model.prefill(params, prompt_tokens, prompt_mask, lora=lora)
    unembedding = model.unembedding(params).astype(model.dtype)
    stops = jnp.asarray(stop_ids, jnp.int32)

    def sample(normed, keys, t, alive):
        if pieces == 1:
            logits = row_matmul(normed, unembedding, jnp.float32)
        else:  # see `Transformer.unstack_layers`
            logits = jnp.einsum("pgd,vd->pgv", normed, unembedding, preferred_element_type=jnp.float32)
        step_keys = jax.vmap(lambda k: jax.random.fold_in(k, t))(keys.reshape(-1))
        logits = model.finished(logits).reshape(keys.size, -1)
        drawn = (draw if pieces == 1 else functools.partial(_draw, pieces))(step_keys, logits, sampling)
        token, logprob, entropy = (x.reshape(keys.shape) for x in drawn)
        out = (jnp.where(alive, token, 0), alive, jnp.where(alive, logprob, 0.0), jnp.where(alive, entropy, 0.0))
        return out, alive & ~jnp.isin(token, stops)

    def decode_rows(keys, prompt, loop, lengths, shrinks: int):
        """Decodes to the end: through caches of all `lengths`, and `shrinks` times with half of the rows from then on."""
        def decode(carry, _):
            t, token, cache, alive = carry
            normed, cache = model.decode_step(params, layers, token, t, prompt, cache, transposed=transposed)
            out, alive = sample(normed, keys, t + 1, alive)
            return (t + 1, out[0], cache, alive), out

        def decode_chunk(loop):
            carry, buffers = loop
            start = carry[0] + 1
            carry, outs = jax.lax.scan(decode, carry, None, length=chunk)
            write = lambda buffer, out: jax.lax.dynamic_update_slice_in_dim(  # noqa: E731
                buffer, jnp.moveaxis(out, 0, 2), start, axis=2)
            return carry, jax.tree.map(write, buffers, outs)

        def unfinished(full, shrinks, loop):
            (t, _, _, alive), _ = loop
            more = (t < min(full, max_tokens - 1)) & alive.any()
            return more & ~holds(alive) if shrinks else more

        for full, room in lengths:
            (steps, token, cache, alive), buffers = loop
            # Half of the rows go on with a cache of all positions, so not while this one has fewer than half of them.
            goes_on = functools.partial(unfinished, full, shrinks if 2 * room >= lengths[-1][1] else 0)
            loop = jax.lax.while_loop(goes_on, decode_chunk, ((steps, token, cache.lengthened(room), alive), buffers))
        (steps, token, cache, alive), buffers = loop
        if not shrinks:
            return steps, alive, buffers

        part = half(alive)
        rest = (steps, part.take(token), cache.of_rows(*part), part.take(alive)), jax.tree.map(part.take, buffers)
        of_prompts = jax.tree.map(lambda x: x[part.prompts], prompt)
        steps, *found = decode_rows(part.take(keys), of_prompts, rest, lengths[-1:], shrinks - 1)
        return steps, *jax.tree.map(part.put, (alive, buffers), tuple(found))

    first, alive = sample(jnp.broadcast_to(last[:, None], (P, G, last.shape[-1])), keys, 0, jnp.ones((P, G), bool))
    buffers = tuple(jnp.zeros((P, G, slots + 1), x.dtype).at[:, :, 0].set(x) for x in first)
    lengths = stages(slots, chunk)
    start = jnp.int32(0), first[0], model.empty_completions(prompt, G, lengths[0][1], most=slots), alive
    steps, alive, buffers = decode_rows(keys, prompt, (start, buffers), lengths, halvings(P * G, slots))
    tokens, mask, logprobs, entropies = (b[:, :, :max_tokens] for b in buffers)
    stopped = ~alive & jnp.isin(jnp.take_along_axis(tokens, mask.sum(-1, keepdims=True) - 1, 2)[:, :, 0], stops)
    return Completions(tokens, mask, logprobs, entropies, stopped, steps)


def _draw(pieces: int, keys, logits, sampling: Sampling) -> Draw:
    """As `draw`, from logits in pieces over `tensor`, which exchanges its parts of the vocabulary for parts of the rows.

    Each row is then drawn by one device, from the whole vocabulary. The partitioner left alone would permute between
    neighbours, in which CPUs wait for every device of the mesh, also for those whose shard has stopped.
    """
    lay = lambda x, *axes: jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))  # noqa: E731
    rows, vocab = ("tensor" if size % pieces == 0 else None for size in logits.shape)
    return lay(draw(lay(keys), lay(lay(logits, None, vocab), rows), sampling))
