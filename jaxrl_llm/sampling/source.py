"""The source of rollouts: problems in, finished rollouts out."""
import dataclasses
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import parallel
from jaxrl_llm.control import Settings
from jaxrl_llm.control.tool_bonus import tool_reward
from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.finished import Finished
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.ladders import smallest
from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.data.shapes import Ladders, padded
from jaxrl_llm.engines.prompts import encode_problems, fit
from jaxrl_llm.learning.snapshot import Snapshot, check
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.recorders.base import texts_of
from jaxrl_llm.replay import Replay
from jaxrl_llm.replay import buffer as buffers
from jaxrl_llm.sampling import by_task
from jaxrl_llm.sampling import prior as prior_lib
from jaxrl_llm.sampling.evaluation_set import EvalSpec
from jaxrl_llm.sampling.exchange import check_same
from jaxrl_llm.sampling.sharing import Sharing
from jaxrl_llm.sampling.stream import Stream
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tasks.loader import Batches, drawn, evenly
from jaxrl_llm.tasks.mixture import Mixed
from jaxrl_llm.tools.timer import PhaseTimer
from jaxrl_llm.topologies import Topology
from jaxrl_llm.topologies.base import group_sizes

_FILLS = 100  # problems to read, for each that is wanted, in search of prompts that are not too long
_PROMPT_STREAM = 2**31 - 3  # folded into the run's key, for batches that are drawn by weights
_REPLAY_STREAM = 2**31 - 4  # folded into the run's key, for replay
# Settings that a source reads:
_READ = ("temperature", "max_tokens", "token_limits", "max_turns", "announced_turns", "spread", "prompt_weights", "prompt_ids",
         "group_sizes", "reference_ids", "reward_baseline", "tool_coef")

Encode = Callable[[Sequence[Problem], Any], Sequence[list[int] | None]]
Sample = Callable[..., Forest]  # (forest, rows) -> the forest with one more group for each of these prompts


@dataclasses.dataclass
class Source:
    """`next(snapshot)` samples one batch with the policy and under the settings of a snapshot.

    Attributes:
      task: the task; `data` has its problems in an endless order.
      stream: grows trajectories.  topology: decides what is sampled.  prompts: per batch.
      max_tokens: maximum tokens of a completion, at most T.
      overlong: handling of prompts that are too long, see `engines.prompts.fit`.
      sizes: the sizes that a batch may have, from the limits of S, T, G and groups of a prompt, and the maximum number of
        programs, see `data.shapes`.
      prior: predicts `facts["expected"]` of prompts before they are sampled; None: no predictions.
      readers: number of processes that read `data` in turns.
      next_uid: uid of the next trajectory.
      replay: the rule for stored rollouts that enter later batches; None: no replay.
      fewer: with a replay, makes the topology of a batch that samples fewer prompts than `topology`.
      buffer: the stored rollouts.
      sharing: publishes groups and adds groups of other runs to batches; None: no sharing. Batches can then be reproduced only
        if the pool is unchanged.
      sets: evaluation sets beside the held-out problems of the task.
      square_norms: `(params, lora, rollouts) -> f32[P, G]`, of the gradients of completions, for topologies that measure them.
      model: the model that samples, to check snapshots; None: they are not checked.
      guided: experts write a part of some completions; rollouts then have `expert`, `hint_mask` and `hinted`.
    """

    task: Task
    data: Batches
    stream: Stream
    topology: Topology
    prompts: int
    max_tokens: int
    mesh: Mesh
    overlong: str = "fail"
    prior: prior_lib.Prior | None = None
    readers: int = 1
    next_uid: int = 0
    sizes: Callable[..., Ladders] = padded
    replay: Replay | None = None
    fewer: Callable[[int], Topology] | None = None
    buffer: Forest | None = None
    sharing: Sharing | None = None
    sets: tuple[EvalSpec, ...] = ()
    guided: bool = False
    square_norms: Callable | None = None
    model: Transformer | None = None

    def __post_init__(self):
        self._apart: Stream | None = None
        self._one = threading.Lock()
        if self.replay is not None and self.buffer is None:
            self.buffer = buffers.empty(self.replay, self.planted([], draw=0))

    def position(self) -> dict[str, Any]:
        """The position of the source; a checkpoint stores its `jsonable` form."""
        place = {"data": self.data.get_state(), "next_uid": self.next_uid}
        return place if self.buffer is None else place | {"buffer": self.buffer}

    def set_position(self, position: dict[str, Any]) -> None:
        """Continues from this position, or from its `jsonable` form."""
        self.data.set_state(position["data"])
        self.next_uid, stored = position["next_uid"], position.get("buffer")
        if self.buffer is not None and stored is not None:
            assert self.replay is not None
            self.buffer = stored if isinstance(stored, Forest) else buffers.decode(
                stored, buffers.empty(self.replay, self.planted([], draw=0)), self.task.train, self.stream.partner.extract)

    def next(self, snapshot: Snapshot, timer: PhaseTimer | None = None) -> Finished:
        """One batch, as planned by its topology. It waits for the batch of another thread, which an interrupt left behind.

        Raises:
          ValueError: no prompt of many batches fits, a setting is outside its range, or the snapshot is of another model.
        """
        if self.model is not None:
            check(snapshot, self.model)
        with self._one:
            return self._next(snapshot, timer)

    def _next(self, snapshot: Snapshot, timer: PhaseTimer | None) -> Finished:
        """The same, with nothing beside it."""
        timer, version = timer or PhaseTimer(), snapshot.version
        if parallel.several():
            place = {"the next uid": self.next_uid, "the position in the data": str(self.data.get_state())}
            check_same(snapshot.settings._asdict() | place, f"before batch {version + 1}")
        known = read_settings(snapshot.settings)
        self.stream.forget()
        self.stream.publish(snapshot._replace(settings=known))
        generate = functools.partial(self._sampled, known, timer)
        measured, asked = self._reference_rates(known.reference_ids, generate, timer)
        topology, mix = self._begun(snapshot.key, version)
        forest = self.planted([], draw=0)
        while not (plan := topology.plan(forest)).complete:
            if plan.measure == "expected":
                forest, tokens = with_expected(forest, generate(forest, plan.rows), bool(self.prior and self.prior.successes))
                asked += tokens
            elif plan.measure:
                forest = self._measured(forest, plan.measure, snapshot)
            elif plan.draw:
                forest = self._drawn(forest, plan.draw, snapshot, known, timer)
            else:
                forest = generate(forest, plan.rows, plan.shares)
        own = forests.trim(forest, ~forest.aided) if self.guided else forest
        chosen, counts = forests.select(forest, topology.choose(forest)), measured | outcome_counts(own, len(self.task.train))
        metrics = forests.metrics(own) | topology.metrics(forest) | (guide_metrics(forest) if self.guided else {}) | {
            "completion/tokens": float(policy_tokens(forest) + asked)} | {
            f"control/{name}": float(value) for name in _READ
            if (value := getattr(known, name)) is not None and np.ndim(value) == 0}
        metrics |= by_task.metrics(own, [part.label for part in self.task.parts]) | balance(self.stream.shares())
        self.stream.rest()
        stored = self.buffer
        if mix is not None:
            chosen, self.buffer, mixed = mix(chosen)
            metrics |= mixed
        if parallel.several():
            numbers = {name: column for name, column in chosen.columns.items() if column.dtype != object}
            check_same(numbers | dict(chosen.facts) | counts, f"of batch {version + 1}")
        if not chosen.problems:
            return Finished(None, chosen, metrics, counts)
        return Finished(self._completed(self.view(chosen, version), chosen, known, stored), chosen, metrics, counts)

    def _reference_rates(self, asked_ids: Any, generate: Sample, timer: PhaseTimer) -> tuple[dict[str, np.ndarray], int]:
        """The fact `reference_rates`, if controllers set ids i32[K], and the number of tokens sampled for it.

        Each problem gets a group that is not trained on.
        """
        if asked_ids is None:
            return {}, 0
        tokens = 0
        ids = np.asarray(asked_ids)
        rates, asked = np.full(len(ids), np.nan, np.float32), np.flatnonzero(ids >= 0)
        if len(asked):
            problems = [self.task.train[int(number)] for number in ids[asked]]
            encoded = parallel.first(self.stream.partner.encode(problems, self.stream.tokenizer, timer))
            fits = [None if one is None or len(one) > self.stream.prompt_tokens else one for one in encoded]
            rows = [(problem, one) for problem, one in zip(problems, fits) if one is not None]
            forest = generate(self.planted(rows, draw=0), np.arange(len(rows)))
            owner, right = forest.prompt[forest.ends], forest.solved[forest.ends]
            rates[asked[[one is not None for one in fits]]] = means(right, owner, len(rows))
            tokens = policy_tokens(forest)
        return {"reference_rates": rates}, tokens

    def _begun(self, key: jax.Array, version: int) -> tuple[Topology, Callable[[Forest], buffers.ReplayedBatch] | None]:
        """The topology of the next batch, and a function that adds groups of a buffer or a pool; None: there is neither."""
        if self.sharing is not None:
            return self._shared(self.sharing, key, version)
        if self.replay is None:
            return self.topology, None
        assert self.fewer is not None and self.buffer is not None
        seed = jax.random.fold_in(jax.random.fold_in(key, _REPLAY_STREAM), version)
        rng = np.random.default_rng(parallel.fetch(jax.random.key_data(seed)))
        stored, left = buffers.take(self.replay, self.buffer, version, self.prompts, rng)
        return self.fewer(self.prompts - len(stored.problems)), lambda fresh: buffers.mix(
            self.replay, fresh, stored, left, version, self._group, rng)

    def _shared(self, sharing: Sharing, key: jax.Array, version: int
                ) -> tuple[Topology, Callable[[Forest], buffers.ReplayedBatch]]:
        """As `_begun`, with groups of the pool; the sampled groups are published."""
        assert self.fewer is not None
        seed = jax.random.fold_in(jax.random.fold_in(key, _REPLAY_STREAM), version)
        rng = np.random.default_rng(parallel.fetch(jax.random.key_data(seed)))
        foreign, metrics = sharing.take(self.stream, self.task.train, self.next_uid, rng)
        self.next_uid += len(foreign.ends)

        def mix(fresh):
            sharing.publish(fresh, version)
            plain = fresh.with_facts({})
            whole = forests.join([plain, foreign]) if foreign.problems else fresh
            return buffers.ReplayedBatch(whole, self.buffer, metrics)

        return self.fewer(self.prompts - len(foreign.problems)), mix

    def _completed(self, rollouts: Rollouts, forest: Forest, known: Settings, stored: Forest | None) -> Rollouts:
        """The rollouts with the fields from settings and a replay; `stored`: the buffer before this batch."""
        prompts, extras = len(rollouts.valid), dict[str, Any](rollouts.extras)
        if self.replay is not None or self.sharing is not None:  # versions do not tell: under a lag first batches share one
            ends = forest.ends if self.stream.contexts == 1 else forest.leaves
            old = forests.versions(forest) < 0 if stored is None else np.isin(forest.uid[ends], stored.uid)
            extras["replayed"] = placed(forest, ends, old, rollouts.valid.shape)
        if "replay_weight" in forest.facts:
            weights = np.pad(forest.facts["replay_weight"], (0, prompts - len(forest.problems)))
            extras["replay_weights"] = np.broadcast_to(weights[:, None, None], rollouts.mask.shape)
        if self.guided:
            role = rollouts.role if rollouts.role is not None else np.where(rollouts.mask, Role.POLICY, Role.PADDING)
            expert, rollouts = role == Role.EXPERT, rollouts.replace(role=role.astype(np.int8))
            extras |= {"expert": expert, "hint_mask": expert, "hinted": expert.any(-1)}
        if known.reward_baseline is not None:
            extras["reward_baseline"] = np.full(prompts, known.reward_baseline, np.float32)
        if known.temperature is not None:  # greedy samples are scored at temperature 1, as the sampler reports them
            rollouts = rollouts.replace(temperature=np.full(prompts, known.temperature or 1, np.float32))
        return rollouts.replace(extras=extras)

    @property
    def _group(self) -> int:
        """Maximum number of rollouts of a prompt."""
        return self.stream.group * self.max_groups

    @property
    def max_groups(self) -> int:
        """Maximum number of rows of rollouts of a prompt: groups times the contexts of a trajectory."""
        return self.topology.max_groups * self.stream.contexts

    @property
    def ladders(self) -> Ladders:
        """The sizes that a batch may have."""
        return self.sizes(self.stream.prompt_tokens, self.max_tokens, self.stream.group, self.max_groups)

    def _measured(self, forest: Forest, name: str, snapshot: Snapshot) -> Forest:
        """The forest with a fact of `topologies.base.MEASURED`, from the first groups of each prompt."""
        assert name == "gradient_norms" and self.square_norms is not None
        group, most = self.stream.group, int(group_sizes(forest).max())
        rollouts = self.view(forest, snapshot.version, -(-most // group) * group)
        right, texts = rollouts.correct & rollouts.valid, texts_of(rollouts)
        texts = parallel.put(texts.replace(filled=4), parallel.batch_sharding(self.mesh))
        norms = np.sqrt(parallel.fetch(self.square_norms(snapshot.params, snapshot.lora, texts)))
        means = np.sum(norms, axis=1, where=right) / np.maximum(right.sum(1), 1)
        return forest.with_facts({**forest.facts, name: means[:len(forest.problems)].astype(np.float32)})

    def view(self, forest: Forest, version: int, group: int | None = None) -> Rollouts:
        """The credited view: a rollout for each trajectory, or each of its contexts, in a shape that the run compiles for.

        `group`: maximum number of rollouts of a prompt; None: that of a complete batch.
        """
        sizes, view = self.ladders, forests.paths if self.stream.contexts == 1 else forests.contexts
        return view(
            forest, self.stream.turns, self.stream.facts, group=group or self._group, prompts=self.prompts, version=version,
            tokens=functools.partial(smallest, sizes.tokens),
            prompt_tokens=functools.partial(smallest, sizes.prompt_tokens), of_problems=self.task.facts)

    @property
    def held_out(self) -> Stream:
        """A stream for held-out problems, which shares no mutable state with that of training."""
        if self._apart is None:
            self._apart = self.stream.apart()
        return self._apart

    def planted(self, rows: Sequence[tuple[Problem, list[int]]], draw: int) -> Forest:
        """The forest of these problems and their token ids, without samples."""
        return self.stream.partner.plant([problem for problem, _ in rows], [ids for _, ids in rows], draw)

    def _sampled(self, known: Settings, timer: PhaseTimer, forest: Forest, rows: np.ndarray, shares: np.ndarray | None = None
                 ) -> Forest:
        """The forest with a group for each of `rows`, with the next uids; `shares`: see `topologies.Plan`.

        Of the settings on the host it reads `token_limits` i32[N] and `tool_coef` f32[].
        """
        limits, own = known.token_limits, dict[str, Any]()
        first, self.next_uid = self.next_uid, self.next_uid + len(rows) * self.stream.group
        if shares is not None:
            uids = range(first, self.next_uid, self.stream.group)
            own["forced"] = [self.stream.partner.beginnings(forest.problems[row], range(uid, uid + len(some)), some)
                             for row, uid, some in zip(rows, uids, shares)]
        if limits is not None:
            if limits.shape != (len(self.task.train),) or limits.min() < 1:
                raise ValueError(f"controllers propose token limits of shape {limits.shape}, from {limits.min(initial=1)} on, "
                                 f"for {len(self.task.train)} training problems; give one for each, 1 or more")
            own["limits"] = np.asarray(limits, np.int32)[[forest.problems[row].id for row in rows]]
        grown = self.stream.groups(forest, rows, first, timer, **own)
        if known.tool_coef is None or "tool_calls" not in self.stream.facts:
            return grown
        return with_tool_reward(grown, len(forest.uid), float(known.tool_coef))

    def _drawn(self, forest: Forest, count: int, snapshot: Snapshot, settings: Settings, timer: PhaseTimer) -> Forest:
        """The forest with `count` further problems of the task, and their facts."""
        rows: list[tuple[Problem, list[int]]] = []
        if forest.problems:  # controllers propose one batch per step
            settings = settings._replace(prompt_ids=None)
        problems, seen = self._problems(snapshot.key, settings), 0
        while (missing := count - len(rows)) and seen < _FILLS * count:  # reads no more than are missing: none is left over
            rows += fitting_problems(problems(seen, missing), self.stream.tokenizer, self.stream.prompt_tokens, self.overlong,
                                     self.readers, functools.partial(self.stream.partner.encode, timer=timer))
            seen += missing
        if not rows:
            raise ValueError(f"no prompt of {_FILLS} batches fits in prompts.max_tokens={self.stream.prompt_tokens}; raise it")
        new = self.planted(rows, draw=int(forest.draw.max(initial=-1)) + 1)
        facts = {} if self.prior is None else self._expectations(rows, snapshot)
        if settings.group_sizes is not None:
            facts = {**facts, "group_size": self._group_sizes(new, settings)}
        new = new.with_facts(facts)
        return forests.join([forest, new]) if forest.problems else new

    def _group_sizes(self, new: Forest, settings: Settings) -> np.ndarray:
        """i32[P], the rollouts to sample for each problem: as proposed, or one group for problems without a proposal."""
        if settings.prompt_ids is None:
            return np.full(len(new.problems), self.stream.group, np.int32)
        ids, sizes = (np.asarray(x) for x in (settings.prompt_ids, settings.group_sizes))
        if sizes.shape != ids.shape:
            raise ValueError(f"controllers propose {ids.shape} problems and {sizes.shape} group sizes; give one for each")
        wanted = dict(zip(ids.tolist(), sizes.tolist()))
        return np.array([wanted.get(problem.id, self.stream.group) for problem in new.problems], np.int32)

    def _problems(self, key: jax.Array, settings: Settings) -> Callable[[int, int], list[Problem]]:
        """`(first, count) -> problems`, this process's share of a part of the order in which a draw reads problems.

        The order has proposed problems first, then others by weight; or, if nothing is proposed, the next ones of the loader.
        """
        proposed = np.asarray(() if settings.prompt_ids is None else settings.prompt_ids, np.int64)
        proposed = proposed[proposed >= 0]
        if settings.prompt_weights is None and not len(proposed):
            return lambda first, count: self.data.take(count)
        weights = np.ones(len(self.task.train)) if settings.prompt_weights is None else np.asarray(settings.prompt_weights)
        if len(weights) != len(self.task.train) or (proposed >= len(weights)).any():
            raise ValueError(f"controllers propose {len(weights)} weights and problems {proposed.tolist()} for a task of "
                             f"{len(self.task.train)} training problems")
        key = jax.random.fold_in(jax.random.fold_in(key, _PROMPT_STREAM), self.data.number)
        seed, base = parallel.fetch(jax.random.key_data(key)), evenly(self.task.train)

        def part(first, count):
            others = drawn(seed, max(first + count - len(proposed), 0), weights, base)  # begins like the draws before it
            return self.data.chosen(np.concatenate([proposed, others])[first:first + count])

        return part

    def _expectations(self, rows, snapshot: Snapshot) -> prior_lib.Facts:
        """The facts that the prior reads of problems, and its predictions."""
        assert self.prior is not None
        facts = self.prior.read(rows, snapshot.params, snapshot.lora)
        return {**facts, "expected": parallel.fetch(prior_lib.predict(self.prior, snapshot.prior, facts))}


def read_settings(settings: Settings) -> Settings:
    """Those of the settings that a source reads, on the host."""
    return Settings(**{name: parallel.fetch(getattr(settings, name)) for name in _READ})


def host_settings(temperature: float | None = None, max_tokens: int | None = None) -> Settings:
    """The settings of a measurement; None: those of the configuration."""
    return Settings(temperature=None if temperature is None else jnp.float32(temperature),
                    max_tokens=None if max_tokens is None else jnp.int32(max_tokens))


def policy_tokens(forest: Forest) -> int:
    """Number of tokens that the policy wrote."""
    return int(forest.length[forest.role == Role.POLICY].sum())


def balance(shares: Sequence[int]) -> dict[str, float]:
    """The metric `sampling/balance` of several replicas: the fewest tokens that one has drawn per those of the busiest."""
    return {"sampling/balance": min(shares) / max(shares)} if len(shares) > 1 and max(shares) else {}


def with_expected(forest: Forest, grown: Forest, successes: bool = False) -> tuple[Forest, int]:
    """The forest with what is expected of problems where it was NaN, and the number of tokens that were sampled for it.

    This is the mean reward, or the share of `successes`, of the samples that `grown` has and the forest has not; 1/2 where an
    environment lost all of them.
    """
    first, known = len(forest.uid), forest.facts["expected"]
    ends = grown.ends[grown.ends >= first]
    values = grown.solved.astype(np.float32) if successes else grown.rewards
    seen = np.nan_to_num(means(values[ends], grown.prompt[ends], len(forest.problems)), nan=0.5)
    expected = np.where(np.isnan(known), seen, known).astype(np.float32)
    return forest.with_facts({**forest.facts, "expected": expected}), policy_tokens(grown) - policy_tokens(forest)


def with_tool_reward(forest: Forest, first: int, coef: float) -> Forest:
    """The forest with the `tool_reward` added to the rewards of trajectories that end at the node `first` or behind it.

    Turns that call tools are those whose fact `tool_calls` is above 0, in all contexts of a trajectory.
    """
    assert forest.turn_info is not None
    leaves, (which, last) = forest.leaves, forest.finals
    node, row = forests.chains(forest, leaves)
    calls = np.array([info.get("tool_calls", 0) > 0 for info in forest.turn_info[node]], bool)
    added = tool_reward(np.bincount(which[row], calls, minlength=len(last)), coef)
    rewards, ends = forest.rewards.copy(), leaves[last]
    rewards[ends] += np.where(ends >= first, added, 0).astype(np.float32)
    return forest.with_columns(rewards=rewards)


def means(values: np.ndarray, owner: np.ndarray, count: int) -> np.ndarray:
    """f32[count], the mean of the `values` f[R] that each of `count` owners has; NaN where it has none.

    An environment may lose all trajectories of a problem.
    """
    number = np.bincount(owner, minlength=count)
    total = np.bincount(owner, values, minlength=count)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan).astype(np.float32)


def outcome_counts(forest: Forest, problems: int) -> dict[str, np.ndarray]:
    """The facts `tried` and `right` i32[N] of a forest, see `control.FACTS`."""
    ids = np.array([problem.id for problem in forest.problems], np.int64)[forest.prompt[forest.ends]]
    return {"tried": np.bincount(ids, minlength=problems).astype(np.int32),
            "right": np.bincount(ids[forest.solved[forest.ends]], minlength=problems).astype(np.int32)}


def guide_metrics(forest: Forest) -> dict[str, float]:
    """Metrics of trajectories that an expert began: their share, their mean reward, and an expert's tokens in each."""
    aided, written = forest.aided, forest.role == Role.EXPERT
    metrics = {"guide/share": float(aided.mean())}
    if aided.any():
        metrics |= {"guide/reward": float(forest.rewards[forest.ends][aided].mean()),
                  "guide/tokens": float(forest.length[written].sum() / aided.sum())}
    return metrics


def placed(forest: Forest, ends: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The `values [R]` of the rows `ends` as a view of this `shape` has them: missing prompts are copies of the first."""
    owner, out = forest.prompt[ends], np.zeros(shape, values.dtype)
    out[owner, np.arange(len(ends)) - np.searchsorted(owner, owner)] = values
    out[len(forest.problems):] = out[:1]
    return out


def jsonable(position: dict[str, Any]) -> dict[str, Any]:
    """The position of a source as JSON."""
    return {name: buffers.encode(part) if isinstance(part, Forest) else part for name, part in position.items()}


def fitting_problems(problems: Sequence[Problem], tokenizer, max_tokens: int, overlong: str, processes: int = 1,
                     encode: Encode = encode_problems):
    """The problems whose prompts fit and their token ids (see `engines.prompts.fit`).

    If several `processes` read problems in turns, each passes its own, and each gets those of all in order. `encode` turns
    problems into token ids, None for a problem that cannot be sampled.
    """
    mine = [(problem, None if ids is None else fit(ids, problem, max_tokens, overlong, tokenizer))
            for problem, ids in zip(problems, encode(problems, tokenizer), strict=True)]
    shares = parallel.gather_objects(mine)[:processes]  # several may read the same, and an environment may open it otherwise
    turns = itertools.zip_longest(*shares, fillvalue=(None, None))  # the first ones may have one more
    return [(problem, ids) for turn in turns for problem, ids in turn if ids is not None]


def held_out(source: Sequence[Problem], problems: int) -> list[Problem]:
    """`problems` of `source`, or all if there are fewer, drawn with a fixed seed, equally many of each of several tasks.

    What a task lacks comes from the others. Sources are often sorted, so that their first problems are not a fair sample.
    Every run is measured on the same problems.
    """
    if isinstance(source, Mixed):
        rounds = sorted((i, k) for k, side in enumerate(source.sides) for i in range(min(len(side), problems)))
        counts = Counter(k for _, k in rounds[:problems])
        return [source[first + int(i)] for k, (first, side) in enumerate(zip(source.starts, source.sides))
                for i in np.random.default_rng(0).permutation(len(side))[:counts[k]]]
    return [source[int(i)] for i in np.random.default_rng(0).permutation(len(source))[:problems]]


def sample_held_out(source: Source, params, lora, problems: int, key: jax.Array, timer: PhaseTimer | None = None,
                    temperature: float | None = None, max_tokens: int | None = None, samples: int | None = None,
                    stream: Stream | None = None) -> Forest:
    """`samples` completions (None: a group) for each of `problems` held-out problems; ValueError if no prompt fits.

    Whole groups are drawn, of which the first `samples` are kept. `stream`: None: that of the source for held-out problems.
    """
    timer, stream = timer or PhaseTimer(), stream or source.held_out
    stream.forget()
    mine = held_out(source.task.heldout, problems)[jax.process_index()::jax.process_count()]
    rows = fitting_problems(mine, stream.tokenizer, stream.prompt_tokens, source.overlong, jax.process_count(),
                            functools.partial(stream.partner.encode, timer=timer))
    if not rows:
        raise ValueError(f"no held-out prompt fits in prompts.max_tokens={stream.prompt_tokens}; raise it")
    stream.publish(Snapshot(-1, params, lora, key, host_settings(temperature, max_tokens)))
    forest = stream.partner.plant([problem for problem, _ in rows], [ids for _, ids in rows], draw=0)
    for number in range(1 if samples is None else -(-samples // stream.group)):
        forest = stream.groups(forest, np.arange(len(rows)), number * len(rows) * stream.group, timer)
    stream.rest()
    owner = forest.prompt[forest.ends]
    place = np.arange(len(owner)) - np.searchsorted(owner, owner)
    return forest if samples is None else forests.trim(forest, place < samples)
