"""A fixed policy, and batches of its rollouts with everything a value model may read."""
import dataclasses
import functools

import jax
import numpy as np

from jaxrl_llm.learning.policy import Capture
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.runs import beginning
from jaxrl_llm.runs.progress import Progress
from jaxrl_llm.sampling.fitting import fitting_problems
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.judge import Judge
from jaxrl_llm.setup.probe import capture_of
from jaxrl_llm.setup.streams import make_stream
from jaxrl_llm.tasks.loader import batches
from jaxrl_llm.topologies import groups


def fixed(config, prompts: int, group: int):
    """`(run, params)`: the configuration's policy after its warm-up, sampling `prompts x group` completions at a time."""
    config = config.copy_and_resolve_references()
    config.method, config.prompts.per_step, config.sampling.group = "poise", prompts, group
    config.sampling.engine = "scan"  # in one program, which `resized` makes anew
    run, params = setup.build(config)
    if not config.warmup.steps:
        return run, params
    with Progress(config.warmup.steps) as progress:
        return run, beginning.warm_up(run, params, progress)


def resized(run: setup.Run, prompts: int, group: int) -> setup.Run:
    """The same policy with other batches."""
    config, source = run.config.copy_and_resolve_references(), run.source
    config.prompts.per_step, config.sampling.group = prompts, group
    task, judge = source.task, Judge(source.task, source.stream.partner.reward)
    stream = make_stream(config, run.learner.policy.model, run.learner.mesh, source.stream.tokenizer, None,
                         [task.train, task.heldout], judge)
    return dataclasses.replace(run, config=config, source=dataclasses.replace(source, stream=stream, prompts=prompts))


def sample(run: setup.Run, params, problems, key):
    """`Rollouts` with one group for each of `prompts.per_step` problems, padded to one length whatever was sampled."""
    source, stream = run.source, run.source.stream
    rows = fitting_problems(problems, stream.tokenizer, stream.prompt_tokens, source.overlong)
    stream.publish(Snapshot(0, params, None, key))
    forest = stream.run(source.planted(rows, draw=0), groups(range(len(rows)), stream.group), 0)
    batch, T = source.view(forest, 0), source.max_tokens
    beyond = ((0, 0), (0, 0), (0, T - batch.mask.shape[2]))
    return jax.device_put(jax.tree.map(lambda x: np.pad(x, beyond) if x.shape == batch.mask.shape else x, batch))


def training_problems(run: setup.Run, seed: int):
    """Batches of `prompts.per_step` training problems, without end."""
    return batches(run.source.task.train, run.config.prompts.per_step, seed=seed)


@functools.lru_cache
def _capture(policy, capture: Capture):
    return jax.jit(lambda params, batch: policy.logprobs_and_features(params, None, batch, capture))


def with_features(run: setup.Run, params, batch, layers=None):
    """The batch with log-probs, entropies and features: of the configured block, or of all `layers`, `[P, G, K, F]`."""
    own = capture_of(run.config, run.source.stream.tokenizer, run.learner.policy.model.config.num_layers)
    capture = own if layers is None else dataclasses.replace(own, layer=tuple(layers))
    logprobs, entropies, features = _capture(run.learner.policy, capture)(params, batch)
    return batch.replace(old_logprobs=logprobs, entropies=entropies), features
