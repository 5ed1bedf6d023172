"""What the state before the first step is made from."""
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import parallel
from jaxrl_llm.control.passes import Shares
from jaxrl_llm.models import lora as lora_lib
from jaxrl_llm.sampling.embeddings import prompt_embeddings
from jaxrl_llm.setup.run import Run
from jaxrl_llm.tasks.loader import levels_of, tasks_of


def known_of(run: Run, params) -> dict[str, Any]:
    """The `control.KNOWN` values of a run; those of training prompts only if a controller needs them."""
    source, s = run.source, run.config.sampling
    train = source.task.train
    seed = jax.random.fold_in(jax.random.key(run.config.seed), 5)
    known = {"prompts": len(train), "shares": Shares(*tasks_of(train)), "batch": source.data.size, "group": s.group,
             "max_group": s.max_group, "max_tokens": s.max_tokens, "seed": jax.random.key_data(seed)}
    if "levels" in run.learner.controls.asks:
        known["levels"] = levels_of(train)
    if {"prompt_lengths", "embeddings"} & run.learner.controls.asks:
        ids = parallel.first(source.stream.partner.encode([train[i] for i in range(len(train))], source.stream.tokenizer))
        if "embeddings" in run.learner.controls.asks:
            known["embeddings"] = prompt_embeddings(run.learner.policy, params, ids, source.stream.prompt_tokens)
        known["prompt_lengths"] = np.array([len(one or ()) for one in ids], np.int32)
    return known


def initial_adapters(config: ConfigDict, params):
    """Adapters that change nothing yet; None if the weights themselves are trained."""
    key = jax.random.fold_in(jax.random.key(config.seed), 3)  # streams 0 to 2 are the weights', see Transformer.init
    return lora_lib.init(key, params, rank=config.lora.rank, alpha=config.lora.alpha) if config.lora.rank else None
