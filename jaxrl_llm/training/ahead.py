"""The update from shapes alone: lowered for any mesh, also of devices that are not there, with nothing allocated."""
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import methods, packing, parallel
from jaxrl_llm.kernels import choice
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.parallel.plan import Work
from jaxrl_llm.rollouts import Rollouts
from jaxrl_llm.training import accumulate
from jaxrl_llm.training import state as state_lib
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.step import make_update


def lower_update(c: ModelConfig, w: Work, mesh: Mesh) -> jax.stages.Lowered:
    """GRPO's update of all weights with one minibatch of the work, as the loop calls it; `.compile()` says what it would need.

    The batch is `[P, G, T]` on-policy rollouts, spread over the mesh by prompts; weights and moments lie by the table.
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
    """As `lower_update`, the part of an update from packed rows that needs most: the gradient of `w.rows` of them, added up.

    Beside it lies the state of the optimiser, which it is not given.
    """
    policy, objective, state = _made(c, w, mesh)
    spread, cut = parallel.batch_sharding(mesh), parallel.rows_sharding(mesh)
    def array(dtype, sharding, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    slots = [array(dtype, cut, w.rows, w.row_tokens) for dtype in (np.int32,) * 4 + (bool,)]
    view = w.prompts // w.minibatches, w.group, w.completion_tokens
    index, cotangents = (array(dtype, spread, *view) for dtype in (np.int32, np.float32))
    parts = accumulate.make_parts(policy, objective, w.optimizer)
    rows = packing.Rows(*slots)
    add = cast(jax.stages.Wrapped, parts.accumulate)
    return add.lower(state.params, state.params, None, rows, index, np.int32(0), (cotangents, None))


def _made(c: ModelConfig, w: Work, mesh: Mesh):
    """The policy, GRPO's objective, and the shapes of the state as they lie."""
    kernels = choice.of_platform(mesh.devices.flat[0].platform)
    model = Transformer(c, dtype=jax.numpy.dtype(w.dtype), remat=w.remat, kernels=kernels)
    estimator, objective = methods.build("grpo", max_len=w.completion_tokens)
    def create(params):
        return state_lib.create(params, None, w.optimizer, estimator, objective, jax.random.key(0))
    state = jax.eval_shape(create, model.abstract_params())
    return Policy(model, mesh=mesh), objective, parallel.with_shardings(state, parallel.tree_shardings(state, mesh))
