"""Groups from a pool in a batch: read as tokens, scored by the run's own reward, replacing some of its prompts."""
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.engines.prompts import encode_problem, spelled
from jaxrl_llm.replay.pool import Group, Pool
from jaxrl_llm.rewards import Scores
from jaxrl_llm.sampling.scoring import shared_scores
from jaxrl_llm.sampling.stream import Stream
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.traces import Trace


class Foreign(NamedTuple):
    """A group of another `node`: `prompt`, token ids; `tokens` of each completion; `whole`, whether each is uncut; `scores`."""

    problem: Problem
    prompt: list[int]
    texts: tuple[str, ...]
    tokens: list[list[int]]
    whole: list[bool]
    scores: Scores
    node: str


@dataclasses.dataclass(frozen=True)
class Sharing:
    """`pool`: the pool of shared groups. `groups`: J, the maximum number of groups that replace prompts of a batch."""

    pool: Pool
    groups: int

    def take(self, stream: Stream, problems: Sequence[Problem], first_uid: int, rng: np.random.Generator
             ) -> tuple[Forest, dict[str, float]]:
        """`(forest, metrics)`: up to J foreign groups whose rewards differ, drawn uniformly, with uids from `first_uid` on.

        Longer texts are cut at T tokens and keep the reward of the whole. Groups are scored in random order until J are
        accepted. Their tokens have the role of an expert, the name of their node, unknown log-probs and the version -1:
        this run did not sample them. Metrics count rejected groups by reason.
        """
        pooled, left = self.pool.read(stream.group)
        kept: list[Foreign] = []
        unused = 0
        for number in rng.permutation(len(pooled)).tolist():
            if len(kept) == self.groups:
                break
            one = _read(stream, pooled[number], problems[pooled[number].problem])
            if len(one.prompt) > stream.prompt_tokens or np.ptp(one.scores.total) == 0:
                unused += 1
            else:
                kept.append(one)
        forest = stream.partner.plant([one.problem for one in kept], [one.prompt for one in kept], draw=0)
        for row, one in enumerate(kept):
            forest = _grown(stream, forest, row, one, first_uid + row * stream.group)
        metrics = {"pool/groups": float(len(kept)), "pool/read": float(len(pooled)), "pool/unused": float(unused)}
        return forest, metrics | {f"pool/left_{name}": float(count) for name, count in left.items()}

    def publish(self, forest: Forest, step: int) -> None:
        """Shares the groups of a batch that this run sampled and whose rewards differ."""
        ends, groups = forest.ends, []
        for row, problem in enumerate(forest.problems):
            mine = ends[forest.prompt[ends] == row]
            if len(mine) and np.ptp(forest.rewards[mine]) > 0:
                groups.append((problem, forest.texts[mine].tolist()))
        self.pool.publish(step, groups)


def _read(stream: Stream, group: Group, problem: Problem) -> Foreign:
    """The group as this run reads and scores it."""
    assert stream.sampling.max_tokens is not None
    most = int(stream.sampling.max_tokens)
    written = [spelled(Trace(text), problem, stream.tokenizer).ids for text in group.completions]
    tokens = [ids[:most] for ids in written]
    scores = shared_scores(stream.partner.reward, group.completions, [problem] * len(tokens),
                           np.array([len(ids) for ids in tokens]))
    return Foreign(problem, encode_problem(problem, stream.tokenizer), group.completions, tokens,
                   [len(ids) <= most for ids in written], scores, group.node)


def _grown(stream: Stream, forest: Forest, row: int, one: Foreign, first_uid: int) -> Forest:
    """The forest with the completions of a foreign group after its prompt `row`."""
    size, unknown = len(one.tokens), np.full(sum(map(len, one.tokens)), np.nan)
    root = int(np.flatnonzero(forest.role == Role.PROMPT)[row])
    return forests.grow(
        forest, [root] * size, [first_uid + i for i in range(size)], dict(
            role=Role.EXPERT, writer=one.node, length=[len(ids) for ids in one.tokens], stopped=one.whole,
            rewards=one.scores.total, components=one.scores.components, texts=list(one.texts),
            answers=[stream.partner.reward.extract(text, one.problem) for text in one.texts],
            tokens=[token for ids in one.tokens for token in ids], logprobs=unknown, entropies=unknown,
            version=np.full(len(unknown), -1)), failures=one.scores.failures)
