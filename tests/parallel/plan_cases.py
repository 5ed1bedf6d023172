"""Runs in a process of its own with eight virtual devices: the memory of compiled updates and samplers, and the plan's."""
import json
import sys

import jax
import numpy as np

from jaxrl_llm import methods, parallel
from jaxrl_llm.generation.sampler import generate
from jaxrl_llm.generation.sampling import Sampling
from jaxrl_llm.models import Transformer
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.parallel import plan
from jaxrl_llm.parallel.presets import MODELS
from jaxrl_llm.rollouts import Rollouts
from jaxrl_llm.training import state as state_lib
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.step import make_optimizer, make_update

TINY = ModelConfig(vocab_size=259, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=192)
MIDDLE = ModelConfig(vocab_size=4096, hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=64, mlp_size=1536)
CASES = {  # architecture, work, mesh, whether the sampler is compiled too
    "tiny": (TINY, plan.Work(4, 4, 32, 32), (1, 1, 1), True),
    "long, layers again, in parts": (TINY, plan.Work(4, 4, 64, 128, remat=True, micro_batches=2), (1, 1, 1), False),
    "SmolLM2": (MODELS["smollm2_135m"], plan.Work(8, 8, 44, 24), (1, 1, 1), True),
    "fsdp": (MODELS["smollm2_135m"], plan.Work(8, 8, 44, 24), (1, 8, 1), False),
    "mixed": (MIDDLE, plan.Work(8, 8, 64, 64), (2, 2, 2), True),
}


def measured(c: ModelConfig, w: plan.Work, mesh, sampler: bool) -> dict[str, float]:
    """Bytes per device: what the update is given and what it needs beside, and what the sampler needs beside."""
    P, G, S, T = w.prompts, w.group, w.prompt_tokens, w.completion_tokens
    model = Transformer(c, remat=w.remat)
    estimator, objective = methods.build("grpo", max_len=T)
    optimizer, _ = make_optimizer(1e-3, 100)
    create = lambda params: state_lib.create(params, None, optimizer, estimator, objective, jax.random.key(0))  # noqa: E731
    state = jax.eval_shape(create, model.abstract_params())
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state,
                         parallel.tree_shardings(state, mesh))
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.batch_sharding(mesh))  # noqa: E731
    tokens, mask, floats = array(np.int32, P, G, T), array(bool, P, G, T), array(np.float32, P, G, T)
    rollouts = Rollouts(mask=mask, valid=array(bool, P, G), rewards=array(np.float32, P, G), tokens=tokens,
                        prompt_tokens=array(np.int32, P, S), prompt_mask=array(bool, P, S), prompt_ids=array(np.int32, P),
                        behavior_logprobs=floats, entropies=floats, policy_version=tokens)
    update = make_update(Policy(model), objective, optimizer, micro_batches=w.micro_batches, mesh=mesh)
    update = update.lower(state, rollouts, floats).compile().memory_analysis()
    found = {"given": update.argument_size_in_bytes, "update": update.temp_size_in_bytes}
    if not sampler:
        return found
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (P, G)))
    sample = generate.lower(model, state.params, array(np.int32, P, S), array(bool, P, S), array(keys.dtype, P, G),
                            Sampling(np.float32(1.0)), max_tokens=T, stop_ids=(1,)).compile().memory_analysis()
    return found | {"sampler": sample.temp_size_in_bytes}


def main():
    for name, (c, w, sizes, sampler) in CASES.items():
        mesh = parallel.make_mesh(*sizes, devices=jax.devices()[:int(np.prod(sizes))])
        found = plan.estimate(c, w, mesh.shape)
        planned = {"given": found.kept, "update": found.update, "sampler": found.sampler}
        planned = {what: sum(sizes.values()) for what, sizes in planned.items()}
        print(json.dumps({"case": name, "planned": planned, "measured": measured(c, w, mesh, sampler)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
