"""One rollout batch: problems -> prompts -> completions -> texts -> rewards -> `Rollouts`."""
import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.generation.prompts import encode_problem, fit, pad
from jaxrl_llm.generation.sampler import Completions, row_keys
from jaxrl_llm.models.unpadding import through_last
from jaxrl_llm.rewards import Combined, Scores
from jaxrl_llm.rollouts import Prompts, Rollouts
from jaxrl_llm.tasks.base import Problem


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A batch on the host: what was asked, what came back, and what it earned.

    Attributes:
      problems: P problems.  prompts: their tokens.  completions: numpy `Completions`, `[P, G, T]`.
      texts: `P * G` decoded completions without the stop token or stop string, row after row.
      scores: rewards of the `P * G` rows.
      uids: `i64[P, G]`, the numbers that their random numbers are made of, see `training.uids`; -1 where nothing was drawn.
      answers: what the first reward reads as the answer of each row (None: nothing), if it can tell at all.
      valid: `bool[P, G]`, the completions that were drawn, where prompts have unequally many; None: all.
      prior: what was known of each prompt before it was sampled, if anyone asked: `expected f32[P]`, its reward, and the facts
        that say so, `[P, ...]` (see `training.prior`).
    """

    problems: Sequence[Problem]
    prompts: Prompts
    completions: Completions
    texts: Sequence[str]
    scores: Scores
    uids: np.ndarray
    answers: Sequence[Hashable | None] | None = None
    valid: np.ndarray | None = None
    prior: Mapping[str, np.ndarray] | None = None

    @property
    def rewards(self) -> np.ndarray:
        """`f32[P, G]`, 0 where nothing was drawn"""
        return self.scores.total.reshape(self.completions.mask.shape[:2])

    @property
    def drawn(self) -> np.ndarray:
        """`bool[P, G]`"""
        return np.ones(self.completions.mask.shape[:2], bool) if self.valid is None else self.valid


def fitting_problems(problems: Sequence[Problem], tokenizer, max_tokens: int, overlong: str, processes: int = 1):
    """The problems whose prompts fit and their token ids (see `generation.prompts.fit`).

    Where several `processes` read a batch in turns, each gives its own problems, and all get those of all in order.
    """
    mine = [(problem, fit(encode_problem(problem, tokenizer), problem, max_tokens, overlong)) for problem in problems]
    shares = [mine] if processes == 1 else parallel.gather_objects(mine)[:processes]
    return [(problem, ids) for turn in zip(*shares, strict=True) for problem, ids in turn if ids is not None]


def cut_at_stop_strings(rows: Sequence[np.ndarray], tokenizer, stop_strings: Sequence[str]) -> np.ndarray:
    """i64[N]: the tokens to keep of rows that contain a stop string, through the one that completes it."""
    low, high = np.ones(len(rows), np.int64), np.array([len(row) for row in rows], np.int64)
    while (low < high).any():
        middle = (low + high) // 2
        texts = tokenizer.decode_batch([row[:n] for row, n in zip(rows, middle)])
        reached = np.array([any(stop in text for stop in stop_strings) for text in texts])
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    return low


def decode(completions: Completions, tokenizer, stop_strings: Sequence[str] = ()) -> tuple[Completions, list[str]]:
    """Texts of all rows; rows that contain a stop string are cut there and count as stopped."""
    P, G, T = completions.mask.shape
    mask, stopped = np.array(completions.mask).reshape(-1, T), np.array(completions.stopped).reshape(-1)
    tokens = np.asarray(completions.tokens).reshape(-1, T)
    rows = [row[:length] for row, length in zip(tokens, mask.sum(-1) - stopped)]
    texts = tokenizer.decode_batch(rows)
    hits = [i for i, text in enumerate(texts) if any(stop in text for stop in stop_strings)]
    for i, kept in zip(hits, cut_at_stop_strings([rows[i] for i in hits], tokenizer, stop_strings)):
        mask[i, kept:], stopped[i] = False, True
        texts[i] = texts[i][:min(texts[i].index(stop) for stop in stop_strings if stop in texts[i])]
    return completions.replace(mask=mask.reshape(P, G, T), stopped=stopped.reshape(P, G)), texts


def sample(generate: Callable[..., Any], rows: Sequence[tuple[Problem, list[int]]], key, uids: np.ndarray, *,
           prompt_tokens: int, prompts: int, tokenizer, reward: Combined, stop_strings=(), timer) -> Sampled:
    """Completions and rewards for up to `prompts` problems, one for each of the `uids` i64[len(rows), G] of each problem.

    Token t of a completion is drawn with `fold_in(k, t)`, k being its key of `generation.row_keys`.

    `generate(prompt_tokens, prompt_mask, keys) -> Completions` is called with exactly `prompts` rows: a short batch is
    filled up with its first prompt, whose extra completions, all with the uid -1, are dropped, so that no new shape compiles.
    Prompts are padded to the shortest of `prompt_buckets(prompt_tokens)` that holds them.
    """
    problems, group = [problem for problem, _ in rows], uids.shape[1]
    filled = [ids for _, ids in rows] + [rows[0][1]] * (prompts - len(rows))
    length = next(b for b in prompt_buckets(prompt_tokens) if b >= max(map(len, filled)))
    batch = pad(filled, [p.id for p in problems] + [-1] * (prompts - len(rows)), length)
    with timer("rollout"):
        keys = row_keys(key, np.pad(uids, ((0, prompts - len(rows)), (0, 0)), constant_values=-1))
        completions = parallel.fetch(generate(batch.tokens, batch.mask, keys))
        completions = completions.replace(decode_steps=np.sum(completions.decode_steps))  # of shards that stop by themselves
    real = lambda x: x[:len(rows)] if np.ndim(x) else x  # noqa: E731
    completions, batch = jax.tree.map(real, completions), jax.tree.map(real, batch)
    with timer("reward"):
        completions, texts = decode(completions, tokenizer, stop_strings)
        repeated = [problem for problem in problems for _ in range(group)]
        lengths = completions.mask.sum(-1).reshape(-1)
        scores = shared_scores(reward, texts, repeated, lengths)
        extract = reward.rewards[0].extract
    return Sampled(problems, batch, completions, texts, scores, uids, extract and [extract(text) for text in texts])


def shared_scores(reward: Combined, texts: Sequence[str], problems: Sequence[Problem], lengths: np.ndarray) -> Scores:
    """The scores of these rows. Of several processes each scores its share, and all get the whole.

    Where a reward sees the whole batch at once the first scores all of it.
    """
    def score(rows):
        if not len(rows):
            names = tuple(part.name for part in reward.rewards)
            return Scores(np.zeros(0, np.float32), np.zeros((0, len(names)), np.float32), names, {})
        chosen = [problems[i] for i in rows]
        return reward([texts[i] for i in rows], [p.answer for p in chosen], chosen, lengths[rows])

    if not parallel.several():
        return score(np.arange(len(texts)))
    count, everything = jax.process_count(), np.arange(len(texts))
    by_row = all(part.by_row for part in reward.rewards)
    shares = np.array_split(everything, count) if by_row else [everything] + [everything[:0]] * (count - 1)
    mine = score(shares[jax.process_index()])
    room = (0, len(shares[0]) - len(mine.total))  # the first share is among the longest
    real = np.concatenate([np.arange(len(shares[0])) < len(share) for share in shares])
    failures = total_failures(parallel.gather_objects({name: int(number) for name, number in mine.failures.items()}))
    total, components = np.pad(mine.total, room), np.pad(mine.components, (room, (0, 0)))
    return Scores(parallel.gather(total)[real], parallel.gather(components)[real], mine.names, failures)


def bucket_of(longest: int, max_tokens: int) -> int:
    """Smallest of a quarter, half, three quarters and all of `max_tokens` that holds `longest` tokens."""
    return next(b for b in buckets(max_tokens) if b >= longest)


def quarters_filled(mask: np.ndarray, prompts: int) -> int:
    """Smallest n of 1 to 4 such that of no `prompts` prompts more than n quarters of the slots `[prompts, G, T]` are filled.

    `mask bool[P, G, T]`. What holds for parts of so many prompts holds for all larger ones, in any order.
    """
    fullest = np.sort(through_last(mask).sum((1, 2)))[::-1][:prompts].sum()
    return max(1, int(-(-4 * fullest // (prompts * mask[0].size))))


def prompt_buckets(longest: int) -> list[int]:
    """The prompt lengths that a run compiles for: quarters of the longest, in multiples of 64."""
    return sorted({min(longest, -(-longest * quarter // 256) * 64) for quarter in (1, 2, 3, 4)})


def buckets(max_tokens: int) -> list[int]:
    """The completion lengths that the learner compiles for."""
    return sorted({-(-max_tokens * quarter // 4) for quarter in (1, 2, 3, 4)})


def answer_ids(answers: Sequence[Hashable | None], group: int) -> np.ndarray:
    """`i32[P, G]`: equal answers of a prompt have equal numbers, counted from 0 in order of appearance; None is -1."""
    ids = np.full((len(answers) // group, group), -1, np.int32)
    for p in range(ids.shape[0]):
        row = answers[p * group:(p + 1) * group]
        known = {answer: number for number, answer in enumerate(dict.fromkeys(a for a in row if a is not None))}
        ids[p] = [-1 if answer is None else known[answer] for answer in row]
    return ids


def filled(x: np.ndarray, prompts: int) -> np.ndarray:
    """`[P, ...]` with its first row repeated until there are `prompts`."""
    return np.concatenate([x, np.repeat(x[:1], prompts - len(x), axis=0)]) if prompts > len(x) else x


def to_rollouts(sampled: Sampled, max_tokens: int, prompts: int, version: int) -> Rollouts:
    """The batch as `Rollouts` of `prompts` rows (missing ones invalid), trimmed to the shortest length bucket that holds it.

    `extras`: `truncated` bool[P, G]; `correct` bool[P, G], first component above 0.5; `answers` i32[P, G], see
    `answer_ids`, where the first reward reads answers; `prior` f32[P] where it was asked for; `task` i32[P], 0: a run has one
    task; `current_version` i32[P], the version to be trained, which is also the one that sampled.
    """
    c, P = sampled.completions, len(sampled.problems)
    T = bucket_of(int(c.mask.sum(-1).max()), max_tokens)
    fill = lambda x: filled(x, prompts)  # noqa: E731
    cut = lambda x: fill(x[:, :, :T])  # noqa: E731
    group = c.mask.shape[1]
    valid = fill(sampled.drawn)
    valid[P:] = False
    mask, components = cut(c.mask), sampled.scores.components.reshape(P, group, -1)
    extras = {"truncated": fill(~c.stopped & sampled.drawn), "correct": fill(components[..., 0] > 0.5),
              "task": np.zeros(len(mask), np.int32), "current_version": np.full(len(mask), version, np.int32)}
    if sampled.answers is not None:
        extras["answers"] = fill(answer_ids(sampled.answers, group))
    if sampled.prior is not None:
        extras["prior"] = fill(sampled.prior["expected"])
    return Rollouts(
        mask=mask, valid=valid, rewards=fill(sampled.rewards.astype(np.float32)),
        reward_components=fill(components),
        tokens=cut(c.tokens), prompt_tokens=fill(sampled.prompts.tokens), prompt_mask=fill(sampled.prompts.mask),
        prompt_ids=fill(sampled.prompts.ids), behavior_logprobs=cut(c.logprobs), entropies=cut(c.entropies),
        policy_version=np.full(mask.shape, version, np.int32), extras=extras)


def select(sampled: Sampled, keep: np.ndarray) -> Sampled:
    """The prompts where `keep bool[P]` is True."""
    rows, group = np.flatnonzero(keep), sampled.completions.mask.shape[1]
    flat = (rows[:, None] * group + np.arange(group)).ravel().tolist()
    pick = lambda x: x[rows] if np.ndim(x) else x  # noqa: E731 (also of None)
    scores = sampled.scores._replace(total=sampled.scores.total[flat], components=sampled.scores.components[flat])
    return Sampled([sampled.problems[i] for i in rows.tolist()], jax.tree.map(pick, sampled.prompts),
                   jax.tree.map(pick, sampled.completions), [sampled.texts[i] for i in flat], scores, sampled.uids[rows],
                   sampled.answers and [sampled.answers[i] for i in flat], pick(sampled.valid),
                   jax.tree.map(pick, sampled.prior))


def join(*leaves):
    """The same leaf of successive batches as one: rows one after another, counts summed."""
    return np.concatenate(leaves) if np.ndim(leaves[0]) else sum(leaves)


def total_failures(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Failures of several batches of scores by name."""
    total: Counter = Counter()
    for found in counts:
        total.update(found)
    return dict(total)


def concatenate(parts: Sequence[Sampled]) -> Sampled:
    """Several batches as one; their groups have the same size."""
    failures = total_failures(part.scores.failures for part in parts)
    scores = Scores(np.concatenate([p.scores.total for p in parts]), np.concatenate([p.scores.components for p in parts]),
                    parts[0].scores.names, failures)
    widest = max(p.prompts.mask.shape[1] for p in parts)
    widen = lambda x: np.pad(x, ((0, 0), (0, widest - x.shape[1]))) if np.ndim(x) == 2 else x  # noqa: E731
    prompts = [jax.tree.map(widen, p.prompts) for p in parts]
    maybe = lambda name: None if getattr(parts[0], name) is None else np.concatenate([getattr(p, name) for p in parts])  # noqa: E731
    return Sampled([x for p in parts for x in p.problems], jax.tree.map(join, *prompts),
                   jax.tree.map(join, *[p.completions for p in parts]), [t for p in parts for t in p.texts], scores,
                   np.concatenate([p.uids for p in parts]),
                   None if parts[0].answers is None else [answer for p in parts for answer in p.answers],
                   maybe("valid"), jax.tree.map(lambda *x: np.concatenate(x), *[p.prior for p in parts]))


def metrics_of(sampled: Sampled) -> dict[str, float]:
    """What a batch of rollouts looks like: rewards, lengths, truncation, groups without a learning signal.

    `completion/tokens` counts all that were drawn. Where groups are unequal every prompt has the same weight in means of
    rewards, because prompts that are drawn most often are no fair sample; `groups/largest` is the size of the largest group.
    """
    rewards, drawn, weights = sampled.rewards, sampled.drawn, None
    if sampled.valid is not None:
        weights = drawn / drawn.sum(axis=1, keepdims=True)
    lengths = sampled.completions.mask.sum(-1)[drawn]
    lowest, highest = (pick(np.where(drawn, rewards, fill), axis=1) for pick, fill in ((np.min, np.inf), (np.max, -np.inf)))
    found = {
        "reward/mean": float(np.average(rewards, weights=weights)), "reward/std": float(rewards[drawn].std()),
        "completion/length": float(lengths.mean()), "completion/tokens": float(lengths.sum()),
        "completion/truncated": float(1 - sampled.completions.stopped[drawn].mean()),
        "groups/all_equal": float((lowest == highest).mean()),
    }
    if sampled.valid is not None:
        found["groups/largest"] = float(drawn.sum(axis=1).max())
    for k, name in enumerate(sampled.scores.names):
        component = sampled.scores.components[:, k].reshape(rewards.shape)
        found[f"reward/{name}"] = float(np.average(component, weights=weights))
    for name, count in sampled.scores.failures.items():
        found[f"reward_failures/{name}"] = float(count)
    return found
