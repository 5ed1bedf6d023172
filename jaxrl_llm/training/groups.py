"""Groups of completions for prompts of a forest: the compiled sampler, then texts and rewards on the host."""
import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import parallel
from jaxrl_llm.forest import Forest, grow, plant
from jaxrl_llm.generation import sampling as sampling_lib
from jaxrl_llm.generation.prompts import encode_problems, pad, solution_ids
from jaxrl_llm.generation.sampler import Completions, Forced, row_keys
from jaxrl_llm.guard import Guarded
from jaxrl_llm.ladders import prompt_buckets, smallest
from jaxrl_llm.rewards import ByTask, Combined, Scores
from jaxrl_llm.rollouts import Role
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.training.metrics import PhaseTimer
from jaxrl_llm.training.scoring import decode, joined, shared_scores

Generate = Callable[..., Any]  # (prompt tokens, prompt mask, keys, forced first tokens, limits) -> completions


@dataclasses.dataclass(frozen=True)
class Sampler:
    """A sampler of `prompts` x `group` completions at a time, in one compiled program.

    Attributes:
      generate: `(params, prompt_tokens, prompt_mask, keys, sampling, lora=) -> Completions`, see `generation.generate`; or, if
        it `streams`, an iterator of completions of consecutive prompts, see `generation.by_engine`.
      sampling: the distribution to draw from, and the maximum number of tokens.
      prompts, group: P and G of a call.  micro_batches: parts of the prompts, one after another. Rewards of one part, or of
        the prompts that an iterator yields, are computed while the next are sampled.
      prompt_tokens: length of the longest prompt.
      tokenizer, stop_strings, reward: these turn completions into texts and scores.
      mesh, dtype: the mesh of the weights and the dtype of the model's computation.
      forces: whether completions can begin with solutions; one program then serves all calls, even if none does.
      limits: whether prompts can have limits of their own, likewise.
    """

    generate: Guarded | Callable[..., Any]
    sampling: sampling_lib.Sampling
    prompts: int
    group: int
    prompt_tokens: int
    tokenizer: Any
    reward: Combined | ByTask
    mesh: Mesh
    dtype: Any
    stop_strings: Sequence[str] = ()
    micro_batches: int = 1
    streams: bool = False
    forces: bool = False
    limits: bool = False
    turns: ClassVar[int] = 1
    contexts: ClassVar[int] = 1
    facts: ClassVar[Mapping[str, str]] = {}
    encode: ClassVar = staticmethod(encode_problems)

    def prepare(self) -> list[tuple[str, str]]:
        """For the head of a run: the rewards that score completions and how, and whether they wait for the last row."""
        rows = [(f"reward {name}", how) for name, how in self.reward.prepare()]
        if self.reward.timed and self.reward.by_row and self.micro_batches == 1 and not self.streams:
            rows.append(("rewards begin", "after the last completion; with sampling.micro_batches=2 after the first half"))
        return rows

    def plant(self, problems: Sequence[Problem], ids: Sequence[Sequence[int]], draw: int) -> Forest:
        """The forest of these prompts, to grow groups on."""
        return plant(problems, ids, self.reward.names, answers=self.reward.extracts, draw=draw,
                     solved_above=self.reward.solved_above)

    def under(self, params, lora, temperature: float | jax.Array | None = None,
              max_tokens: int | jax.Array | None = None, max_turns: int | jax.Array | None = None,
              announced_turns: int | jax.Array | None = None, spread: float | jax.Array | None = None) -> Generate:
        """The compiled program under these weights, with another temperature, length or spread if given.

        Raises ValueError for numbers of turns, which only environments have, and for values outside their range.
        """
        for name, value in (("max_turns", max_turns), ("announced_turns", announced_turns)):
            if value is not None:
                raise ValueError(f"a controller sets {name}={value}, and completions have one turn; set config.environment")
        chosen = self.sampling
        if temperature is not None:
            chosen = dataclasses.replace(chosen, temperature=np.float32(temperature))
        if max_tokens is not None:
            chosen = dataclasses.replace(chosen, max_tokens=np.int32(max_tokens))
        if spread is not None:
            chosen = dataclasses.replace(chosen, spread=np.float32(spread))
        sampling_lib.check(chosen)
        params = parallel.reshard(params, self.mesh, self.dtype)

        def run(prompt_tokens, prompt_mask, keys, forced=None, limits=None):
            own = {name: x for name, x in (("forced", forced), ("limits", limits)) if x is not None}
            rows = prompt_tokens, prompt_mask, keys
            if not self.streams:  # engines and servers read them on the host
                rows, own = parallel.put((rows, own), parallel.batch_sharding(self.mesh))
            return self.generate(params, *rows, chosen, lora=lora, **own)

        return run

    def groups(self, generate: Any, forest: Forest, rows: np.ndarray, first_uid: int, key: jax.Array, version: int,
               timer: PhaseTimer, shares: np.ndarray | None = None, limits: np.ndarray | None = None) -> Forest:
        """The forest with one more group for each of the prompts `rows` i32[R], with uids from `first_uid` on.

        `shares` f32[R, G]: the share of the solution that each completion begins with, see `topologies.Plan`; None: none.
        `limits` i32[R]: maximum tokens of each prompt's completions; None: those of `sampling`.
        """
        shares = np.zeros((len(rows), self.group), np.float32) if shares is None else shares
        limits = np.full(len(rows), self.sampling.max_tokens, np.int32) if self.limits and limits is None else limits
        for start in range(0, len(rows), self.prompts):
            part = slice(start, start + self.prompts)
            own = None if limits is None else limits[part]
            forest = self._call(generate, forest, rows[part], shares[part], own, first_uid + start * self.group, key, version,
                                timer)
        return forest

    def _begun(self, problems: Sequence[Problem], shares: np.ndarray) -> Forced:
        """The first `floor(share * tokens)` tokens of solutions, or all with the end token; none if a solution exceeds T."""
        most = self.sampling.max_tokens
        assert most is not None
        tokens, count = np.zeros((*shares.shape, int(most)), np.int32), np.zeros(shares.shape, np.int32)
        for row in np.flatnonzero(shares.any(1)).tolist():
            solution = solution_ids(problems[row], self.tokenizer)
            whole = shares[row] >= 1
            given = np.where(whole, len(solution), np.floor(shares[row] * (len(solution) - 1) + 1e-4)).astype(np.int32)
            count[row] = np.where(whole & (len(solution) > most), 0, np.minimum(given, np.where(whole, most, most - 1)))
            tokens[row, :, :min(len(solution), most)] = solution[:most]
        return Forced(tokens, count)

    def _call(self, generate, forest, rows, shares, limits, first_uid, key, version, timer):
        """As `groups`, for at most `prompts` rows. Missing rows are padded for a compiled program, which has one shape."""
        asked = [forest.prompt_ids(row) for row in rows]
        missing, length = self.prompts - len(asked), smallest(prompt_buckets(self.prompt_tokens), max(map(len, asked)))
        batch = pad([ids.tolist() for ids in asked] + [asked[0].tolist()] * missing, [0] * self.prompts, length)
        uids = first_uid + np.arange(len(rows) * self.group, dtype=np.int64).reshape(len(rows), self.group)
        keys = row_keys(key, np.pad(uids, ((0, missing), (0, 0)), constant_values=-1))
        begun = self._begun([forest.problems[row] for row in rows], shares) if self.forces else None
        padded = jax.tree.map(lambda x: np.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))), begun)
        limits = None if limits is None else np.pad(limits, (0, missing), constant_values=1)
        parts = self._parts(generate, (batch.tokens, batch.mask, keys, padded, limits), len(rows), timer)
        made, steps, texts, scores = self._scored(parts, [forest.problems[row] for row in rows], timer)
        lengths, owners = made.mask.sum(-1).reshape(-1), np.repeat(rows, self.group)
        roots = np.flatnonzero(forest.role == Role.PROMPT)
        node = halves(np.zeros_like(lengths) if begun is None else np.minimum(begun.count.reshape(-1), lengths), lengths)
        row, last = node.row, node.last
        above = np.where(node.first, roots[owners[row]], len(forest.uid) + np.arange(len(row)) - 1)
        return grow(
            forest, above, uids.reshape(-1)[row], dict(prompt=owners[row], role=node.role, length=node.length,
            stopped=made.stopped.reshape(-1)[row] & last, rewards=np.where(last, scores.total[row], 0),
            components=np.where(last[:, None], scores.components[row], 0),
            texts=[texts[i] if end else "" for i, end in zip(row, last)],
            answers=[self.reward.extract(texts[i], forest.problems[owners[i]]) if end else None for i, end in zip(row, last)],
            tokens=made.tokens[made.mask], logprobs=made.logprobs[made.mask], entropies=made.entropies[made.mask],
            version=np.full(int(lengths.sum()), version)), decode_steps=steps, failures=scores.failures)

    def _parts(self, generate: Generate, batch: Any, count: int, timer) -> Iterator[Completions]:
        """Completions of the first `count` prompts, one part after the other; the next is sampled during its use.

        No program is started before the previous one is finished: the device would have to hold the rows of both.
        """
        size = self.prompts // self.micro_batches

        def start(first):
            return generate(*jax.tree.map(lambda x: x[first:first + size], batch))

        if self.streams:
            batch = jax.tree.map(lambda x: x[:count], batch)
            yield from _beside(itertools.chain.from_iterable(map(start, range(0, count, size))), timer)
            return
        with timer("rollout"):
            running = start(0)
        for following in range(size, count + size, size):
            with timer("rollout"):
                part = parallel.fetch(running)
                running = start(following) if following < count else None
            yield part

    def _scored(self, parts: Iterator[Completions], problems: Sequence[Problem], timer
                ) -> tuple[Completions, int, list[str], Scores]:
        """Completions of all parts, their decode steps, texts and scores; without rows beyond the `problems`.

        A reward that sees the whole batch at once waits for the last part.
        """
        if not self.reward.by_row:
            parts = iter([_joined(*parts)])
        done, texts, scores, steps, left = [], [], [], 0, problems
        for part in parts:
            with timer("reward"):
                mine, left = left[:len(part.stopped)], left[len(part.stopped):]
                steps += int(np.sum(part.decode_steps))
                part = jax.tree.map(lambda x: x[:len(mine)] if np.ndim(x) else x, part)
                part, written = decode(part, self.tokenizer, self.stop_strings)
                reward = self.reward.part(len(mine) / max(len(mine) + len(left), 1))
                scores.append(shared_scores(reward, written, [problem for problem in mine for _ in range(self.group)],
                                            np.sum(part.mask, -1).reshape(-1), sum(earlier.seconds for earlier in scores)))
            done.append(part)
            texts += written
        return _joined(*done), steps, texts, joined(scores)


class Halves(NamedTuple):
    """The nodes of completions whose first tokens an expert wrote, one row after another.

    row: i64[N], the completion.  role: i8[N].  length: i32[N].  first, last: bool[N], the first and the last node of the row.
    """

    row: np.ndarray
    role: np.ndarray
    length: np.ndarray
    first: np.ndarray
    last: np.ndarray


def halves(begun: np.ndarray, lengths: np.ndarray) -> Halves:
    """The nodes of completions of `lengths i64[R]` whose first `begun i64[R]` tokens an expert wrote.

    A completion without tokens of the policy is one node of the expert; one without tokens of an expert is one of the policy.
    """
    rest = lengths - begun
    expert, own = begun > 0, (rest > 0) | (begun == 0)
    row = np.repeat(np.arange(len(lengths)), expert.astype(int) + own)
    new = np.append(True, row[1:] != row[:-1])[:len(row)]
    policy = ~(new & expert[row])
    role = np.where(policy, Role.POLICY, Role.EXPERT).astype(np.int8)
    return Halves(row, role, np.where(policy, rest[row], begun[row]), new, np.append(row[1:] != row[:-1], True)[:len(row)])


def _beside(parts: Iterator[Completions], timer: PhaseTimer) -> Iterator[Completions]:
    """The same completions, made in a thread during the use of earlier ones; parts that are ready together come as one.

    A thread that nobody waits for: an interrupt or an error ends a run at once, also while a server is silent.
    """
    made: queue.SimpleQueue[Completions | BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def make():
        try:
            for part in parts:
                made.put(part)
                if stopped.is_set():
                    return
            made.put(None)
        except BaseException as error:  # raised where the completions are used
            made.put(error)

    threading.Thread(target=make, name="sampling", daemon=True).start()
    ended = False
    try:
        while not ended:
            with timer("rollout"):
                ready = [made.get()]
            while not made.empty():
                ready.append(made.get())
            if isinstance(ready[-1], BaseException):
                raise ready[-1]
            ended = ready[-1] is None
            if some := [part for part in ready if isinstance(part, Completions)]:
                yield _joined(*some)
    finally:
        stopped.set()


def _joined(*parts: Completions) -> Completions:
    """Successive parts as one: rows one after another, counts summed."""
    return jax.tree.map(lambda *x: np.concatenate(x) if np.ndim(x[0]) else sum(x), *parts)
