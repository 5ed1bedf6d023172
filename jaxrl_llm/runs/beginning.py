"""The beginning of a run or of its continuation: the state of its first step, and the weights that recorders keep."""
import contextlib
import functools
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from jaxrl_llm import parallel
from jaxrl_llm.data.finished import Finished
from jaxrl_llm.learning import controls, offload
from jaxrl_llm.learning.state import TrainState
from jaxrl_llm.recorders import Recorder
from jaxrl_llm.runs import warm_starts as warm_starts_lib
from jaxrl_llm.runs.warmup import EVERY, imitate, minimise, oracle_demonstrations
from jaxrl_llm.sampling.position import jsonable
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
    evaluation after its last step, and requested a `reset` there; `line`, the metrics of that step until they are written;
    `scores`, what the evaluations of its phase were, by step, if they may end it.
    """

    state: TrainState
    position: dict[str, Any]
    pending: tuple[Finished, ...] = ()
    observed: bool = False
    reset: bool = False
    line: dict[str, Any] = {}
    scores: dict[int, float] = {}

    @property
    def host(self) -> dict[str, Any]:
        """What a checkpoint stores beside the state, as JSON."""
        line = {name: float(value) for name, value in self.line.items() if np.ndim(value) == 0}  # `write` refuses others
        waiting = {"pending": [pending.encode(one) for one in self.pending]} if self.pending else {}
        seen = {"scores": {str(step): float(score) for step, score in self.scores.items()}} if self.scores else {}
        return jsonable(self.position) | waiting | seen | {"observed": self.observed, "reset": self.reset, "line": line}


def first(run: setup.Run, params, work: Workdir, checkpoints: Checkpoints, progress, warm_starts: Path | None,
          origin: int = 0) -> Reached:
    """The beginning of a run, or its last checkpoint, whose position is then set in the source.

    `origin`: the steps of the run before the phase of that checkpoint.
    """
    away = run.learner.offload
    if not work.resume:
        state = offload.moments_away(away, setup.initial_state(run, warm_up(
            run, params, progress, warm_starts, work.held.weights / "warmup")))
        return Reached(state, run.source.position())
    progress.phase("restoring")
    found = restored(run, params, checkpoints)
    if found.step < origin:
        raise ValueError(f"the newest intact checkpoint of {work.path}, of step {found.step}, is of an earlier phase "
                         f"than the damaged ones after step {origin}; delete these in {checkpoints.directory}, then --resume "
                         "continues in that phase")
    given_lib.check_same(given_lib.sums_of(run.learner.measuring), found.host.get("given", {}))
    run.source.set_position(found.host)
    progress.step(found.step, {})
    host = {"observed": True, "reset": False, "line": {}, "scores": {}} | found.host  # earlier versions saved none of them
    waiting = pending.restored(host.get("pending", ()), run.source, run.schedule.lag)
    return Reached(offload.moments_away(away, found.state), run.source.position(), waiting, host["observed"], host["reset"],
                   host["line"], {int(step): score for step, score in host["scores"].items()})


def restored(run: setup.Run, params, checkpoints: Checkpoints) -> Restored:
    """The last checkpoint of a run, also one in which an earlier version gave controllers other names."""
    target = offload.moments_away(run.learner.offload, setup.initial_state(run, params))
    found = checkpoints.restore(target, former=controls.with_former_names(target))
    return found._replace(state=controls.with_present_names(found.state, target.control))


def warm_up(run: setup.Run, params, progress, folder: Path | None = None, kept: AnyPath | None = None):
    """The weights after the supervised warm-up, if one is configured; `folder`: where runs share them, see `warm_starts`.

    `kept`: a folder of the run's own, in which a warm-up that is killed finds its state at the next start.
    """
    if not run.config.warmup.steps:
        return params
    make = functools.partial(_warmed_up, run, params, progress, kept)
    return make() if folder is None or parallel.several() else warm_starts_lib.shared(folder, run, params, progress, make)


def _warmed_up(run: setup.Run, params, progress, kept: AnyPath | None):
    w, source = run.config.warmup, run.source
    data = batches(source.task.train, w.batch, seed=run.config.seed + 1)
    shards = parallel.shards_of(run.learner.mesh.shape)
    options: dict[str, Any] = dict(
        steps=w.steps, loss=w.loss, learning_rate=w.learning_rate, progress=progress,
        micro_batches=int(np.gcd(max(w.batch // shards, 1), run.config.learner.micro_batches)),
        seek=lambda update: data.set_state(data.get_state() | {"next_problem": update * w.batch, "draws": update}))
    with contextlib.ExitStack() as stack:
        if kept is not None and w.steps > EVERY:
            options["kept"] = stack.enter_context(Checkpoints(kept, keep=1))
        if source.stream.partner.goes_on:
            shown = (oracle_demonstrations(source, problems, w.strays) for problems in data)
            params, _ = minimise(run.learner.policy, params, shown, **options)
        else:
            params, _ = imitate(run.learner.policy, params, data, source.stream.tokenizer,
                                prompt_tokens=source.stream.prompt_tokens, max_tokens=run.config.sampling.max_tokens,
                                overlong=run.config.prompts.overlong, **options)
    if "kept" in options and parallel.is_primary():
        epath.Path(kept).rmtree(missing_ok=True)
    return params


def frozen_weights(run: setup.Run, state: TrainState, work: Workdir, step: int, new: Container[str] = ()) -> dict[str, Any]:
    """Weights that recorders keep, by name, in folders beside the checkpoints: those of earlier steps, or of this one.

    `step`: that of the whole run. `new`: names of those whose weights are the policy's of this step, also in a later phase.
    """
    frozen, held = {}, work.held
    for one in run.learner.keeping:
        folder = held.weights / one.name
        if work.resume and one.name not in new and not folder.is_dir():
            raise ValueError(f"{work.path} was started without {one.name} weights, which this configuration needs (kl, or "
                             f"a {one.name} method); start a new run, or resume without it")
        if not work.resume and not step:
            if parallel.is_primary():
                epath.Path(folder).rmtree(missing_ok=True)  # of a start that saved no checkpoint
            parallel.barrier(f"cleared_{one.name}")
        if one.name in new or not (work.resume or step):
            own = keep_weights(folder, step, one, state)[one.name]
        else:
            own = _kept(folder, one, state, step, run.learner.mesh)
        frozen[one.name] = offload.away(run.learner.offload, one.name, own)
    return frozen


def _kept(folder: AnyPath, one: Recorder, state: TrainState, step: int, mesh: Mesh) -> Any:
    """The newest weights of a recorder that were kept up to this step."""
    assert one.init is not None
    with Checkpoints(folder, keep=2) as store:
        shapes = jax.eval_shape(one.init, state.params)
        target = parallel.with_shardings(shapes, parallel.tree_shardings(shapes, mesh))
        earlier = [kept for kept in store.steps() if kept <= step]
        if not earlier:
            raise ValueError(f"{folder} has the {one.name} weights of steps {store.steps()}, and the run continues before "
                             f"them, from step {step}; continue from a later checkpoint, or start a new run")
        own = store.restore(target, max(earlier)).state
        store.abandon(step + 1)  # weights of a branch that the run left
    return own


def keep_weights(folder: AnyPath, step: int, recorder: Recorder, state: TrainState) -> dict[str, Any]:
    """A recorder's weights from the policy, by its name, kept in `folder` for runs that continue from this step or later."""
    assert recorder.init is not None
    own = recorder.init(state.params)
    with Checkpoints(folder, keep=2) as store:  # a kill may come before the next checkpoint of the run
        store.save(step, own)
    return {recorder.name: own}
