"""Runs in a process of its own with eight virtual devices: the memory of compiled updates and samplers, and the plan's."""
import functools
import json
import sys

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.engines.sampler import generate
from jaxrl_llm.engines.sampling import Sampling
from jaxrl_llm.models import Transformer
from jaxrl_llm.models.config import Experts, ModelConfig
from jaxrl_llm.planning import plan
from jaxrl_llm.planning.ahead import lower_update
from jaxrl_llm.planning.presets import MODELS

TINY = ModelConfig(vocab_size=259, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=192)
MIDDLE = ModelConfig(vocab_size=4096, hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=64, mlp_size=1536)
MIXTURE = ModelConfig(vocab_size=512, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, mlp_size=96,
                      experts=Experts(8, 2, 96, shared_size=64))
CASES = {  # architecture, work, mesh, whether the sampler is compiled too
    "tiny": (TINY, plan.Work(4, 4, 32, 32), (1, 1, 1), True),
    "long, layers again, in parts": (TINY, plan.Work(4, 4, 64, 128, remat=True, micro_batches=2), (1, 1, 1), False),
    "SmolLM2": (MODELS["smollm2_135m"], plan.Work(8, 8, 44, 24), (1, 1, 1), False),
    "middle": (MIDDLE, plan.Work(8, 8, 44, 24), (1, 1, 1), True),
    "fsdp": (MODELS["smollm2_135m"], plan.Work(8, 8, 44, 24), (1, 8, 1), False),
    "mixture": (MIXTURE, plan.Work(4, 4, 64, 64), (1, 1, 1), True),
    "mixture, mixed": (MIXTURE, plan.Work(8, 4, 64, 64), (2, 2, 2), True),
    "mixed": (MIDDLE, plan.Work(8, 8, 64, 64), (2, 2, 2), True),
}


def measured(c: ModelConfig, w: plan.Work, mesh, sampler: bool) -> dict[str, float]:
    """Bytes per device: what the update is given and what it needs beside, and what the sampler needs beside."""
    P, G, S, T = w.prompts, w.group, w.prompt_tokens, w.completion_tokens
    model, update = Transformer(c, remat=w.remat), lower_update(c, w, mesh).compile().memory_analysis()
    result = {"given": update.argument_size_in_bytes, "update": update.temp_size_in_bytes}
    if not sampler:
        return result
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (P, G)))
    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.batch_sharding(mesh))
    params = model.abstract_params()
    params = parallel.with_shardings(params, parallel.rollout_shardings(params, mesh))
    generated = jax.jit(functools.partial(generate, model, mesh=mesh, max_tokens=T, stop_ids=(1,)))
    sample = generated.lower(params, array(np.int32, P, S), array(bool, P, S), array(keys.dtype, P, G),
                             Sampling(np.float32(1.0))).compile().memory_analysis()
    gathered = sample.argument_size_in_bytes if mesh.shape["fsdp"] > 1 else 0  # else they are the weights that are kept
    return result | {"sampler": sample.temp_size_in_bytes + gathered}


def main():
    for name, (c, w, sizes, sampler) in CASES.items():
        mesh = parallel.make_mesh(*sizes, devices=jax.devices()[:int(np.prod(sizes))])
        result = plan.estimate(c, w, mesh.shape)
        planned = {"given": result.kept, "update": result.update, "sampler": result.sampler}
        planned = {what: sum(sizes.values()) for what, sizes in planned.items()}
        print(json.dumps({"case": name, "planned": planned, "measured": measured(c, w, mesh, sampler)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
