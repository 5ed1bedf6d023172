"""Runs in a process of its own with eight virtual devices: updates of trajectories with holes on a 2 x 2 x 2 mesh, as JSON."""
import json

import hole_inputs as inputs
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import advantages, parallel
from jaxrl_llm.data.shapes import quarters_filled
from jaxrl_llm.learning import gradient_norms
from jaxrl_llm.learning.policy import Capture, Policy
from jaxrl_llm.learning.step import make_joint_update, make_update
from jaxrl_llm.objectives import make
from jaxrl_llm.values import features
from jaxrl_llm.values.critic import Critic
from jaxrl_llm.values.critic import make_update as make_critic_update

MESH = parallel.make_mesh(data=2, fsdp=2, tensor=2)
SHARDS = 4  # of the prompts
POLICY = Policy(inputs.MODEL, inputs.POLICY.temperature, chunk=24, mesh=MESH)
WATCHED = inputs.Watched(inputs.MODEL, inputs.POLICY.temperature, chunk=24, mesh=MESH)


def learned(update, state, *given):
    """`(gradient, loss, targets)` of an update: whether gradients go back through log-probs of trained tokens, of others."""
    inputs.SEEN.clear()
    state, metrics = jax.block_until_ready(update(spread(state), *map(placed, given)))
    jax.effects_barrier()
    targets = [any(bool(cotangent[mask == own].any()) for cotangent, mask in inputs.SEEN) for own in (True, False)]
    return state.opt_state.trace, float(metrics["loss"]), targets


def spread(state):
    return parallel.put(state, parallel.tree_shardings(state, MESH))


def placed(tree):
    return parallel.put(tree, parallel.batch_sharding(MESH))


def updated(objective, parts, adapted=False):
    """An update without padding, in parts, against that of plain rows on one device."""
    lora = inputs.adapters() if adapted else None
    filled = quarters_filled(np.asarray(inputs.batch().token_mask), inputs.P // (parts * SHARDS))
    assert filled < 4
    update = make_update(WATCHED, objective, inputs.GRADIENT, clip_norm=None, micro_batches=parts)
    gradient, loss, targets = learned(update, inputs.fresh_state(objective, lora), inputs.batch().replace(filled=filled),
                                      inputs.advantages())
    wanted = inputs.gradient(objective, inputs.adapters() if adapted else None, inputs.batch(), inputs.advantages())
    return {"apart": inputs.distance(gradient, wanted), "loss": loss, "targets": targets}


def joint(adapted=False):
    """With a baseline of the other rollout's reward, as in the first batch of POISE."""
    lora = inputs.adapters() if adapted else None
    objective, rollouts = make("reinforce"), inputs.batch().replace(old_logprobs=None)
    estimator = advantages.make("poise", feature_size=features.feature_size(32), capacity=16)
    update = make_joint_update(WATCHED, Capture(1, pool=2), objective, estimator, inputs.GRADIENT, clip_norm=None)
    gradient, loss, targets = learned(update, inputs.fresh_state(objective, lora, estimator), rollouts)
    values = np.where(rollouts.valid.all(1, keepdims=True), rollouts.rewards - rollouts.rewards[:, ::-1], 0)[..., None]
    wanted = inputs.gradient(objective, inputs.adapters() if adapted else None, inputs.batch(),
                             np.broadcast_to(values, rollouts.mask.shape))
    return {"apart": inputs.distance(gradient, wanted), "loss": loss, "targets": targets}


def critic():
    """Against the same critic on one device, which `tests/learning/test_holes.py` compares with plain rows."""
    trained, random = np.asarray(inputs.batch().token_mask), np.random.default_rng(0)
    def recorded():
        return np.where(trained, random.normal(size=trained.shape), np.nan).astype(np.float32)
    rollouts = inputs.batch().replace(extras={"values": recorded(), "value_targets": recorded()})
    result = []
    for mesh in (None, MESH):
        one = Critic(inputs.MODEL, inputs.GRADIENT, clip=0.2, mesh=mesh)
        state = one.init(inputs.params())
        state.params["head"]["weight"] = jnp.linspace(-1, 1, 32)
        policy, batch = (inputs.params(), None), rollouts
        if mesh is not None:
            state, policy, batch = spread(state), spread(policy), placed(rollouts)
        after, measured = make_critic_update(one, clip_norm=None, micro_batches=2)(state, policy, batch)
        result.append((jax.device_get(after.opt_state.trace), float(measured["value/loss"])))
    return {"apart": inputs.distance(result[1][0], result[0][0]), "loss": result[1][1]}


def norms():
    """Of the gradients of single trajectories, against those on one device."""
    result = []
    for policy, place, batch in ((inputs.POLICY, lambda tree: tree, inputs.batch()), (POLICY, spread, placed(inputs.batch()))):
        result.append(np.asarray(gradient_norms.make(policy)(place(inputs.params()), None, batch)))
    there = result[0] > 0  # else nothing of it is trained
    assert there.any() and not result[1][~there].any()
    return {"apart": float(np.abs(result[1][there] / result[0][there] - 1).max()), "loss": float(result[1].sum())}


def main():
    print(json.dumps({
        "one pass": updated(inputs.CLIPPED, 1), "micro-batches": updated(inputs.CLIPPED, 2),
        "whole batch": updated(inputs.WHOLE, 2), "adapters": updated(inputs.CLIPPED, 1, adapted=True),
        "adapters in micro-batches": updated(inputs.CLIPPED, 2, adapted=True),
        "adapters, whole batch": updated(inputs.WHOLE, 2, adapted=True), "joint": joint(),
        "joint, adapters": joint(adapted=True), "critic": critic(), "norms": norms()}))


if __name__ == "__main__":
    main()
