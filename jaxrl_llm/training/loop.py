"""The loop: sample, score, estimate, update; evaluate and save now and then. Everything it calls is a pure step."""
import contextlib
import dataclasses
import errno
import functools
import io
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm import control, parallel
from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.descent import keep_finite
from jaxrl_llm.evaluation.accuracy import Accuracy, bootstrap_mean, pass_at_k
from jaxrl_llm.rollouts import Rollouts, take
from jaxrl_llm.tasks.loader import Batches, batches
from jaxrl_llm.training import offload, optimizers, preemption, prior, rollout, rounds, setup
from jaxrl_llm.training import workdir as folders
from jaxrl_llm.training.checkpoints import Checkpoints
from jaxrl_llm.training.config import arithmetic_table
from jaxrl_llm.training.forecast import forecast
from jaxrl_llm.training.lock import locked
from jaxrl_llm.training.metrics import MetricWriter, PhaseTimer, host_memory
from jaxrl_llm.training.plots import draw_or_warn, plot_curves
from jaxrl_llm.training.progress import Progress
from jaxrl_llm.training.samples import per_token, write_samples
from jaxrl_llm.training.state import TrainState
from jaxrl_llm.training.tracking import tracked
from jaxrl_llm.training.uids import Uids
from jaxrl_llm.training.value_plots import plot_history
from jaxrl_llm.training.warmup import imitate
from jaxrl_llm.training.workdir import Workdir, check_agreement, open_workdir, records
from jaxrl_llm.values.critic import metrics as value_metrics

# Folded into the run's key, or into that of a step, whose number they never are.
_EVAL_STREAM = 2**31 - 1
_SHUFFLE_STREAM = 2**31 - 2
_SAMPLING_STREAM = 2**31 - 3


class TrainingDiverged(RuntimeError):
    """Too many updates in a row had a loss or gradient that was not finite."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Held-out performance of one policy."""

    accuracy: Accuracy
    any_right: float
    length: float
    truncated: float
    sampled: rollout.Sampled

    def metrics(self) -> dict[str, float]:
        return {"eval/accuracy": self.accuracy.mean, "eval/accuracy_low": self.accuracy.low,
                "eval/accuracy_high": self.accuracy.high, "eval/pass_at_group": self.any_right,
                "eval/length": self.length, "eval/truncated": self.truncated}


def held_out(source, problems: int) -> list:
    """`problems` of `source`, or all if there are fewer, drawn with a fixed seed.

    Sources are often sorted: their first problems are no fair sample. Every run is measured on the same ones.
    """
    return [source[int(i)] for i in np.random.default_rng(0).permutation(len(source))[:problems]]


def evaluate(run: setup.Run, params, lora, *, problems: int, key, timer=None, temperature: float | None = None) -> Evaluation:
    """Samples a group for each of `problems` held-out problems, through the compiled training sampler."""
    c, timer = run.config, timer or PhaseTimer()
    rows = rollout.fitting_problems(held_out(run.task.heldout, problems), run.tokenizer, run.prompt_tokens, c.prompts.overlong)
    if not rows:
        raise ValueError(f"no held-out prompt fits in prompts.max_tokens={run.prompt_tokens}; raise it")
    generate, parts = run.sampler(params, lora, temperature), []
    uids = Uids().take(len(rows), c.sampling.group)
    for start in range(0, len(rows), c.prompts.per_step):
        part = slice(start, start + c.prompts.per_step)
        parts.append(rollout.sample(
            generate, rows[part], key, uids[part], timer=timer, prompt_tokens=run.prompt_tokens, prompts=c.prompts.per_step,
            tokenizer=run.tokenizer, reward=run.reward, stop_strings=c.sampling.stop_strings))
    sampled = rollout.concatenate(parts)
    first_component = sampled.scores.components[:, 0].reshape(sampled.rewards.shape)
    facts = rollout.metrics_of(sampled)
    return Evaluation(bootstrap_mean(first_component), pass_at_k(first_component > 0.5, c.sampling.group),
                      facts["completion/length"], facts["completion/truncated"], sampled)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def wants_more(estimator: Estimator, first: int, most: int, rewards, valid, expected):
    """bool[P]: the prompts that an estimator samples again, by what was `expected` of them (None: it does not ask)."""
    rollouts = Rollouts(mask=valid[..., None], valid=valid, rewards=rewards, extras={"prior": expected})
    return estimator.wants_more(rollouts, first, most)


def expectations(run: setup.Run, state: TrainState, rows, draw) -> prior.Facts:
    """What is known of these prompts before they are sampled: the facts that the prior reads, and what it makes of them.

    A prior that asks the policy itself may do so by `draw(rows) -> Sampled`.
    """
    facts = run.prior.read(rows, state.params, state.lora)
    if run.prior.draws:
        owner = np.resize(np.arange(len(rows)), run.config.prompts.per_step)
        found = np.mean([draw(owner).rewards.mean(1) for _ in range(run.prior.draws)], axis=0)
        facts["sampled"] = (np.bincount(owner, found) / np.bincount(owner)).astype(np.float32)
    return {**facts, "expected": parallel.fetch(prior.predict(run.prior, state.prior, facts))}


def sample_groups(run: setup.Run, state: TrainState, generate, rows, uids: Uids, timer) -> rollout.Sampled:
    """Completions of these prompts, by the budget of each if there are budgets; in rounds if the estimator wants more."""
    c, most = run.config, run.rounds * run.config.sampling.group
    key = jax.random.fold_in(state.key, _SAMPLING_STREAM)

    def draw(chosen):
        return rollout.sample(
            generate, [rows[i] for i in chosen], key, uids.take(len(chosen), c.sampling.group), timer=timer,
            prompt_tokens=run.prompt_tokens, prompts=c.prompts.per_step, tokenizer=run.tokenizer, reward=run.reward,
            stop_strings=c.sampling.stop_strings)

    if run.rounds == 1 and run.prior is None:
        return draw(range(len(rows)))
    known = {} if run.prior is None else expectations(run, state, rows, draw)
    if run.budget:
        owner = np.repeat(np.arange(len(rows)), run.shares(known["expected"]))
        sampled, valid = rounds.merge(draw(owner), owner)
        known = jax.tree.map(lambda x: x[np.unique(owner)], known)
        return dataclasses.replace(rounds.widen(sampled, valid, most), prior=known)

    def wants(rewards, valid):
        room = ((0, 0), (0, most - valid.shape[1]))  # one shape for all rounds
        rewards, valid = np.pad(rewards, room), np.pad(valid, room)
        return wants_more(run.estimator, c.sampling.group, most, rewards, valid, known.get("expected"))

    sampled, valid = rounds.in_rounds(draw, wants, len(rows), run.rounds)
    return dataclasses.replace(rounds.widen(sampled, valid, most), prior=known or None)


def collect(run: setup.Run, state: TrainState, data: Batches, uids: Uids, timer
            ) -> tuple[rollout.Sampled, dict[str, float]]:
    """One batch of rollouts; with filters, rounds of generation until enough prompts pass (or `sampling.max_rounds`)."""
    c, P = run.config, run.drawn_prompts
    generate, kept, drawn, facts = run.sampler(state.params, state.lora), [], [], {}
    filters = [control.make_filter(name) for name in run.method.filters]
    attempts = c.sampling.max_rounds if filters else 1
    for _ in range(attempts):
        rows = []
        for _ in range(100):
            rows += rollout.fitting_problems(next(data), run.tokenizer, run.prompt_tokens, c.prompts.overlong,
                                             run.readers)
            if len(rows) >= P:
                break
        if not rows:
            raise ValueError(f"no prompt of 100 batches fits in prompts.max_tokens={run.prompt_tokens}; raise it")
        sampled = sample_groups(run, state, generate, rows[:P], uids, timer)
        drawn.append(sampled)
        keep, found = np.ones(len(sampled.problems), bool), len(sampled.problems)
        for one in filters:
            keep &= np.asarray(one.keep(rollout.to_rollouts(sampled, c.sampling.max_tokens, found, int(state.step))))
        kept.append(rollout.select(sampled, keep))
        if sum(len(part.problems) for part in kept) >= P:
            break
    facts = rollout.metrics_of(rollout.concatenate(drawn))
    if filters:
        facts |= {"filter/rounds": float(len(drawn)),
                  "filter/kept": sum(len(p.problems) for p in kept) / sum(len(p.problems) for p in drawn)}
    together = rollout.concatenate(kept)
    first = np.arange(len(together.problems)) < P
    return rollout.select(together, first), facts


def mean_metrics(updates: list[dict]) -> dict[str, float]:
    """Metrics of the updates of a step as one: means, maxima for names in `max/`, the last value of the running count.

    None of a step without updates, whose rollouts the method dropped.
    """
    if not updates:
        return {}
    whole = {name: float((np.max if name.startswith("max/") else np.mean)([found[name] for found in updates]))
             for name in updates[0]}
    return whole | {"skipped_updates": float(updates[-1]["skipped_updates"])}


def record_values(run: setup.Run, state: TrainState, batch: Rollouts, alone: bool) -> tuple[Rollouts, dict]:
    """The batch with the critic's `values` and `value_targets` (f32[P, G, T]) in its extras, and how good the values are.

    Both are fixed for all updates of the step. A critic that is trained `alone` is fitted to the returns that were seen.
    """
    if run.critic is None:
        return batch, {}
    values = run.values(state.critic.params, (state.params, state.lora), batch)
    batch = batch.replace(extras={**batch.extras, "values": values})
    targets_of = jax.jit(run.estimator.value_targets, static_argnums=1)
    returns = targets_of(batch, True)
    targets = returns if alone else targets_of(batch, False)
    batch = batch.replace(extras={**batch.extras, "value_targets": targets})
    facts = jax.device_get(jax.jit(value_metrics)(values, returns, batch.token_mask))
    return run.place(batch), facts


def update(run: setup.Run, state: TrainState, part: Rollouts, advantages, alone: bool) -> tuple[TrainState, dict]:
    """One optimiser step of the critic, if there is one, then of the policy, unless the critic is trained `alone`.

    Where `advantages` is None, the update estimates them itself.
    """
    found = {}
    if run.critic is not None:
        critic, found = run.fit(state.critic, (state.params, state.lora), part)
        state = state.replace(critic=critic)
    if alone:
        return state, found | {"skipped_updates": state.skipped}
    state, learned = run.joint(state, part) if advantages is None else run.update(state, part, advantages)
    return state, found | learned


@functools.partial(jax.jit, static_argnums=(0, 1))
def estimate(estimator: Estimator, mesh: Mesh, batch: Rollouts, state):
    """`(advantages, state, metrics)` of an estimator; its state stays laid out by the partition table, and finite."""
    advantages, new = estimator.update(batch, state)
    new = keep_finite(new, state)
    told = {} if estimator.metrics is None else estimator.metrics(batch, advantages, state)
    return advantages, jax.lax.with_sharding_constraint(new, parallel.tree_shardings(new, mesh)), told


def measure(run: setup.Run, state: TrainState, sampled: Rollouts, reference) -> Rollouts:
    """The batch with what the method needs of forward passes."""
    batch = sampled
    if run.joint is None and "features" in run.needs:
        logprobs, entropies, features = run.capture(state.params, state.lora, sampled)
        batch = batch.replace(old_logprobs=logprobs, entropies=entropies, features=features)
    elif run.updates_per_step > 1 or "old_logprobs" in run.needs:
        logprobs, entropies = run.score(state.params, state.lora, texts_of(sampled))
        batch = batch.replace(old_logprobs=logprobs, entropies=entropies)
    if "ref_logprobs" in run.needs:  # with adapters the reference is the model without them
        frozen = offload.near(run.config, "reference", reference) if state.lora is None else state.params
        batch = batch.replace(ref_logprobs=run.score(frozen, None, texts_of(sampled))[0])
    return batch


def texts_of(batch: Rollouts) -> Rollouts:
    """What log-probs are computed from: one program scores a batch, whatever else is known of it."""
    return Rollouts(mask=batch.mask, valid=batch.valid, tokens=batch.tokens, prompt_tokens=batch.prompt_tokens,
                    prompt_mask=batch.prompt_mask, filled=batch.filled)


def score(run: setup.Run, state: TrainState, sampled: Rollouts, reference, alone: bool):
    """Everything the updates of a batch need beside it: `(state, batch, advantages, metrics)`.

    Advantages are None where the update makes them in its own forward pass (`run.joint`).
    """
    if run.rounds > 1:  # advantages of whole groups, which differ in size; all else in rows of one size, as few as hold them
        placed = run.place(sampled)
        advantages, estimator_state, told = estimate(run.estimator, run.mesh, placed, state.estimator_state)
        if run.estimator.keeps is not None:
            sampled = sampled.replace(valid=parallel.fetch(jax.jit(run.estimator.keeps)(placed)))
        rows, advantages = rounds.regroup(
            sampled, parallel.fetch(advantages), run.config.sampling.group, run.config.prompts.per_step)
        batch = measure(run, state, run.place(run.unpadded(rows)), reference)
        return state.replace(estimator_state=estimator_state), batch, run.place(advantages), told
    batch = measure(run, state, run.place(run.unpadded(sampled)), reference)
    batch, facts = record_values(run, state, batch, alone)
    if run.joint is not None:
        return state, batch, None, facts
    advantages, estimator_state, told = estimate(run.estimator, run.mesh, batch, state.estimator_state)
    jax.block_until_ready(advantages)
    return state.replace(estimator_state=estimator_state), batch, advantages, facts | told


def learn(run: setup.Run, state: TrainState, sampled: rollout.Sampled, reference, timer):
    """Advantages and optimiser steps on one batch: `(state, metrics, Rollouts, advantages f32[P, G, T])`.

    The metrics are averaged over the updates; the last two, what was learned from, are None without prompts.
    """
    c, alone = run.config, int(state.step) < run.pretrain_steps
    if not sampled.problems:  # the filters kept nothing: there is nothing to learn from
        return state.replace(step=state.step + 1), {}, None, None
    whole = rollout.to_rollouts(sampled, c.sampling.max_tokens, c.prompts.per_step, int(state.step))
    with timer("score"):
        state, batch, advantages, facts = score(run, state, whole, reference, alone)
    if state.prior is not None:
        known = jax.tree.map(lambda x: rollout.filled(x, len(whole.prompt_ids)), sampled.prior)
        state = state.replace(prior=prior.observe(run.mesh, run.prior, state.prior, known, whole.rewards, whole.valid))
    rows = batch.mask.shape[0]
    size = rows // c.learner.minibatches
    shuffle_key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), _SHUFFLE_STREAM)
    updates, estimated, real = [], advantages, parallel.fetch(batch.valid).any(1)
    with timer("update"):
        state = offload.moments_near(c, state)
        for epoch in range(c.learner.epochs):
            if c.learner.minibatches == 1:
                state, found = update(run, state, batch, advantages, alone)
                estimated = found.pop("advantages", advantages)
                updates.append(found)
                continue
            order = jax.random.permutation(jax.random.fold_in(shuffle_key, epoch), rows)
            for start in range(0, rows, size):
                if not real[np.asarray(order[start:start + size])].any():  # nothing but filling, where filters kept too few
                    continue
                part, its_advantages = run.place(rows_of((batch, advantages), order, start, size))
                state, found = update(run, state, part, its_advantages, alone)
                updates.append(found)
        metrics = mean_metrics(jax.device_get(updates)) | jax.device_get(
            facts | optimizers.metrics(run.config.optimizer, state.opt_state))
        state = offload.moments_away(c, state)
    if int(state.skipped_in_row) >= c.learner.max_skipped:
        raise TrainingDiverged(
            f"{int(state.skipped_in_row)} updates in a row had a loss or gradient that was not finite (step "
            f"{int(state.step)}). The weights are those before the first of them. Lower optimizer.learning_rate, check the "
            "rewards and mismatch/kl in the metrics, then resume from the last checkpoint")
    return state.replace(step=state.step + 1), metrics, batch, estimated


@functools.partial(jax.jit, static_argnums=3)
def rows_of(tree, order, start, size: int):
    """Of every leaf `[P, ...]` the rows `order[start:start + size]`."""
    chosen = take(order, start, size)
    return jax.tree.map(lambda x: x[chosen], tree)


def taught(run: setup.Run, state: TrainState, batch: Rollouts | None, advantages) -> dict[str, np.ndarray]:
    """What a page tells of the tokens of a batch after it was learned from: advantages, and what became of probabilities."""
    if batch is None or run.rounds > 1:  # rows of unequal groups no longer lie as they were sampled
        return {}
    s, before = run.config.sampling, batch.old_logprobs
    if before is None and s.temperature > 0 and not s.top_k and s.top_p == 1 and not s.min_p:
        before = batch.behavior_logprobs  # of the sampler, which drew from the very same distribution
    if before is None:
        return parallel.fetch({"advantages": advantages})
    ratios = jax.numpy.exp(run.score(state.params, state.lora, texts_of(batch))[0] - before)
    return parallel.fetch({"advantages": advantages, "ratios": ratios})


def write_page(path: Path, step: int, run: setup.Run, sampled: rollout.Sampled, numbers: Mapping[str, np.ndarray]) -> None:
    """Samples of a batch as readable text and JSON lines, with the sampler's and further `numbers` f32[P, G, T] per token."""
    if not parallel.is_primary():
        return
    P, G = sampled.rewards.shape
    rows = lambda values: [[values[p * G + g] for g in np.flatnonzero(sampled.drawn[p])] for p in range(P)]  # noqa: E731
    parts = [dict(zip(sampled.scores.names, map(float, row))) for row in sampled.scores.components]
    asked, spell = sampled.prompts, functools.partial(run.tokenizer.decode_batch, skip_special=False)
    prompts = spell([asked.tokens[p][asked.mask[p]] for p in range(P)])
    made, reasons = sampled.completions, np.where(sampled.completions.stopped, "stop", "length")
    lengths, flat = made.mask.sum(-1).ravel().tolist(), lambda x: x[:P].reshape(P * G, x.shape[-1])
    numbers = {"logprobs": np.asarray(made.logprobs), "entropies": np.asarray(made.entropies), **numbers}
    tokens = per_token(flat(made.tokens), lengths, spell, {name: flat(x) for name, x in numbers.items()})
    columns = sampled.scores.total.tolist(), parts, lengths, reasons.ravel().tolist(), tokens
    write_samples(path, step, prompts, [p.answer for p in sampled.problems], rows(sampled.texts), *map(rows, columns))


def warm_up(run: setup.Run, params, progress):
    """The supervised warm-up, if the configuration asks for one."""
    w = run.config.warmup
    if not w.steps:
        return params
    data = batches(run.task.train, w.batch, seed=run.config.seed + 1)
    params, _ = imitate(run.policy, params, data, run.tokenizer, steps=w.steps, learning_rate=w.learning_rate,
                        prompt_tokens=run.prompt_tokens, max_tokens=run.config.sampling.max_tokens,
                        overlong=run.config.prompts.overlong, progress=progress)
    return params


def reference_weights(run: setup.Run, state: TrainState, work: Workdir):
    """The frozen weights that `ref_logprobs` come from: those of step 0, kept beside the checkpoints. None if unneeded.

    With adapters nothing has to be kept: the reference is the model without them.
    """
    if "ref_logprobs" not in run.needs or state.lora is not None:
        return None
    if work.resume and not (work.path / "reference").is_dir():
        raise ValueError(f"{work.path} was started without reference weights, which this configuration needs (kl_coef or a "
                         "reference method); start a new run, or resume without it")
    with Checkpoints(work.path / "reference", keep=1) as store:
        if not work.resume:
            store.save(0, state.params)
        return store.restore(state.params).state


class Reached(NamedTuple):
    """Where a run is: `state`, and the `position` from which it goes on, in the `data` and of the `next_uid`.

    One object, which no interrupt parts.
    """

    state: TrainState
    position: dict[str, Any]


def train(config: ConfigDict, workdir: str | Path, resume: bool | str = False) -> dict[str, Evaluation]:
    """Runs `config` in `workdir` to its last step. Returns the held-out evaluations `{"before": ..., "after": ...}`.

    "before" is missing when the run was resumed. The folder then holds config.json, metrics.jsonl, TensorBoard events,
    samples/, curves.png and checkpoints/.

    Raises:
      ValueError, FileExistsError: for configurations that cannot work and folders that belong to another run.
      RuntimeError: when a living run has the folder.
      TrainingDiverged: after `learner.max_skipped` non-finite updates in a row.
      RecompilationError: when a step compiles again after its shapes are settled.
      Preempted (SystemExit 75): after SIGTERM or SIGUSR1.
    """
    folder = folders.folder_of(workdir)
    with preemption.watch(), locked(folder):
        try:
            return _train(config, folder, resume)
        except preemption.Preempted as stopped:
            if parallel.is_primary():
                saved = folders.checkpoint_steps(folder / "checkpoints")
                how = "continue with --resume" if saved else "nothing was trained yet: start it again, without --resume"
                print("\n".join([*getattr(stopped, "__notes__", ()), how]), file=sys.stderr, flush=True)
            raise


def _train(config: ConfigDict, workdir: Path, resume: bool | str) -> dict[str, Evaluation]:
    with preemption.at_once():
        run, params = setup.build(config)
    preemption.check()
    config, primary = run.config, parallel.is_primary()
    work = open_workdir(workdir, config, resume)  # compares the numbers that the run really uses
    check_agreement(work)  # and nothing is written before every process has looked
    if not work.resume and primary:
        work.record()
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    for name, value in [("model", f"{weights:,} weights on {jax.device_count()} x {jax.devices()[0].device_kind}"),
                        *((f"reward {name}", how) for name, how in run.reward.prepare()),
                        *arithmetic_table(run.config, run.prompt_tokens, run.rounds), *forecast(run)]:
        if primary:
            print(f"{name:32}{value}")
    data = batches(run.task.train, run.drawn_prompts, config.seed, jax.process_index() % run.readers, run.readers)
    with (Checkpoints(work.checkpoints, keep=config.checkpoint.keep) as checkpoints,
          records(work) as folder, tracked(config.wandb if primary else "", folder, config.to_dict(), work.resume) as log,
          Progress(config.steps, stream=None if primary else io.StringIO()) as progress):
        with preemption.at_once():
            uids = Uids()
            state = _first_state(run, params, work, checkpoints, data, uids, progress)
            params = None  # those of the state are used, and room for both there may not be
        preemption.check()
        state = offload.moments_away(config, state)
        reference = offload.away(config, "reference", reference_weights(run, state, work))
        if work.resume and primary:  # only now is it known that the folder can go on with this configuration
            work.record()
        start = int(state.step)
        with MetricWriter(folder, restored_step=start or None, also=log) as writer:  # step 0 is evaluated and written again
            if work.resume and primary and start and writer.last_step is None:
                warnings.warn(f"{writer.path} is gone or empty: curves and reports lack the history of steps 0 to {start}. The "
                              "run itself goes on as it would have", RuntimeWarning, stacklevel=3)
            try:
                reached = Reached(state, position_of(data, uids))
                return _steps(run, reached, data, uids, reference, folder, checkpoints, writer, progress)
            finally:
                if writer.last_step is not None:
                    draw_or_warn(plot_curves, writer.path, folder / "curves.png")


def position_of(data: Batches, uids: Uids) -> dict[str, Any]:
    """What a checkpoint says of where a run goes on."""
    return {"data": data.get_state(), "next_uid": uids.next}


def _first_state(run: setup.Run, params, work: Workdir, checkpoints: Checkpoints, data: Batches, uids: Uids, progress
                 ) -> TrainState:
    """The state that a run begins with, or that of its last checkpoint, to whose position `data` and `uids` are brought."""
    if not work.resume:
        return setup.initial_state(run, warm_up(run, params, progress))
    progress.phase("restoring")
    found = checkpoints.restore(offload.moments_away(run.config, setup.initial_state(run, params)))
    data.set_state(found.host["data"])
    uids.next = found.host["next_uid"]
    progress.step(found.step, {})
    return found.state


def _steps(run, reached: Reached, data, uids, reference, folder, checkpoints, writer, progress):
    """All steps from `reached` on; every `eval.every` steps the held-out evaluation, and so on."""
    config, timer = run.config, PhaseTimer()
    start, evaluations = int(reached.state.step), {}
    due = lambda step, every: (every and step % every == 0) or step == config.steps  # noqa: E731

    def look(step):
        progress.phase("evaluating" if step else "compiling the sampler, first evaluation")
        state = reached.state
        key = jax.random.fold_in(state.key, _EVAL_STREAM)
        found = evaluate(run, state.params, state.lora, problems=config.eval.problems, key=key, timer=timer)
        write_page(folder, step, run, found.sampled, {})
        return found

    def save():
        progress.phase("saving")
        state, position = reached
        with timer("checkpoint"):
            checkpoints.save(int(state.step), state, position)
        return int(state.step)

    saved, first = start, " (compiles on the first step)"
    try:
        with preemption.at_once():  # nothing was learned yet
            if start == 0:
                evaluations["before"] = look(0)
            elif due(start, config.eval.every) and parallel.agree(writer.last_step or 0) < start:
                evaluations["after"] = look(start)  # in which the run broke off, after its step had been saved
        for found in evaluations.values():
            writer.write(start, found.metrics() | timer.collect())
        if start == 0:
            save()
        preemption.check()
        for step in range(start + 1, config.steps + 1):
            began = time.perf_counter()
            with preemption.at_once(bool(first)):  # what the first step starts from has been saved
                progress.phase("sampling" + first)
                sampled, metrics = collect(run, reached.state, data, uids, timer)
                position = position_of(data, uids)
                progress.phase("learning" + first)
                state, learned, batch, advantages = learn(run, reached.state, sampled, reference, timer)
                reached, first = Reached(state, position), ""
            metrics |= learned | _pace(run, state, sampled, time.perf_counter() - began)
            if due(step, config.eval.every):
                if run.estimator.history is not None:
                    draw_or_warn(plot_history, *run.estimator.history(state.estimator_state), folder / "values.png")
                evaluations["after"] = look(step)
                metrics |= evaluations["after"].metrics()
            elif due(step, config.samples_every):
                write_page(folder, step, run, sampled, taught(run, state, batch, advantages))
            batch = advantages = state = None  # makes room for the next ones
            writer.write(step, metrics | timer.collect() | host_memory())
            progress.step(step, metrics)
            if due(step, config.checkpoint.every):  # after the line, which a resume drops if the save did not finish
                saved = save()
            preemption.check()  # leaves through the handler below, which saves
    except BaseException as error:
        _rescue(error, reached.state, saved, save, checkpoints, folder)
        raise
    return evaluations


def _pace(run: setup.Run, state: TrainState, sampled: rollout.Sampled, seconds: float) -> dict[str, float]:
    """The learning rate of a step's last update, and how long the step took."""
    updates = optimizers.updates_made(state.opt_state)
    return {"learning_rate": float(run.schedule(max(updates - 1, 0))), "time/step": seconds,
            "speed/tokens_per_second": float(sampled.completions.mask.sum()) / seconds}


def _rescue(error: BaseException, state: TrainState, saved: int, save: Callable[[], int], checkpoints: Checkpoints,
            folder: Path) -> None:
    """Saves what was learned since step `saved`, where that can still be done; notes in `error` what became of it."""
    # An update consumes the state it is given: what broke inside one leaves only the last checkpoint. What broke in one
    # of several processes did not break in the others, which would not take part in saving.
    alone = not parallel.several() or isinstance(error, preemption.Preempted)
    if alone and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)) and int(state.step) > saved:
        try:
            step = save()
            checkpoints.wait()
            error.add_note(f"step {step} was saved; continue with --resume")
        except Exception as problem:  # what ended the run is what has to be told
            error.add_note(f"step {int(state.step)} could not be saved: {problem}; the last saved one is step {saved}, from "
                           "which --resume continues")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            error.add_note(folders.what_to_free(folder))
