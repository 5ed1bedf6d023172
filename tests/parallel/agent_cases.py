"""Runs in a process of its own with eight devices: three steps of runs whose slots lie on a mesh, and on one device."""
import functools
import itertools
import json

import chatter
import few_devices
import jax
import numpy as np
import tiny_config

from jaxrl_llm.learning import schedules
from jaxrl_llm.setup import setup

TOOLS = {"environment": "tool_use(tools=('calculator',), options={'level': 'digit', 'chat': True}, turns=3)",
         "prompts.max_tokens": 0, "sampling.max_tokens": 96, "sampling.turn_tokens": 12}


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"steps": 3, "sampling.engine": "slots"} | changes)
    return config


KINDS = {"tools": lambda: chatter.get_config(**TOOLS), "game": lambda: chatter.get_config(environment="chatter:alphabet"),
         "turns": lambda: tiny(**{"sampling.micro_batches": 2}), "replay": lambda: tiny(method="sil"),
         "routes": lambda: tiny(method="qwen_stabilizing", objective="routing='sampler'", **{"model.experts": 4}),
         "controllers": lambda: chatter.get_config(method="scaling_inter_rl")}
# Kind, data x fsdp x tensor x seq.
CASES = (("tools", (1, 2, 2, 2)), ("game", (2, 2, 2)), ("turns", (1, 2, 2)), ("replay", (4, 1, 1)),
         ("controllers", (1, 1, 4)), ("routes", (2, 1, 2)))


def stepped(kind, sizes):
    """Tokens and log-probs of each of three batches, the norm of each first gradient, and the weights behind them."""
    config = KINDS[kind]()
    config.learner.minibatches = 1
    config.mesh.update(dict(zip(("data", "fsdp", "tensor", "seq"), sizes)))
    run, params = few_devices.built(config, int(np.prod(sizes)))
    state, frozen, found, norms = setup.initial_state(run, params), run.learner.frozen(params), [], []
    for step in itertools.islice(schedules.make("sync").steps(run.source, run.learner, state, frozen), 3):
        rollouts = step.finished.rollouts
        found.append([np.asarray(x) for x in (rollouts.tokens, rollouts.mask, rollouts.behavior_logprobs)])
        norms.append(step.learned.metrics["grad_norm"])
        learned = step.learned.state
    return found, norms, jax.device_get(learned.params)


@functools.cache
def alone(kind):
    return stepped(kind, (1, 1, 1))


def compared(kind, sizes):
    (batches, norms, params), (others, again, weights) = alone(kind), stepped(kind, sizes)
    same = [bool(np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])) for a, b in zip(batches, others)]
    first = np.abs(np.where(batches[0][1], batches[0][2] - others[0][2], 0)).max() if same[0] else np.inf
    apart = max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), params, weights)))
    return {"same": same, "first": float(first), "gradient": abs(norms[0] / again[0] - 1), "weights": apart}


if __name__ == "__main__":
    print(json.dumps({" ".join(map(str, case)): compared(*case) for case in CASES}))
