"""Groups from a pool in a batch: read as tokens, scored by the run's own reward, and in the place of some of its prompts."""
import dataclasses

import numpy as np

from jaxrl_llm import forest as forests
from jaxrl_llm.forest import Forest
from jaxrl_llm.generation.prompts import encode_problems
from jaxrl_llm.replay.pool import Group, Pool
from jaxrl_llm.rollouts import Role
from jaxrl_llm.training.groups import Sampler
from jaxrl_llm.training.scoring import shared_scores


@dataclasses.dataclass(frozen=True)
class Sharing:
    """`pool`: where groups are shared. `groups`: J, at most, that take the place of prompts of a batch."""

    pool: Pool
    groups: int

    def take(self, sampler: Sampler, problems, first_uid: int, rng: np.random.Generator) -> tuple[Forest, dict[str, float]]:
        """`(forest, metrics)`: up to J foreign groups whose rewards differ, drawn uniformly, with uids from `first_uid` on.

        Longer texts are cut at T tokens and keep the reward of the whole. Groups are scored in random order until J are
        found. The version of their tokens is -1: nobody of this run sampled them. Metrics count what was left and why.
        """
        found, left = self.pool.read(sampler.group)
        kept: list[tuple[Group, list[list[int]], object]] = []
        unused = 0
        for number in rng.permutation(len(found)).tolist():
            if len(kept) == self.groups:
                break
            one = found[number]
            problem = problems[one.problem]
            prompt = encode_problems([problem], sampler.tokenizer)[0]
            scores = shared_scores(sampler.reward, one.completions, [problem] * sampler.group,
                                   np.array([len(text) for text in one.completions]))
            if len(prompt) > sampler.prompt_tokens or np.ptp(scores.total) == 0:
                unused += 1
                continue
            kept.append((one, [prompt], scores))
        forest = sampler.plant([problems[one.problem] for one, _, _ in kept], [prompt[0] for _, prompt, _ in kept], draw=0)
        for row, (one, _, scores) in enumerate(kept):
            forest = _grown(sampler, forest, row, one, scores, first_uid + row * sampler.group)
        metrics = {"pool/groups": float(len(kept)), "pool/found": float(len(found)), "pool/unused": float(unused)}
        return forest, metrics | {f"pool/left_{name}": float(count) for name, count in left.items()}

    def publish(self, forest: Forest, step: int) -> None:
        """Shares the groups of a batch that this run sampled and whose rewards differ."""
        ends, groups = forest.ends, []
        for row, problem in enumerate(forest.problems):
            mine = ends[forest.prompt[ends] == row]
            if len(mine) and np.ptp(forest.rewards[mine]) > 0:
                groups.append((problem, forest.texts[mine].tolist()))
        self.pool.publish(step, groups)


def _grown(sampler: Sampler, forest: Forest, row: int, one: Group, scores, first_uid: int) -> Forest:
    """The forest with the completions of a foreign group after its prompt `row`."""
    assert sampler.sampling.max_tokens is not None
    most, size = int(sampler.sampling.max_tokens), len(one.completions)
    whole = [[*sampler.tokenizer.encode(text), sampler.tokenizer.eos_id] for text in one.completions]
    tokens = [ids[:most] for ids in whole]
    count = sum(map(len, tokens))
    root = int(np.flatnonzero(forest.role == Role.PROMPT)[row])
    return forests.grow(
        forest, [root] * size, [first_uid + i for i in range(size)], role=Role.POLICY, length=[len(ids) for ids in tokens],
        stopped=[len(ids) <= most for ids in whole], rewards=scores.total, components=scores.components,
        texts=list(one.completions), answers=[sampler.reward.extract(text, forest.problems[row]) for text in one.completions],
        tokens=[token for ids in tokens for token in ids], logprobs=np.zeros(count), entropies=np.zeros(count),
        version=np.full(count, -1), failures=scores.failures)
