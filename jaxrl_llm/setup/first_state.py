"""What the state before the first step is made from."""
import functools

import jax
from ml_collections import ConfigDict

from jaxrl_llm.control import Known
from jaxrl_llm.models import lora as lora_lib
from jaxrl_llm.sampling.embeddings import prompt_embeddings
from jaxrl_llm.sampling.known import known, prompt_tokens
from jaxrl_llm.setup.run import Run


def known_of(run: Run, params) -> tuple[Known, ...]:
    """What controllers may take to begin, beside what the learner knows."""
    source, config = run.source, run.config
    seed = jax.random.fold_in(jax.random.key(config.seed), 5)
    prompts = functools.cache(functools.partial(prompt_tokens, source))
    return (
        *known(source, prompts),
        Known("max_group", "int, most rollouts of a prompt, where a method lets their number differ",
              lambda: config.sampling.max_group),
        Known("embeddings", "f32[N, D], mean state of each training prompt under the first policy, see `sampling.embeddings`",
              lambda: prompt_embeddings(run.learner.policy, params, prompts(), source.stream.prompt_tokens), of_task=True),
        Known("seed", "u32[2], of the run's draws by controllers", lambda: jax.random.key_data(seed)),
    )


def initial_adapters(config: ConfigDict, params):
    """Adapters that change nothing yet; None if the weights themselves are trained."""
    key = jax.random.fold_in(jax.random.key(config.seed), 3)  # streams 0 to 2 are the weights', see Transformer.init
    return lora_lib.init(key, params, rank=config.lora.rank, alpha=config.lora.alpha) if config.lora.rank else None
