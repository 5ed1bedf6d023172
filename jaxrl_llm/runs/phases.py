"""The phases of a run one after the other: where it is in them, and what each takes over from the one before."""
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import jax
from etils import epath
from ml_collections import ConfigDict

from jaxrl_llm import parallel
from jaxrl_llm.learning import offload
from jaxrl_llm.learning.learner import Learner
from jaxrl_llm.learning.state import TrainState
from jaxrl_llm.runs import beginning
from jaxrl_llm.runs.beginning import Reached
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.first_state import known_of
from jaxrl_llm.setup.forecast import forecast
from jaxrl_llm.setup.phases import Phase, phases_of, rows
from jaxrl_llm.setup.run import Run
from jaxrl_llm.setup.start import described
from jaxrl_llm.store import workdir as folders
from jaxrl_llm.store.begun import Begun, read_begun, up_to, write_begun
from jaxrl_llm.store.checkpoints import Checkpoints
from jaxrl_llm.store.lock import Held, writing
from jaxrl_llm.store.workdir import Workdir
from jaxrl_llm.tools.registry import one_of

FIRST = "first"  # the folder of the trained weights before the first step, for phases that begin with them
_MEASURED = ("score", "solved", "pass_at_group", "reward")  # of an evaluation, better where they are larger


class Course(NamedTuple):
    """All `phases` of a run, and those that have `begun`, of which the last is at work."""

    phases: tuple[Phase, ...]
    begun: tuple[Begun, ...]

    @property
    def phase(self) -> Phase:
        return self.phases[len(self.begun) - 1]

    @property
    def origin(self) -> int:
        """The steps of the run before this phase."""
        return self.begun[-1].start

    @property
    def end(self) -> int:
        """The step of the run with which this phase ends at the latest."""
        return self.origin + self.phase.config.steps

    @property
    def total(self) -> int:
        """The steps of the run, if no later phase ends early."""
        return self.origin + sum(one.config.steps for one in self.phases[len(self.begun) - 1:])

    @property
    def more(self) -> bool:
        return len(self.begun) < len(self.phases)

    @property
    def metrics(self) -> dict[str, float]:
        """What the line of each step says of the phase."""
        return {"phase": float(self.phase.number)} if self.phase.name else {}

    def after(self, step: int) -> "Course":
        """The course in which the next phase begins after this step."""
        return Course(self.phases, (*self.begun, Begun(self.phases[len(self.begun)].name, step)))

    def named(self, evaluations: Mapping[str, Any]) -> dict[str, Any]:
        """The evaluations of the phase: that before a later phase has its name, and so has that after one within the run."""
        own = {"before": len(self.begun) > 1, "after": self.more}
        return {f"{name} {self.phase.name}" if own[name] else name: one for name, one in evaluations.items()}

    def record(self, work: Workdir) -> None:
        """Writes which phases have begun."""
        if self.phase.name and parallel.is_primary():
            with writing(work.held.folder):
                write_begun(work.held.folder, list(self.begun))


def course_of(config: ConfigDict, held: Held, resume: bool | str) -> Course:
    """The phases of a configuration, and where a run that is resumed in its folder is in them.

    Raises the errors of `phases_of`, and ValueError if the run has begun phases of other names.
    """
    phases = phases_of(config)
    course = Course(phases, (Begun(phases[0].name, 0),))
    reached = folders.checkpoint_steps(held.weights / "checkpoints") if resume and phases[0].name else []
    begun = up_to(read_begun(held.folder), reached[-1]) if reached else []
    if [one.name for one in begun] != [one.name for one in phases[:len(begun)]]:
        raise ValueError(f"the run in {held.path} went through the phases {', '.join(one.name for one in begun)}, and "
                         f"config.phases begins with {', '.join(one.name for one in phases[:len(begun)])}; continue it with "
                         "its own, to which others may be added at the end")
    return course._replace(begun=tuple(begun)) if begun else course


def opened(course: Course) -> tuple[Run, Callable[[], Any], list[tuple[str, str]]]:
    """The run of the phase at work, the function that reads its weights, and rows for the terminal on all phases.

    Later phases were built as well. Raises ValueError with the faults of all of them, each with the name of its phase.
    """
    if not course.phase.name:
        return *setup.opened(course.phase.config), []
    faults, found, told = [], None, rows(course.phases, course.begun)
    for phase in course.phases[len(course.begun) - 1:]:
        try:
            run, read = setup.opened(phase.config)
            if phase.patience:
                one_of("metric", phase.metric, _metrics_of(run))
            if phase is not course.phase:
                told += [(f"memory in {phase.name}", value) for name, value in forecast(run) if name.startswith("memory")]
        except (ValueError, NotImplementedError) as error:
            faults.append(f"phase {phase.name!r}: {error}")
            continue
        if phase is course.phase:
            found = run, read
        elif (runner := run.source.stream.partner.runner) is not None:
            runner.close()
    if faults or found is None:
        raise ValueError("\n  ".join(["config.phases:", *faults]))
    return *found, told


def _metrics_of(run: Run) -> list[str]:
    """The metrics of a run's evaluations by which a phase may end."""
    tasks = {"eval": run.source.task} | {f"eval/{one.label}": one.task for one in run.source.sets}
    prefixes = [*tasks, *(f"{prefix}/{part.label}" for prefix, task in tasks.items() for part in task.parts)]
    return [f"{prefix}/{name}" for prefix in prefixes for name in _MEASURED]


def keep_first(course: Course, state: TrainState, work: Workdir) -> None:
    """Keeps the trained weights before the first step, if a phase begins with them."""
    if all(one.weights != "first" for one in course.phases):
        return
    folder = work.held.weights / FIRST
    if parallel.is_primary():
        epath.Path(folder).rmtree(missing_ok=True)  # of a start that saved no checkpoint
    parallel.barrier("cleared_first")
    with Checkpoints(folder, keep=1) as store:
        store.save(0, state.trainable)


def entered(course: Course, last: Reached, work: Workdir) -> tuple[Run, Reached, dict[str, Any]]:
    """The run of the phase that begins, with its state and the weights that its recorders keep."""
    run, _ = setup.opened(course.phase.config)
    place, before = run.source.position(), last.position
    same = before["data"].get("digest") == place["data"]["digest"]
    state, fresh = last.state, course.phase.fresh
    if course.phase.weights == "first":
        with Checkpoints(work.held.weights / FIRST, read_only=True) as store:
            state = state.with_trainable(store.restore(described(state.trainable), 0).state)
    state = carried(run, state, course.phase, same)
    goes_on = same and all(before["data"][name] == place["data"][name] for name in ("seed", "batch_size"))
    run.source.set_position(place | {"next_uid": before["next_uid"]} | ({"data": before["data"]} if goes_on else {}))
    new = fresh | {one.name for one in run.learner.keeping if not (work.held.weights / one.name).is_dir()}
    parallel.barrier(f"phase_{course.phase.number}")  # no folder is made before every process has looked
    frozen = beginning.frozen_weights(run, state, work, course.origin, new)
    course.record(work)
    return run, Reached(state, run.source.position(), observed=True), frozen


def carried(run: Run, last: TrainState, phase: Phase, same: bool) -> TrainState:
    """The state before the first step of a phase; `same`: whether its problems are those of the phase before.

    It has the weights of `last`, and the states of those parts that are in both phases: moments, averages, models beside the
    policy, controllers. States of problems stay only with the same problems. With the first weights only states of problems
    stay. Its steps are counted from 0, and its random draws are others than those of earlier phases.
    """
    last = offload.moments_near(("optimizer",), last) if run.learner.offload else last
    known = known_of(run, last.params)
    of_task = {one.name for one in known if one.of_task}
    state = run.learner.init(last.params, last.lora, key_of(run, phase), known)
    moved: dict[str, Any] = {"skipped": last.skipped, "skipped_in_row": last.skipped_in_row}
    if phase.weights == "last":
        wanted = ["average", "estimator_state", "objective_state", "replayed"]
        wanted += [] if "optimizer" in phase.fresh else ["opt_state"]
        moved |= {name: getattr(last, name) for name in wanted if alike(getattr(last, name), getattr(state, name))}
        moved["beside"] = {name: last.beside[name] if name in last.beside and alike(last.beside[name], own) else own
                           for name, own in state.beside.items()}
    moved["control"] = {name: _controlled(run.learner, name, own, last.control.get(name), phase, same, of_task)
                        for name, own in state.control.items()}
    return offload.moments_away(run.learner.offload, state.replace(**moved))


def key_of(run: Run, phase: Phase) -> jax.Array:
    """The key of a phase's random draws."""
    return jax.random.fold_in(setup.initial_key(run.config), phase.number)


def _controlled(learner: Learner, name: str, own: Any, before: Any, phase: Phase, same: bool, of_task: Set[str]
                ) -> Any:
    """The state of a controller at the beginning of a phase: that of the phase before where it still means the same.

    `of_task`: the names of values that other problems change.
    """
    one = learner.controls.by_name.get(name)
    of_problems = one is None or bool({*learner.controls.asked(name)} & of_task)
    renewed = one is not None and "reference" in one.knobs and "reference" in phase.fresh
    stays = same if of_problems else phase.weights == "last"
    if before is None or renewed or not stays or not alike(before, own):
        return own
    return before if one is None else learner.controls.begun(name, before, learner.mesh)


def alike(one: Any, other: Any) -> bool:
    """Whether two trees have the same structure, shapes and types."""
    first, second = ((jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]) for tree in (one, other))
    return first == second
