"""The beginning of a run or of its continuation: the state of its first step, and the weights that recorders keep."""
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from jaxrl_llm import parallel
from jaxrl_llm.data.finished import Finished
from jaxrl_llm.learning import controls, offload
from jaxrl_llm.learning.state import TrainState
from jaxrl_llm.recorders import Recorder
from jaxrl_llm.runs import warm_starts as warm_starts_lib
from jaxrl_llm.runs.warmup import imitate, minimise, oracle_demonstrations
from jaxrl_llm.sampling.source import jsonable
from jaxrl_llm.setup import setup
from jaxrl_llm.store import given as given_lib
from jaxrl_llm.store import pending
from jaxrl_llm.store.bucket import AnyPath
from jaxrl_llm.store.checkpoints import Checkpoints, Restored
from jaxrl_llm.store.workdir import Workdir
from jaxrl_llm.tasks.loader import batches


class Reached(NamedTuple):
    """The progress of a run; one object, so that no interrupt separates its parts.

    `state`, the `position` of its source, and the batches that are `pending`; whether controllers have `observed` the
    evaluation after its last step, and requested a `reset` there; `line`, the metrics of that step until they are written.
    """

    state: TrainState
    position: dict[str, Any]
    pending: tuple[Finished, ...] = ()
    observed: bool = False
    reset: bool = False
    line: dict[str, Any] = {}

    @property
    def host(self) -> dict[str, Any]:
        """What a checkpoint stores beside the state, as JSON."""
        line = {name: float(value) for name, value in self.line.items() if np.ndim(value) == 0}  # `write` refuses others
        waiting = {"pending": [pending.encode(one) for one in self.pending]} if self.pending else {}
        return jsonable(self.position) | waiting | {"observed": self.observed, "reset": self.reset, "line": line}


def first(run: setup.Run, params, work: Workdir, checkpoints: Checkpoints, progress, warm_starts: Path | None,
          given: given_lib.Sums) -> Reached:
    """The beginning of a run, or its last checkpoint, whose position is then set in the source."""
    away = run.learner.offload
    if not work.resume:
        state = offload.moments_away(away, setup.initial_state(run, warm_up(run, params, progress, warm_starts)))
        return Reached(state, run.source.position())
    progress.phase("restoring")
    found = restored(run, params, checkpoints)
    given_lib.check_same(given, found.host.get("given", {}))
    run.source.set_position(found.host)
    progress.step(found.step, {})
    host = {"observed": True, "reset": False, "line": {}} | found.host  # earlier versions saved none of them
    waiting = pending.restored(host.get("pending", ()), run.source, run.schedule.lag)
    return Reached(offload.moments_away(away, found.state), run.source.position(), waiting, host["observed"], host["reset"],
                   host["line"])


def restored(run: setup.Run, params, checkpoints: Checkpoints) -> Restored:
    """The last checkpoint of a run, also one in which an earlier version gave controllers other names."""
    target = offload.moments_away(run.learner.offload, setup.initial_state(run, params))
    found = checkpoints.restore(target, former=controls.with_former_names(target))
    return found._replace(state=controls.with_present_names(found.state, target.control))


def warm_up(run: setup.Run, params, progress, folder: Path | None = None):
    """The weights after the supervised warm-up, if one is configured; `folder`: where runs share them, see `warm_starts`."""
    if not run.config.warmup.steps:
        return params
    make = functools.partial(_warmed_up, run, params, progress)
    return make() if folder is None or parallel.several() else warm_starts_lib.shared(folder, run, params, progress, make)


def _warmed_up(run: setup.Run, params, progress):
    w, source = run.config.warmup, run.source
    data = batches(source.task.train, w.batch, seed=run.config.seed + 1)
    if source.stream.partner.goes_on:
        shown = (oracle_demonstrations(source, problems, w.strays) for problems in data)
        return minimise(run.learner.policy, params, shown, steps=w.steps, loss=w.loss, learning_rate=w.learning_rate,
                        progress=progress)[0]
    params, _ = imitate(run.learner.policy, params, data, source.stream.tokenizer, steps=w.steps,
                        loss=w.loss, learning_rate=w.learning_rate,
                        prompt_tokens=source.stream.prompt_tokens, max_tokens=run.config.sampling.max_tokens,
                        overlong=run.config.prompts.overlong, progress=progress)
    return params


def frozen_weights(run: setup.Run, state: TrainState, work: Workdir) -> dict[str, Any]:
    """Weights that recorders keep from step 0, by name, in folders beside the checkpoints, read by a resumed run."""
    frozen, held = {}, work.held
    for one in run.learner.keeping:
        folder = held.weights / one.name
        if work.resume and not folder.is_dir():
            raise ValueError(f"{work.path} was started without {one.name} weights, which this configuration needs (kl_coef or "
                             f"a {one.name} method); start a new run, or resume without it")
        if not work.resume:
            if parallel.is_primary():
                epath.Path(folder).rmtree(missing_ok=True)  # of a start that saved no checkpoint
            parallel.barrier(f"cleared_{one.name}")
            frozen |= keep_weights(folder, 0, one, state)
            continue
        with Checkpoints(folder, keep=2) as store:
            shapes = jax.eval_shape(one.init, state.params)
            target = parallel.with_shardings(shapes, parallel.tree_shardings(shapes, run.learner.mesh))
            earlier = [step for step in store.steps() if step <= int(state.step)]
            if not earlier:
                raise ValueError(f"{folder} has the {one.name} weights of steps {store.steps()}, and the run continues before "
                                 f"them, from step {int(state.step)}; continue from a later checkpoint, or start a new run")
            frozen[one.name] = store.restore(target, max(earlier)).state
            store.abandon(int(state.step) + 1)  # weights of a branch that the run left
    return frozen


def keep_weights(folder: AnyPath, step: int, recorder: Recorder, state: TrainState) -> dict[str, Any]:
    """A recorder's weights from the policy, by its name, kept in `folder` for runs that continue from this step or later."""
    assert recorder.init is not None
    own = recorder.init(state.params)
    with Checkpoints(folder, keep=2) as store:  # a kill may come before the next checkpoint of the run
        store.save(step, own)
    return {recorder.name: own}
