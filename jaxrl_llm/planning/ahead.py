"""The programs of a step from shapes alone: lowered for devices that need not exist, without allocating anything."""
import dataclasses
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import methods, parallel
from jaxrl_llm.data import packing
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.engines import paged_caches, pages, sampler, shards, slots
from jaxrl_llm.engines.paged_caches import pages_of
from jaxrl_llm.engines.pages import PAGE
from jaxrl_llm.engines.sampling import Sampling
from jaxrl_llm.evaluation import flops
from jaxrl_llm.kernels import choice
from jaxrl_llm.kernels.flash import FAR, RowMask
from jaxrl_llm.kernels.products import reads_transposed
from jaxrl_llm.learning import accumulate
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.learning.step import make_update
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import PromptCache, Transformer
from jaxrl_llm.parallel.rules import PIECES, path_name, spec_of
from jaxrl_llm.planning.plan import Work

_CHUNK = 16  # steps of the slot engine whose tokens are in a small cache of their own


def lower_update(c: ModelConfig, w: Work, mesh: Mesh) -> jax.stages.Lowered:
    """GRPO's update of all weights with one minibatch of the work, as the loop calls it; `.compile()` has its memory needs.

    The batch is `[P, G, T]` on-policy rollouts, sharded over the mesh by prompts; weights and moments follow the partition
    table.
    """
    P, G, S, T = w.prompts // w.minibatches, w.group, w.prompt_tokens, w.completion_tokens
    policy, objective, state = _made(c, w, mesh)
    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.batch_sharding(mesh))
    tokens, mask, floats = array(np.int32, P, G, T), array(bool, P, G, T), array(np.float32, P, G, T)
    rollouts = Rollouts(mask=mask, valid=array(bool, P, G), rewards=array(np.float32, P, G), tokens=tokens,
                        prompt_tokens=array(np.int32, P, S), prompt_mask=array(bool, P, S), prompt_ids=array(np.int32, P),
                        behavior_logprobs=floats, entropies=floats, policy_version=tokens)
    update = make_update(policy, objective, w.optimizer, micro_batches=w.micro_batches)
    return update.lower(state, rollouts, floats)


def lower_accumulate(c: ModelConfig, w: Work, mesh: Mesh) -> jax.stages.Lowered:
    """As `lower_update`, for the largest part of an update from packed rows: accumulating the gradient of `w.rows` rows.

    The optimiser's state also occupies memory, but is not an argument of this program.
    """
    policy, objective, state = _made(c, w, mesh)
    spread, cut = parallel.batch_sharding(mesh), parallel.rows_sharding(mesh)
    def array(dtype, sharding, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    slots = [array(dtype, cut, w.rows, w.row_tokens) for dtype in (np.int32,) * 4 + (bool,)]
    view = w.prompts // w.minibatches, w.group, w.completion_tokens
    index, cotangents = (array(dtype, spread, *view) for dtype in (np.int32, np.float32))
    parts = accumulate.make_parts(policy, objective, w.optimizer)
    rows = packing.PackedRows(*slots)
    add = cast(jax.stages.Wrapped, parts.accumulate)
    return add.lower(state.params, state.params, None, rows, index, np.int32(0), (cotangents, None))


def _model(c: ModelConfig, w: Work, mesh: Mesh) -> Transformer:
    """The model with the kernels of the mesh's platform, which need not be the one of this process."""
    kernels = choice.of_platform(mesh.devices.flat[0].platform)
    return Transformer(c, jax.numpy.dtype(w.dtype), w.remat, kernels, w.int8_cache)


def _made(c: ModelConfig, w: Work, mesh: Mesh):
    """The policy, GRPO's objective, and the shapes of the state with their shardings."""
    model = _model(c, w, mesh)
    estimator, objective = methods.build("grpo", max_len=w.completion_tokens)
    def create(params):
        return state_lib.create(params, None, w.optimizer, estimator, objective, jax.random.key(0))
    state = jax.eval_shape(create, model.abstract_params())
    return Policy(model, mesh=mesh), objective, parallel.with_shardings(state, parallel.tree_shardings(state, mesh))


def lower_decode(c: ModelConfig, w: Work, mesh: Mesh) -> jax.stages.Lowered:
    """A step of the sampler, including the draw, for P prompts x G rows with full caches of S and T positions."""
    P, G, S, T = w.prompts, w.group, w.prompt_tokens, w.completion_tokens
    model, transposed = _model(c, w, mesh), reads_transposed(P * G, T)

    def step(params, layers, unembedding, stops, sampling, keys, prompt, carry):
        decoder = sampler.Decoder(model, params, layers, unembedding, stops, sampling, 1, transposed, 1, T)
        return sampler.decode(decoder, sampler.Rows(keys), prompt, carry, None)

    def given():
        params = _cast(model.init(jax.random.key(0)), model.dtype)
        prompt, _ = model.prefill(params, np.zeros((P, S), np.int32), np.ones((P, S), bool))
        carry = np.int32(0), np.zeros((P, G), np.int32), model.empty_completions(prompt, G, T), np.ones((P, G), bool)
        return (params, model.unstack_layers(params, transposed=transposed), model.unembedding(params), np.zeros(1, np.int32),
                Sampling(np.float32(1)), jax.random.split(jax.random.key(0), (P, G)), prompt, carry)

    return jax.jit(step, donate_argnums=(7,)).lower(*_whole(given, mesh))


def lower_slots(c: ModelConfig, w: Work, mesh: Mesh) -> jax.stages.Lowered:
    """A step of the slot engine, including the draw, on the replicas of a mesh: P G rows that see S + T positions.

    Each row has its prompt in its cache, as where prompts are not shared. The step is the last of a chunk.
    """
    R, places = w.prompts * w.group, w.prompt_tokens + w.completion_tokens - _CHUNK
    model, pieces = _model(c, w, mesh), shards.pieces_of(mesh, c.num_kv_heads)
    transposed = pieces == 1 and reads_transposed(R // parallel.shards_of(mesh.shape), w.completion_tokens)

    @shards.of_rows(static=("model",), donated=("cache",), same=("weights", "i"))
    def step(model, weights, cached, cache, lanes, keys, i):
        prompt = PromptCache(*cached, jax.numpy.arange(places) < lanes.length[:, None], lanes.length)

        def states(lanes, i, cache):
            normed, cache = model.decode_step(weights.params, weights.layers, lanes.pending[:, None], i, prompt, cache,
                                              transposed=transposed)
            return normed[:, 0], cache

        after, cache, drawn = slots.step_of(model, weights, states, (), pieces, i, lanes, keys, cache)
        return after.pending, after.drawn, after.left, after.alive, cache, drawn.logprobs, drawn.entropies

    def rows():
        lanes = _lanes(R)
        cached = model.zeros((R, c.num_kv_heads), c.places(places, None))
        return cached, slots.chunk_cache(model, lanes.length, _CHUNK), lanes, jax.random.split(jax.random.key(0), R)

    def lay(tree, *axes):
        cut = NamedSharding(mesh, PartitionSpec(shards.rows_of(mesh), *axes))
        return jax.tree.map(lambda x: x.update(sharding=cut), tree)

    with jax.set_mesh(mesh):  # the kernels depend on the kind of device
        cached, cache, lanes, keys = jax.eval_shape(rows)
        cache = cache._replace(keys=lay(cache.keys, "tensor"), values=lay(cache.values, "tensor"),
                               rotations=lay(cache.rotations))
        return step.lower(model, _weights(model, mesh, transposed), lay(cached, "tensor"), cache, lay(lanes), lay(keys),
                          np.int32(_CHUNK - 1), mesh=mesh if mesh.size > 1 else None)


def _lanes(rows: int) -> slots.Lanes:
    numbers, sampling = jax.numpy.zeros(rows, np.int32), Sampling(jax.numpy.ones(rows, np.float32))
    return slots.Lanes(slot=numbers, uid=np.zeros((rows, 2), np.uint32), keyed=numbers > 0, length=numbers, pending=numbers,
                       drawn=numbers, left=numbers, alive=numbers == 0, yields=numbers > 0,
                       stops=np.zeros((rows, 4), np.int32), sampling=sampling)


def _weights(model: Transformer, mesh: Mesh, transposed: bool) -> slots.Weights:
    """The shapes of the weights as decoding reads them, sharded over `tensor`."""
    def given():
        params = _cast(model.init(jax.random.key(0)), model.dtype)
        return params, model.unstack_layers(params, transposed=transposed), model.unembedding(params)

    def laid(name, axes):
        def of(path, x):
            whole = (1,) * axes + x.shape
            spec = spec_of(f"{name}{path_name(path)}", whole, mesh.shape, PIECES)
            return x.update(sharding=NamedSharding(mesh, PartitionSpec(*spec[axes:])))
        return of

    params, layers, unembedding = jax.eval_shape(given)
    return slots.Weights(parallel.with_shardings(params, parallel.rollout_shardings(params, mesh)), None,
                         [(jax.tree.map_with_path(laid("layers/", 1), kernels), None) for kernels, _ in layers],
                         laid("unembed", 0)((), unembedding))


def lower_pages(c: ModelConfig, w: Work, mesh: Mesh) -> jax.stages.Lowered:
    """A step of the engine with paged caches, including the draw, for P G rows that see S + T positions.

    The pool holds the whole pages of each prompt once.
    """
    R, S, T = w.prompts * w.group, w.prompt_tokens, w.completion_tokens
    model, transposed = _model(c, w, mesh), reads_transposed(R, T)
    paged_caches.check_model(model)
    pool = 1 + w.prompts * (S // PAGE) + R * pages_of(S % PAGE + T)

    def given():
        params = _cast(model.init(jax.random.key(0)), model.dtype)
        lanes = _lanes(R)
        weights = slots.Weights(params, None, model.unstack_layers(params, transposed=transposed), model.unembedding(params))
        return (weights, pages.empty(model, pool), lanes, np.zeros((R, pages_of(S + T)), np.int32), jax.random.key(0),
                np.int32(0))

    with jax.set_mesh(mesh):  # the kernel's program depends on the kind of TPU
        return pages.decode.lower(model, *_whole(given, mesh), steps=1, transposed=transposed)


def pages_cost(c: ModelConfig, w: Work) -> dict[str, tuple[float, float]]:
    """Operations, and bytes read again, of the TPU's attention over pages: it reads a prompt once for each of its rows."""
    rows, seen = w.prompts * w.group, w.prompt_tokens + w.completion_tokens
    again = w.prompts * (w.group - 1) * w.prompt_tokens * w.cached_token(c)
    return {"ragged_paged_attention": (rows * flops.attention_flops(c, 1, before=seen - 1) / c.num_layers, again)}


def lower_prefill(c: ModelConfig, w: Work, mesh: Mesh) -> jax.stages.Lowered:
    """The caches of P prompts of S tokens, and their last states."""
    model, shape = _model(c, w, mesh), (w.prompts, w.prompt_tokens)

    def given():
        return _cast(model.init(jax.random.key(0)), model.dtype), np.zeros(shape, np.int32), np.ones(shape, bool)

    return jax.jit(model.prefill).lower(*_whole(given, mesh))


def lower_layer(c: ModelConfig, w: Work, mesh: Mesh) -> jax.stages.Lowered:
    """Forward and backward pass of one layer over P prompts with their completions, without the logits."""
    P, G, S, T = w.prompts, w.group, w.prompt_tokens, w.completion_tokens
    model = _model(with_layers(dataclasses.replace(c, vocab_size=8, tie_embeddings=True), 1), w, mesh)

    def gradients(params, prompt_tokens, prompt_mask, tokens, cotangent):
        def states(params):
            return model.packed_states(params, prompt_tokens, prompt_mask, tokens)[0]
        return jax.vjp(states, params)[1](cotangent)[0]

    def given():
        return (model.init(jax.random.key(0)), np.zeros((P, S), np.int32), np.ones((P, S), bool), np.zeros((P, G, T), np.int32),
                jax.numpy.zeros((P, G, T, c.hidden_size), model.dtype))

    return jax.jit(gradients).lower(*_whole(given, mesh))


def attention_cost(c: ModelConfig, w: Work) -> dict[str, tuple[float, float]]:
    """Operations, and bytes read again, of the TPU's attention over one prompt with its completions: see `splash.cost`."""
    from jaxrl_llm.kernels import splash
    G, S, T = w.group, w.prompt_tokens, w.completion_tokens
    def heads(count):
        return jax.ShapeDtypeStruct((1, c.num_kv_heads, *count, S + G * T, c.head_dim), w.dtype)
    end = np.concatenate([np.full(S, S + G * T), np.repeat(S + T * np.arange(1, G + 1), T)])
    positions = np.concatenate([np.arange(S), np.tile(S + np.arange(T), G)])
    rows = RowMask(jax.numpy.asarray(end)[None], jax.numpy.asarray(positions)[None], jax.numpy.int32(FAR))
    return splash.cost(heads((c.num_heads // c.num_kv_heads,)), heads(()), rows)


def with_layers(c: ModelConfig, layers: int) -> ModelConfig:
    """The same model with only its first `layers` layers."""
    return dataclasses.replace(c, num_layers=layers, local_layers=c.local_layers[:layers],
                               rotary_layers=c.rotary_layers[:layers])


def _cast(tree, dtype):
    """The tree's shapes in `dtype`, as `parallel.reshard` casts the weights of a sampler."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def _whole(given, mesh: Mesh):
    """Shapes of the result of `given()`, replicated on all devices of the mesh."""
    where = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), jax.eval_shape(given))
