"""A run from its first step to its last: steps by schedule, with evaluations, pages and checkpoints at intervals."""
import contextlib
import errno
import functools
import io
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from jaxrl_llm import objectives, parallel
from jaxrl_llm.learning import offload, optimizers
from jaxrl_llm.learning.schedules import Step
from jaxrl_llm.methods.composition import formula
from jaxrl_llm.runs import beginning, first_pass, phases
from jaxrl_llm.runs.beginning import Reached
from jaxrl_llm.runs.lost import LostWriter
from jaxrl_llm.runs.metrics import MetricWriter, host_memory
from jaxrl_llm.runs.pages import lessons, write_page
from jaxrl_llm.runs.plots import draw_or_warn, plot_curves
from jaxrl_llm.runs.progress import Progress
from jaxrl_llm.runs.rates import rate_rows
from jaxrl_llm.runs.tracking import tracked
from jaxrl_llm.runs.value_plots import plot_history
from jaxrl_llm.sampling.heldout import Evaluation, evaluate, evaluate_set
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.forecast import forecast
from jaxrl_llm.setup.given import as_batches
from jaxrl_llm.setup.phases import parts_of, recorded, rows
from jaxrl_llm.setup.start import check_other
from jaxrl_llm.setup.tables import arithmetic_table, paper_table, replaced_table
from jaxrl_llm.store import given as given_lib
from jaxrl_llm.store import preemption
from jaxrl_llm.store import workdir as folders
from jaxrl_llm.store.best import Best
from jaxrl_llm.store.checkpoints import Checkpoints
from jaxrl_llm.store.lock import Held, locked
from jaxrl_llm.store.workdir import Workdir, check_agreement, open_workdir, records
from jaxrl_llm.tools.files import expanded
from jaxrl_llm.tools.timer import PhaseTimer

_EVAL_STREAM = 2**31 - 1  # folded into the run's key, like the upper halves of uids of trajectories
_SETS_STREAM = 2**31 - 5  # likewise, for evaluation sets


def train(config: ConfigDict, workdir: str | Path, resume: bool | str = False, warm_starts: str | Path | None = None
          ) -> dict[str, Evaluation]:
    """Runs `config` in `workdir` to its last step. Returns the held-out evaluations `{"before": ..., "after": ...}`.

    After a phase within the run it is `"after NAME"`, before a later one `"before NAME"`; what was evaluated before a resume is
    missing. The folder, local or in a
    bucket, then holds config.json, metrics.jsonl, TensorBoard events, samples/, curves.png and checkpoints/, phases.json of a
    run in phases, and invalid.jsonl if its environment lost trajectories.
    `warm_starts`: a local folder in which runs of one process share the weights after equal supervised warm-ups; None: nothing
    is shared.

    Raises:
      ValueError, FileExistsError: for configurations that cannot work and folders that belong to another run.
      RuntimeError: when another live run has the folder.
      TooManyInvalid: when an environment loses more trajectories of a batch than `environment_invalid` allows.
      TrainingDiverged: after `learner.max_skipped` non-finite updates in a row.
      RecompilationError: when a step compiles again after its shapes are settled.
      Preempted (SystemExit 75): after SIGTERM or SIGUSR1.
    """
    folder = folders.folder_of(workdir)
    with preemption.watch(), locked(folder) as held:
        try:
            return _train(config, held, resume, None if warm_starts is None else expanded(warm_starts))
        except preemption.Preempted as stopped:
            if parallel.is_primary():
                saved = folders.checkpoint_steps(held.weights / "checkpoints")
                how = "continue with --resume" if saved else "nothing was trained yet: start it again, without --resume"
                preemption.say("\n".join([*getattr(stopped, "__notes__", ()), how]))
            raise


def _train(config: ConfigDict, held: Held, resume: bool | str, warm_starts: Path | None) -> dict[str, Evaluation]:
    with preemption.at_once():
        course = phases.course_of(config, held, resume)
        run, read, told = phases.opened(course)
        params = read()
    preemption.check()
    replaced = replaced_table(config, run.method.defaults)
    config, primary = recorded(config), parallel.is_primary()
    check_other(config.model.path, held.path)
    work = open_workdir(held, config, resume, parts_of(config))  # compares the resolved numbers of the run
    check_agreement(work)  # nothing is written before every process has checked
    if not work.resume and primary:
        work.record()
    reached = folders.checkpoint_steps(work.checkpoints)[-1] if work.resume else 0
    rates = rate_rows(run, work.earlier if work.resume and not config.phases else None, reached)
    _print_head(run, params, [*told, *replaced], rates)
    with (Checkpoints(work.checkpoints, keep=config.checkpoint.keep) as checkpoints,
          records(work) as folder, tracked(config.wandb if primary else "", folder, config.to_dict(), work.resume) as log,
          Progress(course.total, stream=None if primary else io.StringIO()) as progress):
        with preemption.at_once():
            first = beginning.first(run, params, work, checkpoints, progress, warm_starts, course.origin)
            params = None  # the state has its own, and there may be no room for both
        preemption.check()
        start = course.origin + int(first.state.step)
        frozen = beginning.frozen_weights(run, first.state, work, start)
        if not work.resume:
            phases.keep_first(course, first.state, work)
        elif primary:  # only now it is certain that the folder can continue with this configuration
            work.record()
        course.record(work)
        with (MetricWriter(folder, restored_step=start or None, also=log) as writer,  # step 0 is evaluated and written again
              Best(held.weights, config.checkpoint.best, start, held.folder) as best):
            if work.resume and primary and start and writer.last_step is None:
                warnings.warn(f"{writer.path} is gone or empty: curves and reports lack the history of steps 0 to {start}. The "
                              "run itself goes on as it would have", RuntimeWarning, stacklevel=3)
            desk, evaluations = Desk(work, folder, checkpoints, best, writer, progress), dict[str, Evaluation]()
            try:
                while True:
                    session = _Session(desk, course, run, first, frozen)
                    del run, first, frozen  # the session consumes them
                    evaluations |= course.named(session.steps())
                    if not course.more:
                        return evaluations
                    course, last = course.after(session.saved), session.reached
                    del session
                    with preemption.at_once():
                        run, first, frozen = phases.entered(course, last, work)
                    progress.begins(course.total, ": ".join(rows(course.phases, course.begun)[course.phase.number - 1]))
            finally:
                if writer.last_step is not None:
                    draw = functools.partial(plot_curves, phases=[one.name for one in course.phases])
                    draw_or_warn(draw, writer.path, folder / "curves.png")


def _of_method(run: setup.Run, replaced: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """What the settings of its method's paper `replaced`, and the differences between the run and that paper."""
    rows, first, steps = paper_table(run.config, run.method.defaults), run.learner.estimator.bootstrap, run.config.steps
    if rows:
        rows.append(("to have the paper's", "--config.setting=paper"))
    if first:
        rows.append(("bootstrap", f"{run.method.slug} begins after {first} of {steps} steps"
                     + (": never in this run" if first >= steps else "")))
    if "prior" in run.learner.controls.by_name:
        rows.append(("expected rewards", f"prior.source={run.config.prior.source}"))
    return [("method", run.config.method), ("composition", formula(run.method)), *replaced, *rows]


def _of_schedule(run: setup.Run) -> list[tuple[str, str]]:
    """How old the weights that sample are, and what corrects for it."""
    if not run.schedule.lag:
        return []
    how = "by the objective itself" if run.learner.objective.corrects else "old log-probs are those of sampling"
    return [("schedule", f"{run.config.schedule}: batches are up to {run.schedule.lag} old, corrected: {how}")]


def _samples(run: setup.Run) -> bool:
    """Whether a run samples: all of them but those that learn from given texts and evaluate no problems."""
    return not run.method.source or bool(run.config.eval.problems or run.source.sets)


def _print_head(run: setup.Run, params, replaced: Sequence[tuple[str, str]] = (), rates: Sequence[tuple[str, str]] = ()
                ) -> None:
    """Prints the run, its devices and its needs, with the rows of `rates.rate_rows`."""
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    device, source = f"{jax.device_count()} x {jax.devices()[0].device_kind}", run.source
    sampler = source.stream.prepare(run.config.sampling.micro_batches) if _samples(run) else []
    rows = [("model", f"{weights:,} weights on {device}"), *source.told, *sampler, *_of_method(run, replaced), *rates,
            *_of_schedule(run),
            *arithmetic_table(as_batches(run.config, source), source.ladders.prompt_tokens[-1],
                              0 if run.method.source else source.topology.most or 0),
            *forecast(run)]
    for name, value in rows if parallel.is_primary() else ():
        print(f"{name:32}{value}")


class Desk(NamedTuple):
    """Where all phases of a run write: its `work` folder, the local `folder` of its records, and what keeps them."""

    work: Workdir
    folder: Path
    checkpoints: Checkpoints
    best: Best
    writer: MetricWriter
    progress: Progress


class _Session:
    """The steps of a phase from `reached` on, with everything that happens between two of them, by the steps of the run."""

    def __init__(self, desk: Desk, course: phases.Course, run: setup.Run, reached: Reached, frozen: dict[str, Any]):
        self.work, self.folder, self.checkpoints, self.best, self.writer, self.progress = desk
        self.course, self.run, self.reached, self.frozen = course, run, reached, frozen
        self.saved, self.timer, self.changed = self.step_of(reached), PhaseTimer(), False
        self.given = given_lib.sums_of(run.learner.measuring)
        self.evaluations: dict[str, Evaluation] = {}
        self.started: dict[str, float] = {}  # what the first line of a later phase says of its start
        self.note = " (compiles on the first step)"
        runner = run.source.stream.partner.runner
        self.lost = None if runner is None else LostWriter(self.folder, self.saved, runner, self.progress.note, self.work.path)

    def steps(self) -> dict[str, Evaluation]:
        """Runs the remaining steps of the phase; returns the evaluations before and after them."""
        start = self.saved
        try:
            with preemption.at_once():  # nothing is trained yet
                self.begin(start)
            if start == 0:
                self.save()
                self.checkpoints.wait()  # a folder that cannot hold checkpoints ends the run before anything is trained
                self.work.held.write()
            preemption.check()
            if self.more(start):
                self.ask()
            self.schedule = self.run.schedule.steps(
                self.run.source, self.run.learner, self.reached.state, self.frozen, self.timer,
                lambda phase: self.progress.phase(phase + self.note), self.reached.pending)
            self.changed = False
            step = start
            while self.more(step):
                self.step(step := step + 1)
                if self.more(step):
                    self.ask()
                preemption.check()  # leaves through the handler below, which saves
            if self.step_of(self.reached) > self.saved:  # it ended early
                self.save()
        except BaseException as error:
            self.rescue(error)
            raise
        return self.evaluations

    def more(self, step: int) -> bool:
        """Whether the phase has steps after this one."""
        return step < self.course.end and not self.course.phase.stalled([*self.reached.scores.values()])

    def ask(self) -> None:
        """Asks the training problems that controllers want to know about before the next step, and tells them the answers."""
        learner, state = self.run.learner, self.reached.state
        if (times := first_pass.wanted(self.run, state)) is not None:
            counts = first_pass.measured(self.run, state, self.seen(), times, self.folder, self.progress, self.timer,
                                         origin=self.course.origin, again=self.work.resume)
            state = learner.told(state, counts.facts)
            self.reached, self.changed = self.reached._replace(state=state), True

    def step_of(self, reached: Reached) -> int:
        """The step of the whole run."""
        return self.course.origin + int(reached.state.step)

    def begin(self, start: int) -> None:
        """The evaluation before the first step, or the one during which the run was interrupted after saving its step.

        If its line was written, but no state that has observed it was saved, controllers observe it again. A later phase begins
        with an evaluation by its own task and limits, for the line of its first step: that of its start is the last line of the
        phase before.
        """
        if self.enters(start):
            self.started = {f"start/{name}": value for name, value in self.measured(start).items()}
            return
        written = bool(start) and parallel.agree(self.writer.last_step or 0) >= start
        lost = self.run.learner.controls.by_name and self.due(start, self.run.config.eval.every) and not self.reached.observed
        if written and not lost:
            return
        metrics = self.reached.line | self.measured(start)
        if metrics and not written:
            self.write(start, metrics | self.timer.collect())

    def step(self, step: int) -> None:
        """One step, and the evaluations, pages and checkpoints due after it."""
        config, began = self.run.config, time.perf_counter()
        if self.lost is not None:
            self.lost.step = step
        with preemption.at_once(bool(self.note)):  # the state before the first step has been saved
            done = self.schedule.send(self.reached.state) if self.changed else next(self.schedule)
            metrics = self.started | done.finished.metrics | done.learned.metrics
            self.started = {}
            self.reached = Reached(done.learned.state, done.position, done.pending, line=metrics, scores=self.reached.scores)
            self.note, self.changed = "", False
        metrics |= self.pace(done, time.perf_counter() - began)
        if self.due(step, config.eval.every):
            history = self.run.learner.estimator.history
            if history is not None:
                draw_or_warn(plot_history, *history(self.reached.state.estimator_state), self.folder / "values.png")
        metrics |= self.measured(step)
        if not self.due(step, config.eval.every) and self.due(step, config.samples_every):
            numbers = lessons(self.run.source, self.run.learner, done.learned)
            write_page(self.folder, step, self.run.source, done.finished.forest, numbers)
        del done  # makes room for the next one
        self.write(step, metrics | self.timer.collect() | host_memory())
        self.progress.step(step, metrics)
        if self.due(step, config.checkpoint.every) or self.reached.reset:  # after the line, which a resume drops without it
            self.save()

    def due(self, step: int, every: int) -> bool:
        """Whether something is due that happens every `every` steps, before the first and after the last step of a phase."""
        return bool(every and step % every == 0) or step in (0, self.course.end) or self.enters(step)

    def enters(self, step: int) -> bool:
        """Whether a later phase begins after this step."""
        return 0 < step == self.course.origin

    def measured(self, step: int) -> dict[str, float]:
        """Metrics by name of the evaluations that are due after this step."""
        state, every, metrics = self.reached.state, self.run.config.eval.every, dict[str, float]()
        enters, folder = self.enters(step), self.pages(step)
        if self.due(step, every):
            metrics |= self.texts()
        if self.due(step, every) and self.run.config.eval.problems:
            self.evaluations["before" if enters or not step else "after"] = evaluation = self.evaluate(step)
            metrics |= evaluation.metrics()
            if step and not enters and "reset" in self.run.learner.controls.knobs:
                metrics["control/reset"] = float(self.reached.reset)
        key = jax.random.fold_in(state.key, _SETS_STREAM)
        for number, one in enumerate(self.run.source.sets):
            if self.due(step, one.every or every):
                self.progress.phase(f"evaluating {one.label}")
                result = evaluate_set(self.run.source, *self.seen(), one, key=jax.random.fold_in(key, number),
                                      timer=self.timer)
                write_page(folder / "eval" / one.label, step, self.run.source, result.forest, {})
                metrics |= result.metrics(f"eval/{one.label}")
        if self.course.phase.patience and self.course.phase.metric in metrics:
            scores = self.reached.scores | {step: metrics[self.course.phase.metric]}
            self.reached = self.reached._replace(scores=scores)
        if metrics and not enters:  # the phase before has seen these weights
            self.best.see(step, metrics, state.params, state.lora)
        return metrics

    def pages(self, step: int) -> Path:
        """Where pages of samples of this step are: those of the start of a later phase beside those of the phase before."""
        return self.folder / "phases" / self.course.phase.name if self.enters(step) else self.folder

    def seen(self) -> tuple[Any, Any]:
        """The weights and adapters as batches are sampled with them: for others the sampler would compile again."""
        snapshot = self.run.learner.publish(self.reached.state, apart=self.run.schedule.lag > 0)
        return snapshot.params, snapshot.lora

    def texts(self) -> dict[str, float]:
        """The loss of held-out texts, if there are any, and what else the objective says of them.

        It is that of `sft` for texts beside prompts.
        """
        batches = self.run.source.held_out_texts(int(self.reached.state.step))
        if not batches:
            return {}
        self.progress.phase("evaluating texts")
        with self.timer("evaluate"):
            objective = None if self.run.method.source else objectives.make("sft")
            found = self.run.learner.loss(self.reached.state, batches, self.frozen, objective)
            return {f"eval/{name}": value for name, value in found.items()}

    def evaluate(self, step: int) -> Evaluation:
        """The held-out evaluation, with its page."""
        self.progress.phase("evaluating" if step else "compiling the sampler, first evaluation")
        key = jax.random.fold_in(self.reached.state.key, _EVAL_STREAM)
        evaluation = evaluate(self.run.source, *self.seen(), problems=self.run.config.eval.problems, key=key, timer=self.timer)
        write_page(self.pages(step), step, self.run.source, evaluation.forest, {})
        if step and self.run.learner.controls.by_name:
            self.control(step, evaluation.score.mean)
        return evaluation

    def control(self, step: int, score: float) -> None:
        """Lets the controllers observe an evaluation once, and does a reset if they request one."""
        if self.reached.observed:  # before an error that came between the evaluation and its line of metrics
            return
        learner = self.run.learner
        state, reset = learner.evaluated(self.reached.state, score)
        for one in learner.keeping if reset else ():  # if this fails, the state from before is saved
            own = beginning.keep_weights(self.checkpoints.directory.parent / one.name, step, one, state)[one.name]
            self.frozen[one.name] = offload.away(learner.offload, one.name, own)
        self.reached, self.changed = self.reached._replace(state=state, observed=True, reset=reset), True

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the line of a step; until then checkpoints keep what was measured, as no step is trained twice for it."""
        self.writer.write(step, metrics | self.course.metrics)
        self.reached = self.reached._replace(line={})

    def save(self) -> None:
        """Saves a checkpoint of the run's progress."""
        self.progress.phase("saving")
        step = self.step_of(self.reached)
        with self.timer("checkpoint"):
            self.work.held.write()  # a bucket has the lines of all steps up to its newest checkpoint
            self.checkpoints.save(step, self.reached.state, self.reached.host | {"given": self.given})
        self.saved = step

    def pace(self, done: Step, seconds: float) -> dict[str, float]:
        """The learning rate of a step's last update if it has a schedule, the step's duration, sampled tokens per second."""
        updates = optimizers.updates_planned(done.learned.state.opt_state)
        rates = {} if updates is None else {"learning_rate": float(self.run.learning_rate(max(updates - 1, 0)))
                                            * done.learned.metrics.get("control/learning_rate", 1.0)}
        metrics = done.finished.metrics
        tokens = metrics["texts/tokens"] if self.run.method.source else metrics["completion/tokens"]
        return rates | {"time/step": seconds, "speed/tokens_per_second": tokens / seconds}

    def rescue(self, error: BaseException) -> None:
        """Saves the progress since the last checkpoint if that is still possible; `error` gets a note of it."""
        # An update consumes its state: after an error inside one only the last checkpoint is left. An error in one of several
        # processes did not occur in the others, which would not take part in saving.
        state, saved = self.reached.state, self.saved
        alone = not parallel.several() or isinstance(error, preemption.Preempted)
        whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        if alone and whole and (step := self.step_of(self.reached)) > saved:
            try:
                self.save()
                self.checkpoints.wait()
                error.add_note(f"step {self.saved} was saved; continue with --resume")
            except Exception as problem:  # the error that ended the run is the one to show
                error.add_note(f"step {step} could not be saved: {problem}; the last saved one is step {saved}, "
                               "from which --resume continues")
        if self.lost is not None and getattr(error, "of_environment", False):
            error.add_note(self.lost.note())
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                error.add_note(folders.what_to_free(self.folder))
