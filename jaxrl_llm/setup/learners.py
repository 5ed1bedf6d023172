"""The learner of a run: its layout, recorders, optimiser and filters."""
import dataclasses
import functools
from typing import Any

import optax
from ml_collections import ConfigDict

from jaxrl_llm import methods, parallel, recorders, tasks
from jaxrl_llm.data.rollouts import CURRENT_ENTROPIES
from jaxrl_llm.data.shapes import Ladders, row_lengths
from jaxrl_llm.learning import gradient_norms, offload, optimizers
from jaxrl_llm.learning.layouts import Layout, packed, rectangular
from jaxrl_llm.learning.learner import Learner
from jaxrl_llm.learning.policy import Capture, Policy
from jaxrl_llm.learning.step import against_sampler, jitted, make_joint_update
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.setup import parts, teachers
from jaxrl_llm.setup.parts import Parts
from jaxrl_llm.setup.probe import capture_of
from jaxrl_llm.setup.start import policy_of
from jaxrl_llm.tools import written
from jaxrl_llm.tools.guard import Guarded


def make_learner(config: ConfigDict, made: Parts, policy: Policy, ladders: Ladders, tokenizer=None,
                 task: tasks.Task | None = None, as_sampled: bool = False) -> tuple[Learner, optax.Schedule]:
    """The learner of batches in the sizes of `ladders`, with the schedule of its learning rate; `as_sampled`: see `Learner`.

    The tokenizer and the task of the prompts are read for features, whose states end at a text, and for teachers.
    """
    policy = dataclasses.replace(policy, slopes=CURRENT_ENTROPIES in made.needs)
    c, learner, estimator, clip_norm = config, config.learner, made.estimator, config.optimizer.clip_norm or None
    alone = c.critic.pretrain_steps if estimator.has_critic else 0
    optimizer, schedule = optimizer_of(c, c.optimizer.learning_rate, c.steps - alone)
    objective = against_sampler(made.objective) if as_sampled else made.objective
    capture = capture_of(c, tokenizer, policy.model.config.num_layers) if "features" in made.needs else None
    layout = make_layout(c, objective, optimizer, policy, ladders, capture)
    filters = {name: one for name, one in made.filters.items() if one.per == "rollout"}
    once = learner.epochs * learner.minibatches * learner.micro_batches == 1 and ladders.groups == (1,)
    joint = None
    if capture is not None and once and not (made.objective.loads or made.objective.position or filters or as_sampled
                                             or learner.packed_rows):  # uncut groups
        together = make_joint_update(policy, capture, made.objective, estimator, optimizer, clip_norm=clip_norm)
        joint = Guarded("update", together, ladders.programs)

    def logprobs_of(model):
        return make_layout(c, made.objective, optimizer, policy_of(c, model, policy.mesh), ladders).logprobs

    longest_text = ladders.prompt_tokens[-1] + ladders.tokens[-1]
    context = recorders.Context(
        asked=frozenset(), config=c, policy=policy, estimator=estimator, logprobs=layout.logprobs, jitted=jitted,
        guarded=lambda name, function, times=1: Guarded(name, function, times * ladders.programs),
        optimizer=lambda rate, updates=1: optimizer_of(c, rate, c.steps * updates)[0],
        loaded=teachers.loader(c, task, tokenizer, policy.mesh, longest_text, logprobs_of),
        pieces=pieces_of(c), features=layout.features, placed=layout.placed, square_norms=gradient_norms.make(policy),
        as_sampled=made.replay is not None and made.replay.as_sampled)
    offloaded = tuple(written.parts(learner.offload))
    made_recorders = make_recorders(made, context, offloaded, joint is not None, as_sampled)
    whole = Learner(
        policy, estimator, made_recorders, layout, policy.mesh,
        tuple(c.prompts.per_step * n for n in ladders.groups), c.sampling.group, joint, learner.epochs, learner.minibatches,
        alone, learner.max_skipped, offloaded, functools.partial(optimizers.metrics, c.optimizer), made.controls, filters,
        c.optimizer.ema, as_sampled, parallel.sampler_mesh(policy.mesh, c.sampling.tensor))
    if made.replay is None or not made.replay.updates:
        return whole, schedule
    return with_rehearsal(c, made, whole, ladders), schedule


def with_rehearsal(config: ConfigDict, made: Parts, learner: Learner, ladders: Ladders) -> Learner:
    """The learner with that of replayed batches, which has an estimator and an objective of its own if the method names them.

    Recorders are those of both; each learner measures with those that provide what its parts read. Replayed batches have the
    shapes of fresh ones.
    """
    assert made.replay is not None
    as_sampled = made.replay.as_sampled or learner.as_sampled
    estimator, objective, layout = learner.estimator, learner.objective, learner.layout
    if made.rehearsed is not None:
        estimator, objective = made.rehearsed
        layout = make_layout(config, objective, learner.optimizer, learner.policy, ladders)

    def measuring(needs: frozenset[str], as_sampled: bool) -> tuple[recorders.Recorder, ...]:
        wanted = measured_needs(config, needs, as_sampled and not made.unknown)
        return tuple(one for one in learner.recorders if {*one.provides} & wanted)

    again = dataclasses.replace(
        learner, estimator=estimator, layout=layout, joint=None, epochs=1, filters={},
        as_sampled=as_sampled, critic_only=made.replay.critic_only,
        recorders=measuring(made.rehearsed_needs, as_sampled))
    return dataclasses.replace(
        learner, rehearsal=again, renew=made.replay.renew, renewed=made.replay.updates * config.prompts.per_step,
        recorders=measuring(made.fresh_needs, learner.as_sampled))


def measured_needs(config: ConfigDict, needs: frozenset[str], as_sampled: bool) -> set[str]:
    """The needs that recorders provide; sampling itself gives all old log-probs of batches that learn `as_sampled`."""
    return parts.recorded_needs(config, needs) - ({"old_logprobs"} if as_sampled else set())


def make_recorders(made: Parts, context: recorders.Context, offloaded: tuple[str, ...], joint: bool,
                   as_sampled: bool = False) -> tuple[recorders.Recorder, ...]:
    """The recorders of what the method needs; a `joint` update records features itself."""
    as_sampled = as_sampled and not made.unknown
    wanted = measured_needs(context.config, made.fresh_needs, as_sampled)
    wanted -= {*recorders.RECORDERS["features"].provides} if joint else set()
    if made.replay is not None and made.replay.updates:
        wanted |= measured_needs(context.config, made.rehearsed_needs,
                                 as_sampled or made.replay.as_sampled and not made.unknown)
    first = [name for name, _ in made.method.parts("recorders")]
    asked = recorders.asked(wanted, made.there | methods.provision.sampled(), first)
    several = [recorders.make(name, context._replace(asked=frozenset(fields))) for name, fields in sorted(asked.items())]
    return tuple(one._replace(given=offload.away(offloaded, one.name, one.given)) for one in several)


def make_layout(config: ConfigDict, objective: Objective, optimizer: optax.GradientTransformation, policy: Policy,
                ladders: Ladders, capture: Capture | None = None) -> Layout:
    """Packed rows if `learner.packed_rows` sets their number per micro-batch, else rectangular ones."""
    learner = config.learner
    settings: dict[str, Any] = dict(clip_norm=config.optimizer.clip_norm or None, capture=capture)
    if learner.packed_rows:
        lengths = ladders.rows or row_lengths(
            ladders.prompt_tokens[-1], ladders.tokens[-1], config.sampling.group, policy.mesh.shape["seq"])
        return packed(policy, objective, optimizer, lengths, learner.packed_rows, **settings)
    shards = parallel.shards_of(policy.mesh.shape)
    together = config.prompts.per_step // (learner.minibatches * learner.micro_batches * shards)
    return rectangular(policy, objective, optimizer, ladders, micro_batches=learner.micro_batches,
                       parts=pieces_of(config), together=together, **settings)


def pieces_of(config: ConfigDict) -> int:
    """Number of parts in which log-probs of a batch are computed: as many as the updates have, so they need no more memory."""
    return config.learner.minibatches * config.learner.micro_batches if config.learner.micro_batches > 1 else 1


def optimizer_of(config: ConfigDict, learning_rate: float, steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The configured optimiser, for `steps` rollout batches at this rate, and its schedule."""
    o, learner = config.optimizer, config.learner
    return optimizers.make_optimizer(
        learning_rate, steps * learner.epochs * learner.minibatches, name=o.name, warmup_updates=o.warmup_updates,
        schedule=o.schedule, decayed=o.decayed, weight_decay=o.weight_decay, b1=o.b1, b2=o.b2, momentum=o.momentum)
