"""The clients' state on the server: sessions, adapters in training, and snapshots of adapters to sample from."""
import dataclasses
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxrl_llm.contrib.tinker.examples import Datum
from jaxrl_llm.contrib.tinker.learner import Adam, Adapter, AdapterLearner, LoraShape, PassResult
from jaxrl_llm.contrib.tinker.store import AdapterCheckpoint, Stamp, Store
from jaxrl_llm.contrib.tinker.turns import AdapterSnapshot, Turns
from jaxrl_llm.engines.engine import Node, Request
from jaxrl_llm.serving.worker import Worker

_UNNAMED = 8  # unnamed snapshots that are held for each model
_CACHED = 8  # snapshots of checkpoints that are held
_LOST = 600.0  # seconds without a sign of life after which a session may be dropped


@dataclasses.dataclass(eq=False)
class Model:
    """An adapter in training, its unnamed snapshots, and the snapshot that changes with each save."""

    session: str
    adapter: Adapter
    unnamed: deque[str] = dataclasses.field(default_factory=deque)
    inflight: str | None = None


class Service:
    """Everything but HTTP. Methods that return a `Future` do their work in the worker's thread, in the order of their calls.

    Futures raise ValueError for what a client did wrong.
    """

    def __init__(self, name: str, learner: AdapterLearner, worker: Worker, store: Store, *, rank: int, models: int):
        """
        Args:
          name: name of the base.
          worker: runs an engine whose adapter has room for `rank`, and is 0.
          rank: maximum rank of an adapter.  models: maximum number of adapters in training.
        """
        self.name, self.learner, self.worker, self.store = name, learner, worker, store
        self._rank, self._most = rank, models
        self._base = AdapterSnapshot()
        self._turns = Turns(worker, learner, rank, self._base)
        self._sessions: dict[str, float] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, str | None] = {}  # to the address of a checkpoint, or of a snapshot that is held; None: base
        self._held: dict[str, AdapterSnapshot] = {}
        self._cached: OrderedDict[str, tuple[Stamp, AdapterSnapshot]] = OrderedDict()  # by address
        self._lock = threading.Lock()  # of their order, which the event loop and threads beside it change

    # --- sessions -----------------------------------------------------------------------------------------------------------

    def begin(self) -> str:
        """A new session."""
        session = secrets.token_hex(12)
        self._sessions[session] = time.monotonic()
        return session

    def alive(self, session: str) -> bool:
        """Notes a sign of life; returns False for a session that has ended or never existed."""
        if session in self._sessions:
            self._sessions[session] = time.monotonic()
        return session in self._sessions

    def finish(self, session: str) -> Future:
        """Drops a session with its adapters and snapshots; checkpoints stay."""
        def end(engine):
            self._sessions.pop(session, None)
            for model in [name for name, one in self._models.items() if one.session == session]:
                self._drop(model)
            for sampler in [name for name in self._samplers if name.startswith(f"{session}:")]:
                del self._samplers[sampler]

        return self.worker.call(end)

    # --- training -----------------------------------------------------------------------------------------------------------

    def create(self, session: str, model: str, base: str, shape: LoraShape, seed: int | None) -> Future:
        """A new adapter under the name `model`."""
        def make():
            self._check_base(base)
            if seed is not None and not -2**63 <= seed < 2**63:
                raise ValueError(f"seed={seed}; give a whole number from -2^63 to 2^63 - 1")
            self._make_room(session, shape)
            adapter = self.learner.create(shape, secrets.randbelow(2**31) if seed is None else seed)
            self._models[model] = Model(session, adapter)

        return self._do(make)

    def run(self, model: str, data: list[Datum], loss: str, settings: Any, backward: bool) -> Future[PassResult]:
        """A pass over examples; with `backward` it adds its gradient to the adapter's."""
        def go():
            adapter = self.model(model).adapter
            if backward:
                return self.learner.forward_backward(adapter, data, loss, settings)
            return self.learner.forward(adapter.tree, data, loss, settings)

        return self._do(go)

    def step(self, model: str, adam: Adam) -> Future[float]:
        """An optimiser step; returns the norm of its gradient."""
        return self._do(lambda: self.learner.step(self.model(model).adapter, adam))

    def save(self, model: str, name: str, overwrite: bool) -> Future[str]:
        """Writes weights and optimiser state; returns their address."""
        def write():
            adapter, path = self.model(model).adapter, self.store.path(model, "weights", name)
            self.store.save(path, AdapterCheckpoint(self.name, adapter.shape, adapter.tree, adapter.moments), overwrite)
            return path

        return self._do(write)

    def load(self, model: str, path: str, optimizer: bool, session: str | None) -> Future:
        """Loads a checkpoint's weights, and with `optimizer` Adam's state, into an adapter, a new one if a session is given."""
        def read():
            saved = self.stored(path)
            if optimizer and saved.moments is None:
                raise ValueError(f"{path} was saved to sample from and has no optimiser state; load it without, or load what "
                                 "save_state wrote")
            if session is None:
                was = self.model(model).adapter.shape
                if was != saved.shape:
                    raise ValueError(f"{path} holds an adapter of {saved.shape}, the model has {was}; create a training client "
                                     "from the state")
            else:
                self._make_room(session, saved.shape)
            adapter = self.learner.adapter(saved.shape, saved.tree, saved.moments if optimizer else None)
            if session is None:
                self.model(model).adapter = adapter
            else:
                self._models[model] = Model(session, adapter)

        return self._do(read)

    def model(self, name: str) -> Model:
        """Raises ValueError for a model that is not held."""
        if name not in self._models:
            raise ValueError(f"this server holds no model {name!r}: it was never created, its session has ended, or the server "
                             "was started again; create a training client, from a saved state where there is one")
        return self._models[name]

    # --- sampling -----------------------------------------------------------------------------------------------------------

    def save_to_sample(self, model: str, name: str | None, sampler: str | None, inflight: bool) -> Future[str]:
        """Takes a snapshot of the adapter: with a `name` a checkpoint, whose address is returned, else one under `sampler`.

        Only the newest unnamed snapshots are held. With `inflight` all such samplers of the model share one.
        """
        def keep():
            one = self.model(model)
            tree = jax.device_get(one.adapter.tree)
            if name is not None:
                path = self.store.path(model, "sampler_weights", name)
                self.store.save(path, AdapterCheckpoint(self.name, one.adapter.shape, tree))
                return path
            key = f"{model}/inflight" if inflight else sampler
            self._held[key], self._samplers[sampler] = AdapterSnapshot(tree), key
            if inflight:
                one.inflight = key
            else:
                one.unnamed.append(key)
                if len(one.unnamed) > _UNNAMED:
                    del self._held[one.unnamed.popleft()]
            return sampler

        return self._do(keep)

    def open_sampler(self, sampler: str, base: str | None, path: str | None) -> None:
        """Opens a sampler of the base or of a checkpoint. Raises ValueError if that does not exist or fit."""
        if path is not None:
            self._of_checkpoint(path)
        elif base is not None:
            self._check_base(base)
        else:
            raise ValueError("neither base_model nor model_path; give one of them")
        self._samplers[sampler] = path

    def address_of(self, sampler: str) -> str | None:
        """The address of the checkpoint that a sampler uses, if it uses one. Raises ValueError for an unknown sampler."""
        if sampler not in self._samplers:
            raise ValueError(f"this server has no sampler {sampler!r}: its session has ended, or the server was started again")
        key = self._samplers[sampler]
        return key if key and key.startswith("tinker://") else None

    def snapshot_of(self, sampler: str) -> AdapterSnapshot:
        """The snapshot that a sampler samples from. Raises ValueError for one that is not held."""
        path = self.address_of(sampler)
        if path is not None:
            return self._of_checkpoint(path)
        key = self._samplers[sampler]
        if key is None:
            return self._base
        if key not in self._held:
            raise ValueError(f"the weights of the sampler {sampler!r} are not held any more: of each model the newest "
                             f"{_UNNAMED} snapshots without a name are; save weights with a name to keep them")
        return self._held[key]

    def sample(self, snapshot: AdapterSnapshot, requests: list[Request]) -> Future[list[Node]]:
        """A completion for each request."""
        return self._turns.sample(snapshot, requests)

    def score(self, snapshot: AdapterSnapshot, tokens: list[int], last: int | None) -> Future[np.ndarray]:
        """Log-prob of each token after those before it, f32[n] at temperature 1; NaN for the first and all but the `last`."""
        def go():
            logprobs = np.full(len(tokens), np.nan, np.float32)
            if len(tokens) > 1:
                ids = np.asarray(tokens)  # the learner refuses what is outside the vocabulary
                data = [Datum(ids[:-1], ids[1:], {})]
                logprobs[1:] = self.learner.forward(snapshot.tree, data, "cross_entropy", {}).logprobs[0]
            if last is not None:
                logprobs[:max(len(logprobs) - last, 0)] = np.nan
            return logprobs

        return self._do(go)

    def stored(self, path: str) -> AdapterCheckpoint:
        """A checkpoint of an adapter of this server's model. Raises ValueError for another."""
        saved = self.store.load(path, self.name)
        if saved.shape.rank > self._rank:
            raise ValueError(f"{path} holds an adapter of rank {saved.shape.rank}; this server takes 1 to {self._rank} "
                             "(start it with another --rank)")
        self.learner.check(saved.shape, saved.tree, saved.moments, path)
        return saved

    # --- what is common -----------------------------------------------------------------------------------------------------

    def _do(self, function: Callable[[], Any]) -> Future:
        return self.worker.call(lambda engine: function())

    def _check_base(self, base: str) -> None:
        if base != self.name:
            raise ValueError(f"base_model={base!r}; this server has {self.name!r}")

    def _of_checkpoint(self, path: str) -> AdapterSnapshot:
        """The snapshot of what was saved last. Several threads call this, also while the checkpoint is written again."""
        stamp = self.store.stamp(path)  # before the checkpoint is read: that of a later one would hide that it is older
        known, snapshot = self._cached.get(path, (None, None))
        if known != stamp:
            saved = self.stored(path)
            snapshot = AdapterSnapshot(saved.tree)
        with self._lock:
            self._cached[path] = stamp, snapshot
            self._cached.move_to_end(path)
            if len(self._cached) > _CACHED:
                self._cached.popitem(last=False)
        return snapshot

    def _make_room(self, session: str, shape: LoraShape) -> None:
        """Drops the models of lost sessions if needed; raises ValueError if one more adapter still does not fit."""
        if not 0 < shape.rank <= self._rank:
            raise ValueError(f"rank={shape.rank}; this server takes 1 to {self._rank} (start it with another --rank)")
        if session not in self._sessions:
            raise ValueError(f"this server has no session {session!r}; make a new ServiceClient")
        lost = time.monotonic() - _LOST
        for name in [name for name, one in self._models.items() if self._sessions.get(one.session, 0.0) < lost]:
            if len(self._models) >= self._most:
                self._drop(name)
        if len(self._models) >= self._most:
            raise ValueError(f"{len(self._models)} models are in training, the most that this server holds; close a "
                             "ServiceClient, or start the server with more --models")

    def _drop(self, model: str) -> None:
        one = self._models.pop(model)
        for key in (*one.unnamed, *([one.inflight] if one.inflight else ())):
            self._held.pop(key, None)
