"""The source of a run's rollouts, and the sizes of its batches."""
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm.data import shapes as shapes_lib
from jaxrl_llm.data.shapes import Ladders
from jaxrl_llm.evaluation import flops
from jaxrl_llm.learning import gradient_norms
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.sampling import prior as prior_lib
from jaxrl_llm.sampling import stages
from jaxrl_llm.sampling.evaluation_set import EvalSpec
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.setup.judge import Judge
from jaxrl_llm.setup.parts import Parts
from jaxrl_llm.setup.probe import capture_of
from jaxrl_llm.setup.selection import expects, make_topology, with_topology
from jaxrl_llm.setup.streams import Reads, make_server, make_stream, stop_ids
from jaxrl_llm.setup.values import Around
from jaxrl_llm.tasks.loader import batches
from jaxrl_llm.topologies import single


def make_source(config: ConfigDict, made: Parts, policy: Policy, mesh: Mesh, tokenizer, judge: Judge,
                sets: tuple[EvalSpec, ...] = (), around: Around = Around()) -> Source:
    """The source of a run's rollouts, rewarded by `judge`; its topology may take what is `around` the method."""
    topology = make_topology(config, made, config.prompts.per_step, around)
    plain = make_plain_source(config, policy, mesh, tokenizer, judge, sets, made.wanted, made.measured, topology.at_once,
                              topology.numbers, topology.reads)
    read, prior = capture_of(config, tokenizer, policy.model.config.num_layers), None
    if expects(config, made):
        prior = prior_lib.make(config, policy, len(judge.task.train), plain.stream.prompt_tokens, read)
    return with_topology(config, made, plain, policy, prior, around)


def make_plain_source(config: ConfigDict, policy: Policy, mesh: Mesh, tokenizer, judge: Judge,
                      sets: tuple[EvalSpec, ...] = (), wanted: Mapping[str, str] | None = None, columns: tuple[str, ...] = (),
                      at_once: int | None = None, numbers: tuple[str, ...] = (), reads: Reads = 0) -> Source:
    """A source that samples every prompt once, as held-out problems are, whatever the method.

    `wanted`, `columns`, `at_once`, `numbers`, `reads`: see `make_stream`.
    """
    s, model, task = config.sampling, policy.model, judge.task
    shared = [one for one in sets if not config.environment and (one.max_tokens or 0) <= s.max_tokens]
    asked = task.train, task.heldout, *(one.task.heldout for one in shared)
    restricted = {one.top_p < 1 for one in sets if one.top_p is not None} - ({False} if s.top_p == 1 else set())
    make = functools.partial(make_stream, config, model, mesh, tokenizer, make_server(
        config, model.config, stop_ids(tokenizer, s.stop_strings)))
    stream = make(asked, judge, wanted, 1 + len(restricted), columns=columns, at_once=at_once, numbers=numbers, reads=reads)
    drawn = config.budget.prompts if config.budget.utility else config.prompts.per_step
    readers = int(np.gcd(drawn, jax.process_count()))
    sets = tuple(one if one in shared else one._replace(stream=make(
        [one.task.heldout], Judge(one.task, one.reward), max_tokens=max(one.max_tokens or 0, s.max_tokens))) for one in sets)
    return Source(
        task=task, data=batches(task.train, drawn, config.seed, jax.process_index() % readers, readers), stream=stream,
        topology=single(config.prompts.per_step, group=s.group),
        stages=stages.chain(stages.measure(gradient_norms.make(policy))), prompts=config.prompts.per_step,
        max_tokens=s.max_tokens, overlong=config.prompts.overlong, readers=readers, sizes=sizes_of(config, model.config),
        sets=sets, model=model)


def sizes_of(config: ConfigDict, model: ModelConfig) -> Callable[[int, int, int, int], Ladders]:
    """The sizes of batches, see `data.shapes`."""
    if config.learner.packed_rows:
        return shapes_lib.limits
    slots = config.prompts.per_step * config.sampling.group * config.sampling.max_tokens
    return shapes_lib.unpadded if unpads(model, slots) else shapes_lib.padded


def unpads(model: ModelConfig, slots: int) -> bool:
    """Whether skipping the padding among this number of token slots saves more than compiling further shapes costs.

    It does from 1e11 products of a token with a weight on: about a second of an update on a CPU.
    """
    return flops.matmul_parameters(model) * slots >= 1e11
