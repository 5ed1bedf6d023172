"""A critic of the policy's own size, fitted to the same rollouts as the probe, read at the end of the prompt."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.values.critic import Critic, make_update


def trained(run, params, batches: list, held: list, *, epochs: int) -> tuple[np.ndarray, dict]:
    """Values `[prompts]` of the held-out prompts of `held` (batch, real prompts), and how the training went.

    Mean squared error to the reward at every token; one Adam step per batch and epoch, at twice the policy's rate. Of all
    epochs, the one with the least error at the prompt's end on every tenth batch, which is not trained on, is kept.
    """
    critic = Critic(run.learner.policy.model, optax.adam(2 * run.config.optimizer.learning_rate), clip=None)
    update = make_update(critic, micro_batches=run.config.learner.micro_batches)
    state, policy = critic.init(params), (params, None)
    first = jax.jit(lambda tree, batch: critic.values(tree, policy, batch)[:, :, 0])

    def target(batch):
        rewards = jnp.broadcast_to(batch.rewards[..., None], batch.mask.shape)
        return batch.replace(features=None, extras={"values": jnp.zeros_like(rewards), "value_targets": rewards})

    batches = [target(batch) for batch in batches]
    checked = batches[::10] if len(batches) > 1 else batches
    learned = [b for i, b in enumerate(batches) if i % 10] if len(batches) > 1 else batches
    def error(tree):
        return float(np.mean([np.mean((first(tree, b) - b.rewards) ** 2) for b in checked]))
    best, errors = None, []
    order = np.random.default_rng(0)
    for _ in range(epochs):
        for i in order.permutation(len(learned)):
            state, _ = update(state, policy, learned[i])
        errors.append(error(state.params))
        if errors[-1] == min(errors):
            best = np.concatenate([np.asarray(first(state.params, target(b)))[:n, 0] for b, n in held])
    return np.clip(best, 0, 1), {"epochs": epochs, "kept": int(np.argmin(errors)) + 1, "validation_mse": errors}
