"""From finished rollouts to new weights: recorded measurements, advantages, optimiser steps."""
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm import parallel
from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.control import Filter, Known, knobs
from jaxrl_llm.control.base import without
from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.data.rollouts import Role, Rollouts, known_logprobs, sampled_logprobs, take, with_apart, without_apart
from jaxrl_llm.learning import average, offload, optimizers
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.controls import Controls, facts_of
from jaxrl_llm.learning.layouts import Layout
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.learning.regroup import regroup
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.learning.state import TrainState
from jaxrl_llm.learning.step import loss_terms
from jaxrl_llm.maths import masked
from jaxrl_llm.maths.descent import keep_finite
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.recorders.base import Recorder, recorded, texts_of
from jaxrl_llm.replay import priorities
from jaxrl_llm.tools.guard import Guarded
from jaxrl_llm.tools.timer import PhaseTimer
from jaxrl_llm.values.critic import metrics as value_metrics

MISMATCHES = ("mismatch/kl", "max/mismatch")  # see `learning.step.mismatch`
READS = (
    Knob("learning_rate", least=0, doc="f32[], a factor of the schedule's rate"),
    Knob("epochs", least=1, doc="i32[], passes over the batch, at most those configured"),
    Knob("fresh_optimizer", doc="bool[], whether the state of the optimiser is cleared before the updates of a batch; its "
         "schedule goes on"),
    Knob("reference", None, doc="parameters of the reference policy for `ref_logprobs`"),
    Knob("reset", doc="bool[], read after evaluations: the policy becomes the reference, and the optimiser begins again with "
         "its schedule"),
)
_PER_STEP = READS[:3]  # a step reads these on the host
_SHUFFLE_STREAM = 2**31 - 2  # folded into the key of a step


class TrainingDiverged(RuntimeError):
    """Too many updates in a row had a loss or gradient that was not finite."""


class Learned(NamedTuple):
    """The new `state`, `metrics` (means over the updates), and the trained `rollouts` and `advantages` f32[P, G, T].

    The last two are None if there was nothing to train on.
    """

    state: TrainState
    metrics: dict[str, float]
    rollouts: Rollouts | None = None
    advantages: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Learner:
    """`learn(state, rollouts)` is one step of a run; see `setup.learners.make_learner` for one made from a configuration.

    Attributes:
      policy, estimator: the trained policy, and its advantages.
      recorders: measurements that are first recorded with rollouts, in this order.
      layout: the layout of a batch in the model, for its log-probs and for updates, with objective and optimiser.
      joint: the update that estimates in its own forward pass, with its own estimator, see `make_joint_update`; None:
        advantages come first.
      rows, group: P, or numbers of rows to choose from, and G of the trained rows; larger groups become several rows, see
        `learning.regroup`.
      epochs, minibatches: passes over a batch, and updates per pass.
      pretrain_steps: number of first steps in which the policy is not updated.
      max_skipped: number of consecutive updates that may be refused.
      offload: names of the trees kept in host memory, see `learning.offload`.
      controls: controllers, which observe each step and set the next.
      optimizer_metrics: metrics by name from the state of the optimiser.
      filters: filters of single rollouts, by name; dropped rollouts count in advantages and not in the loss.
      ema: decay of the moving average of the trained parameters; 0: none.
      replicas: the mesh of the sampler, if it is not that of the weights, see `parallel.sampler_mesh`.
      as_sampled: whether the policy before the update counts as the one that sampled each token, as under a lag.
      rehearsal: the learner of replayed batches, which shares weights, critics and optimiser with this one; None: nothing is
        replayed in updates of its own.
      critic_only: whether its batches train what is beside the policy alone.
      renew, renewed: priorities of groups that it has learned from, see `replay.Replay`, and how many groups a step can have.
    """

    policy: Policy
    estimator: Estimator
    recorders: tuple[Recorder, ...]
    layout: Layout
    mesh: Mesh
    rows: tuple[int, ...]
    group: int
    joint: Guarded | None = None
    epochs: int = 1
    minibatches: int = 1
    pretrain_steps: int = 0
    max_skipped: int = 10
    offload: tuple[str, ...] = ()
    optimizer_metrics: Callable[[Any], dict[str, jax.Array]] = lambda opt_state: {}
    controls: Controls = Controls()
    filters: Mapping[str, Filter] = dataclasses.field(default_factory=dict)
    ema: float = 0.0
    as_sampled: bool = False
    replicas: Mesh | None = None
    rehearsal: "Learner | None" = None
    critic_only: bool = False
    renew: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    renewed: int = 0

    @property
    def objective(self) -> Objective:
        """The objective; for another one make another `layout`."""
        return self.layout.objective

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimiser; for another one make another `layout`."""
        return self.layout.optimizer

    def known(self, params) -> tuple[Known, ...]:
        """What controllers may take from the learner to begin."""
        return (Known("params", "parameters before the first step", lambda: params),
                Known("temperature", "float, the configured one", lambda: self.policy.temperature))

    def init(self, params, lora, key: jax.Array, known: Iterable[Known] = ()) -> TrainState:
        """The state before the first step, sharded over the mesh; `known`: values for controllers, beside the learner's."""
        beside = {one.name: one.init(params) for one in self.measuring if one.fit is not None and one.init is not None}
        state = state_lib.create(params, lora, self.optimizer, self.estimator, self.objective, key)
        control = self.controls.init((*self.known(params), *known))
        if self.rehearsal is not None and self.rehearsal.layout is not self.layout:
            state = state.replace(replayed=(self.rehearsal.estimator.init(), self.rehearsal.objective.init()))
        state = average.begun(state.replace(beside=beside, control=control), self.ema)
        return parallel.put(state, parallel.tree_shardings(state, self.mesh))

    @property
    def measuring(self) -> tuple[Recorder, ...]:
        """The recorders of fresh and of replayed batches."""
        more = () if self.rehearsal is None else self.rehearsal.recorders
        return tuple({one.name: one for one in (*self.recorders, *more)}.values())

    @property
    def keeping(self) -> tuple[Recorder, ...]:
        """The recorders whose weights are neither trained nor set by a controller."""
        return tuple(one for one in self.measuring
                     if one.fit is None and one.init is not None and one.name not in self.controls.knobs)

    def frozen(self, params) -> dict[str, Any]:
        """Weights of these recorders, by name."""
        return {one.name: one.init(params) for one in self.keeping if one.init is not None}

    def publish(self, state: TrainState, apart: bool = False) -> Snapshot:
        """What sampling sees of the state: its own arrays, which `learn(state)` consumes, or copies that are kept `apart`.

        Copied weights have the layout and the dtype in which sampling reads them, see `parallel.apart`; the numbers sampled are
        the same. A sampler is compiled for one of the two kinds, so that a run takes one of them throughout.
        """
        weights = {knob.name for knob in READS if knob.shape is None}  # the learner alone reads them
        values = {name: value for name, value in self.controls.proposed(state.control).items() if name not in weights}
        params, lora, key, prior = state.params, state.lora, state.key, state.control.get("prior")
        if apart:
            params = parallel.apart(params, self.mesh, self.policy.model.dtype, self.replicas)
            lora, key, values, prior = jax.tree.map(jax.numpy.copy, (lora, key, values, prior))
        return Snapshot(int(state.step), params, lora, key, values, self.controls.setters, prior)

    def evaluated(self, state: TrainState, score: float) -> tuple[TrainState, bool]:
        """The state after an evaluation with this score, and whether the controllers requested a reset, which is then done.

        A reset clears the optimiser's state; the caller makes new `frozen` weights from the policy. The given state stays
        intact, so that it can still be saved if the caller fails.
        """
        control = self.controls.observe(state.control, {"score": np.float32(score)}, self.mesh, consume=False)
        state = state.replace(control=control)
        reset = bool(self.controls.proposed(state.control).get("reset", False))
        return (offload.moments_away(self.offload, self._cleared(state)) if reset else state), reset

    def _cleared(self, state: TrainState) -> TrainState:
        """The state with a new state of the optimiser."""
        opt_state = self.optimizer.init(state.trainable)
        return state.replace(opt_state=parallel.put(opt_state, parallel.tree_shardings(opt_state, self.mesh)))

    def told(self, state: TrainState, facts: Mapping[str, Any]) -> TrainState:
        """The state after controllers have observed facts that come between two steps, such as those of `sampling.asked`."""
        return state.replace(control=self.controls.observe(state.control, facts, self.mesh, consume=False))

    def learn(self, state: TrainState, rollouts: Rollouts | None, frozen: Mapping[str, Any] | None = None,
              timer: PhaseTimer | None = None, facts: Mapping[str, Any] | None = None,
              replayed: Sequence[Rollouts] = ()) -> Learned:
        """Advantages and optimiser steps on one batch on the host, then on each of the `replayed` ones.

        `frozen`: the result of `frozen(params)` at the start, if a recorder has such weights. `facts`: further facts for
        controllers beside the step's, see `Finished.facts`. With `rollouts` None the step counts, and controllers observe these
        facts, but nothing is trained. The state is consumed. Raises TrainingDiverged: after `max_skipped` non-finite updates in
        a row.
        """
        timer, version, planned = timer or PhaseTimer(), int(state.step), self._planned(state)
        alone = version < self.pretrain_steps
        seen: dict[str, Any] = {"step": np.int32(version), **(facts or {})}
        if rollouts is None:
            control = self.controls.observe(state.control, seen, self.mesh)
            return Learned(planned(state, self.per_step).replace(step=state.step + 1, control=control), {})
        check_known(self.estimator, self.recorders, rollouts)
        rollouts = stamped(rollouts, version, self.as_sampled)
        values = self.controls.proposed(state.control)
        known = knobs.read(_PER_STEP, values, {}, self.controls.setters)
        rate = np.float32(known["learning_rate"]) if "learning_rate" in known else None
        epochs = min(self.epochs, int(known.get("epochs", self.epochs)))
        with timer("record"):
            state, batch, advantages, measured = self._credit(state, rollouts, frozen or {}, values, alone)
        before = self._logprobs(state, batch) if self.compares else None
        with timer("update"):
            state = offload.moments_near(self.offload, state)
            state = self._cleared(state) if known.get("fresh_optimizer", False) else state
            state, updates, estimated = self._updates(state, batch, advantages, alone, rate, epochs, planned)
            state, again, renewed = self._rehearsed(state, replayed, frozen or {}, values, alone, rate, planned)
            state = planned(state, self.per_step)
            metrics = mean_metrics(jax.device_get(updates)) | jax.device_get(measured | self.optimizer_metrics(state.opt_state))
            if self.as_sampled and updates:  # later updates compare with weights that this step has moved
                metrics |= {name: float(updates[0][name]) for name in MISMATCHES if name in updates[0]}
            metrics |= again
            metrics["trained/rollouts"] = float(parallel.fetch(without_apart(batch).live).sum())
            state = offload.moments_away(self.offload, state)
        if int(state.skipped_in_row) >= self.max_skipped:
            raise TrainingDiverged(
                f"{int(state.skipped_in_row)} updates in a row had a loss or gradient that was not finite (step "
                f"{int(state.step)}). The weights are those before the first of them. Lower optimizer.learning_rate, check the "
                "rewards and mismatch/kl in the metrics, then resume from the last checkpoint")
        if before is not None:
            seen["ratios"] = ratios = self.ratios(state, batch, before)
            if self.estimator.learned is not None:
                own = after_updates(self.estimator, self.mesh, batch, ratios, state.estimator_state)
                state = state.replace(estimator_state=own)
        if self.controls.by_name:
            seen |= facts_of(rollouts, without_apart(batch), state.params, metrics) | renewed
            state = state.replace(control=self.controls.observe(state.control, seen, self.mesh))
        metrics |= {f"control/{name}": float(value) for name, value in known.items()}
        metrics |= {"control/epochs": float(epochs)} if "epochs" in known else {}
        return Learned(state.replace(step=state.step + 1), metrics, batch, estimated)

    def _rehearsed(self, state: TrainState, batches: Sequence[Rollouts], frozen: Mapping[str, Any], values: Mapping[str, Any],
                   alone: bool, rate: np.float32 | None, planned: Callable[[TrainState, int], TrainState]
                   ) -> tuple[TrainState, dict[str, float], dict[str, np.ndarray]]:
        """The state after one pass over each of the replayed batches, in this order, metrics `replay/...`, and new priorities.

        Every batch is credited by the weights that learn from it, so that values and advantages of the second batch are those
        after the updates on the first. States of parts that fresh batches share go on. The schedules stay at the last planned
        update of the step.
        """
        one, version, updates = self.rehearsal, int(state.step), list[dict]()
        groups, renewed = list[np.ndarray](), list[np.ndarray]()
        state = swapped(state) if batches else state
        for rollouts in batches:
            assert one is not None
            state, batch, advantages, measured = one._credit(
                state, stamped(rollouts, version, one.as_sampled), frozen, values, alone)
            if self.renew is not None:
                found = parallel.fetch((batch.extras["group_uid"], jax.jit(self.renew)(advantages, batch.token_mask)))
                groups.append(found[0])
                renewed.append(found[1])
            state, of_batch, _ = one._updates(state, batch, advantages, alone or one.critic_only, rate, 1,
                                              lambda state, i: planned(state, self.per_step - 1))
            updates += [each | jax.device_get(measured) for each in jax.device_get(of_batch)]
        facts = {} if self.renew is None else priorities.filled(groups, renewed, self.renewed)
        if not batches:
            return state, {}, facts
        metrics = mean_metrics(updates)
        skipped = {"skipped_updates": metrics.pop("skipped_updates")} if metrics else {}
        return swapped(state), renamed(metrics) | skipped | {"replay/updates": float(len(updates))}, facts

    def place(self, tree):
        """A batch on the devices: every leaf `[P, ...]` sharded over the mesh by prompts."""
        return parallel.put(tree, parallel.batch_sharding(self.mesh))

    def _credit(self, state: TrainState, rollouts: Rollouts, frozen: Mapping[str, Any], values: Mapping[str, Any], alone: bool):
        """The inputs of the updates of a batch: `(state, batch, advantages, metrics)`.

        Advantages are None if the update computes them in its own forward pass. They are computed from whole groups; groups
        larger than the rows of an update are cut afterwards. Recorders measure after this cut, on fewer slots, unless the
        estimator reads their measurements. Tokens that stand apart are measured, and neither credited nor filtered.
        """
        rollouts = with_apart(rollouts)
        if rollouts.valid.shape[1] == self.group:
            state, batch, facts = self._recorded(state, self.place(self.layout.ready(rollouts)), frozen, values, alone)
            if self.joint is not None:
                return state, batch, None, facts
            advantages, estimator_state, own = estimate(self.estimator, self.mesh, batch, state.estimator_state)
            jax.block_until_ready(advantages)
            batch, dropped = self._filtered(batch)
            return state.replace(estimator_state=estimator_state), batch, advantages, facts | own | dropped
        first = any({*one.provides} & {*self.estimator.needs} for one in self.recorders)
        placed, facts = self.place(self.layout.ready(rollouts) if first else rollouts), {}
        if first:
            state, placed, facts = self._recorded(state, placed, frozen, values, alone)
        advantages, estimator_state, own = estimate(self.estimator, self.mesh, placed, state.estimator_state)
        placed, dropped = self._filtered(placed)
        whole = parallel.fetch(placed) if first or self.drops else rollouts
        rows, advantages = regroup(whole, parallel.fetch(advantages), self.group, self.rows)
        batch = self.place(self.layout.ready(rows))
        if not first:
            state, batch, facts = self._recorded(state, batch, frozen, values, alone)
        return state.replace(estimator_state=estimator_state), batch, self.place(advantages), facts | own | dropped

    def _filtered(self, batch: Rollouts) -> tuple[Rollouts, dict]:
        """The batch without the rollouts that filters or the estimator drop, after advantages of whole groups; metrics.

        `filter/NAME/dropped` and `filter/NAME/dropped_tokens` are shares of the rollouts and of their trained tokens.
        """
        batch = without_apart(batch)
        kept, metrics = batch, {}
        for name, one in self.filters.items():
            kept, metrics[f"filter/{name}/dropped"], metrics[f"filter/{name}/dropped_tokens"] = _kept(one.keep, batch, kept)
        if self.estimator.keeps is not None:
            kept = kept.replace(valid=jax.jit(self.estimator.keeps)(kept))
        return with_apart(kept), metrics

    @property
    def drops(self) -> bool:
        """Whether some rollouts may leave the batch after their advantages are computed."""
        return bool(self.filters) or self.estimator.keeps is not None

    def _recorded(self, state: TrainState, batch: Rollouts, frozen: Mapping[str, Any], values: Mapping[str, Any], alone: bool
                  ) -> tuple[TrainState, Rollouts, dict]:
        """The batch with the recorders' measurements and the targets of a critic, all fixed for the step's updates.

        A critic that is trained `alone` is fitted to the observed returns. The state has what is fitted before it is read, and
        the metrics are of these fits and of the critic's values.
        """
        seen, fits, sampled = batch, dict[str, Any](), batch.old_logprobs
        for one in self.recorders:
            own = values[one.name] if one.name in values else state.beside.get(one.name)
            if one.name in frozen or one.given is not None:
                own = offload.near(self.offload, one.name, frozen.get(one.name, one.given))
            batch = recorded(batch, one.record(own, state.params, state.lora, seen))
            if one.fits_first:
                assert one.fit is not None
                own, facts = one.fit(own, (state.params, state.lora), without_apart(batch))
                state, fits = state.replace(beside={**state.beside, one.name: own}), fits | facts
                batch = recorded(batch, one.record(own, state.params, state.lora, batch))
        if self.as_sampled and sampled is not None and batch.old_logprobs is not sampled:
            batch = batch.replace(old_logprobs=known_logprobs(sampled, batch.old_logprobs))
        if batch.old_logprobs is not None and batch.behavior_logprobs is not None:
            batch = batch.replace(behavior_logprobs=sampled_logprobs(batch, batch.old_logprobs))
        if self.estimator.value_targets is None:
            return state, self.place(batch) if fits else batch, jax.device_get(fits)
        targets_of = jax.jit(self.estimator.value_targets, static_argnums=1)
        plain = without_apart(batch)
        returns = targets_of(plain, True)
        targets = returns if alone else targets_of(plain, False)
        batch = recorded(batch, {"value_targets": targets})
        facts = jax.device_get(jax.jit(value_metrics)(batch.extras["values"], returns, plain.token_mask))
        return state, self.place(batch), facts | jax.device_get(fits)

    @property
    def per_step(self) -> int:
        """The planned updates of a step."""
        return self.epochs * self.minibatches

    def _planned(self, state: TrainState) -> Callable[[TrainState, int], TrainState]:
        """`(state, i) -> state` with all schedules at planned update `i` of the step that begins with `state`.

        A controller that resets the optimiser lets its schedule begin again, so that this one counts from the last reset.
        """
        step = int(state.step)
        trained = max(step - self.pretrain_steps, 0) * self.per_step
        first = (optimizers.updates_planned(state.opt_state) or 0) if "reset" in self.controls.knobs else trained
        alone, fits = step < self.pretrain_steps, {one.name: one.updates for one in self.measuring if one.fit is not None}

        def at(state: TrainState, i: int) -> TrainState:
            beside = {name: own.replace(opt_state=optimizers.at_update(own.opt_state, (step * self.per_step + i) * fits[name]))
                      if hasattr(own, "opt_state") else own for name, own in state.beside.items()}
            i = 0 if alone else i
            return state.replace(opt_state=optimizers.at_update(state.opt_state, first + i), beside=beside,
                                 objective_state=optimizers.at_update(state.objective_state, trained + i))

        return at

    def _updates(self, state: TrainState, batch: Rollouts, advantages, alone: bool, rate: np.float32 | None, epochs: int,
                 planned: Callable[[TrainState, int], TrainState]):
        """`(state, metrics of each update, advantages)` after all minibatches of these epochs; `planned` as `_planned`."""
        rows = batch.mask.shape[0]
        size, updates, estimated, real = rows // self.minibatches, [], advantages, parallel.fetch(batch.live).any(1)
        if self.drops and not real.any():  # an empty update would still move weights along earlier gradients
            return state, updates, advantages
        shuffle_key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), _SHUFFLE_STREAM)
        for epoch in range(epochs):
            if self.minibatches == 1:
                state, measured = self._update(planned(state, epoch), batch, advantages, alone, rate)
                estimated = measured.pop("advantages", advantages)
                updates.append(measured)
                continue
            order = jax.random.permutation(jax.random.fold_in(shuffle_key, epoch), rows)
            for i, start in enumerate(range(0, rows, size), epoch * self.minibatches):
                if not real[np.asarray(order[start:start + size])].any():  # only padding, if filters kept too few
                    continue
                part, its_advantages = self.place(rows_of((batch, advantages), order, start, size))
                state, measured = self._update(planned(state, i), part, its_advantages, alone, rate)
                updates.append(measured)
        return state, updates, estimated

    def _update(self, state: TrainState, part: Rollouts, advantages, alone: bool, rate: np.float32 | None
                ) -> tuple[TrainState, dict]:
        """One optimiser step of the models trained beside the policy, then of the policy, unless those train `alone`."""
        metrics: dict[str, Any] = {}
        for one in self.recorders:
            if one.fit is not None and not one.fits_first:
                own, facts = one.fit(state.beside[one.name], (state.params, state.lora), without_apart(part))
                state, metrics = state.replace(beside={**state.beside, one.name: own}), metrics | facts
        if alone:
            return state, metrics | {"skipped_updates": state.skipped}
        state, learned = (self.layout.update(state, part, advantages, rate) if self.joint is None or advantages is not None
                          else self.joint(state, part, rate))
        return average.moved(state, self.ema), metrics | learned

    def loss(self, state: TrainState, batches: Sequence[Rollouts], frozen: Mapping[str, Any] | None = None,
             objective: Objective | None = None) -> dict[str, float]:
        """The loss of all rollouts of these batches on the host together, and the objective's metrics; nothing is learned.

        Batches may differ in T. `objective`: another one than that of the updates, with the empty state. Recorders that are
        fitted to a batch first measure as they are: a fit would consume their state.
        """
        as_are = dataclasses.replace(self, recorders=tuple(one._replace(fits_first=False) for one in self.recorders))
        values, version, seen = self.controls.proposed(state.control), int(state.step), list[Any]()
        for rollouts in batches:
            batch = self.place(self.layout.ready(with_apart(stamped(rollouts, version, self.as_sampled))))
            _, batch, _ = as_are._recorded(state, batch, frozen or {}, values, False)
            measured = (self.layout.values or self.layout.logprobs)(state.params, state.lora, texts_of(batch))
            light = batch.replace(tokens=None, prompt_tokens=None, prompt_mask=None, filled=4)
            seen.append(parallel.fetch((light, *measured)))
        longest = max(batch.mask.shape[2] for batch, *_ in seen)
        whole = jax.tree.map(lambda *parts: np.concatenate(parts), *(lengthened(one, longest) for one in seen))
        which = (self.objective, state.objective_state) if objective is None else (objective, objective.init())
        metrics = jax.device_get(_loss(*which, *whole))
        return {name: float(value) for name, value in metrics.items() if name not in MISMATCHES}

    @property
    def compares(self) -> bool:
        """Whether the estimator or a controller reads the `ratios` of a batch."""
        return self.estimator.learned is not None or any("ratios" in one.facts for one in self.controls.by_name.values())

    def _logprobs(self, state: TrainState, batch: Rollouts) -> jax.Array:
        return self.layout.logprobs(state.params, state.lora, texts_of(batch))[0]

    def ratios(self, state: TrainState, batch: Rollouts, before: jax.Array) -> jax.Array:
        """f32[P, G, T], the current probability of each token divided by that of the log-probs `before`."""
        return jax.numpy.exp(self._logprobs(state, batch) - before)


def lengthened(measured: tuple, length: int) -> tuple:
    """A batch and measurements of its tokens, whose arrays `[P, G, T, ...]` on the host are filled up to this T."""
    shape = measured[0].mask.shape

    def fill(x: np.ndarray) -> np.ndarray:
        return np.pad(x, [(0, 0), (0, 0), (0, length - shape[2]), *[(0, 0)] * (x.ndim - 3)]) if x.shape[:3] == shape else x

    return jax.tree.map(fill, measured)


def mean_metrics(updates: list[dict]) -> dict[str, float]:
    """Metrics of the updates of a step as one: means, maxima for names in `max/`, the last value of the running count.

    A step without updates, whose rollouts the method dropped, has none.
    """
    if not updates:
        return {}
    whole = {name: float((np.max if name.startswith("max/") else np.mean)([one[name] for one in updates]))
             for name in updates[0]}
    return whole | {"skipped_updates": float(updates[-1]["skipped_updates"])}


def swapped(state: TrainState) -> TrainState:
    """The state with the states of the parts of replayed and of fresh batches exchanged, if there are two of each."""
    if state.replayed is None:
        return state
    estimator, objective = state.replayed
    return state.replace(estimator_state=estimator, objective_state=objective,
                         replayed=(state.estimator_state, state.objective_state))


def renamed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of replayed batches, apart from those of the fresh batch."""
    return {f"max/replay/{name.removeprefix('max/')}" if name.startswith("max/") else f"replay/{name}": value
            for name, value in metrics.items() if name not in MISMATCHES}  # replayed tokens have none


def check_known(estimator: Estimator, measuring: Sequence[Recorder], rollouts: Rollouts) -> None:
    """Raises ValueError if the estimator reads what is unknown (NaN) of trained tokens, and no recorder measures it."""
    if any("old_logprobs" in one.provides for one in measuring):
        return
    for name in {*estimator.needs} & {"behavior_logprobs", "entropies"}:
        values = getattr(rollouts, name)
        unknown = rollouts.mask & rollouts.valid[..., None] & (False if values is None else np.isnan(values))
        if unknown.any():
            raise ValueError(f"the estimator reads {name}, which are unknown for {unknown.sum()} trained tokens of this batch. "
                             "Put @topology(plants=True) above the topology whose trajectories begin with them, and the run "
                             "measures them")


def stamped(rollouts: Rollouts, version: int, as_sampled: bool = False) -> Rollouts:
    """The batch with `extras["current_version"]` i32[P] and `extras["age"]` i32[P, G] of its learning, counted in batches.

    `age` is that of the oldest trained token. With `as_sampled` the old log-probs are those of sampling, NaN for trained tokens
    that the sampler did not draw under their own text.
    """
    drawn = version if rollouts.policy_version is None else rollouts.policy_version
    oldest = np.min(np.broadcast_to(drawn, rollouts.mask.shape), axis=-1, initial=version, where=rollouts.mask)
    stamps = {"current_version": np.full(len(oldest), version, np.int32), "age": (version - oldest).astype(np.int32)}
    old = rollouts.behavior_logprobs if as_sampled else rollouts.old_logprobs
    if as_sampled and rollouts.role is not None:
        old = np.where(rollouts.mask & (rollouts.role != Role.POLICY), np.float32(np.nan), old)
    return rollouts.replace(old_logprobs=old, extras={**rollouts.extras, **stamps})


@functools.partial(jax.jit, static_argnums=(0, 1))
def estimate(estimator: Estimator, mesh: Mesh, batch: Rollouts, state):
    """`(advantages, state, metrics)` of an estimator; its state stays sharded by the partition table, and finite."""
    batch = without_apart(batch)
    advantages, new = estimator.update(batch, state)
    new = keep_finite(new, state)
    metrics = {} if estimator.metrics is None else estimator.metrics(batch, advantages, state)
    return advantages, jax.lax.with_sharding_constraint(new, parallel.tree_shardings(new, mesh)), metrics


@functools.partial(jax.jit, static_argnums=(0, 1))
def after_updates(estimator: Estimator, mesh: Mesh, batch: Rollouts, ratios: jax.Array, state):
    """The estimator's state after the updates of a batch, see `Estimator.learned`; it stays sharded, and finite."""
    assert estimator.learned is not None
    new = keep_finite(estimator.learned(without_apart(batch), ratios, state), state)
    return jax.lax.with_sharding_constraint(new, parallel.tree_shardings(new, mesh))


@functools.partial(jax.jit, static_argnums=0)
def _loss(objective: Objective, state, rollouts: Rollouts, logprobs, entropies, values=None) -> dict[str, jax.Array]:
    """The metrics of a batch with these log-probs, its loss among them."""
    rollouts = rollouts.replace(loss_weights=objective.weights(rollouts))
    return loss_terms(objective, logprobs, entropies, rollouts, jax.numpy.zeros_like(logprobs), state, values)[1][0]


@functools.partial(jax.jit, static_argnums=0)
def _kept(keep: Callable[[Rollouts], jax.Array], batch: Rollouts, kept: Rollouts) -> tuple[Rollouts, jax.Array, jax.Array]:
    """`kept` without the rollouts of the `batch` that a filter drops, and their shares of rollouts and of trained tokens."""
    stays = keep(batch)
    share = 1 - masked.mean(stays.astype(np.float32), batch.valid)
    tokens = 1 - masked.mean(masked.to_tokens(stays.astype(np.float32), batch.token_mask), batch.token_mask)
    return without(kept, stays), share, tokens


@functools.partial(jax.jit, static_argnums=3)
def rows_of(tree, order, start, size: int):
    """The rows `order[start:start + size]` of every leaf `[P, ...]`."""
    chosen = take(order, start, size)
    return jax.tree.map(lambda x: x[chosen], tree)
