"""Counts hints that give the answer away."""
from typing import Any

import numpy as np

from jaxrl_llm.data.forest import Forest, chains
from jaxrl_llm.data.rollouts import SAMPLED, Role
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.topologies.hints import tells


def hints() -> Stage:
    """The metric `guide/answer`: of the trajectories that go on behind a hint, the share whose hint contains the answer."""
    def end(batch: Unfinished, source: Origin) -> Unfinished:
        hinted = hints_of(batch.forest, source.stream.tokenizer) if batch.forest.problems else {}
        if not hinted:
            return batch
        problems, prompt = batch.forest.problems, batch.forest.prompt
        given = [gives_away(hint, problems[prompt[end]]) for end, hint in hinted.items()]
        return batch.measured({"guide/answer": float(np.mean(given))})

    return Stage("hints", end=end)


def hints_of(forest: Forest, tokenizer: Any) -> dict[int, str]:
    """The hint of each trajectory that the policy wrote with one, by its last node: what it begins with, or what it reads."""
    assert forest.reads is not None
    written = np.isin(forest.role, (Role.HINT, Role.EXPERT)) | np.array([ids is not None for ids in forest.reads], bool)
    if not written.any():
        return {}
    ends, found = forest.ends, dict[int, list[str]]()
    node, row = chains(forest, ends)
    drew = np.bincount(row, np.isin(forest.role[node], SAMPLED), minlength=len(ends)) > 0
    for one, end in zip(node.tolist(), ends[row].tolist()):
        if written[one]:
            ids = forest.tokens[forest.offset[one]:][:forest.length[one]].tolist()
            shown = ids if forest.reads[one] is None else forest.reads[one]
            found.setdefault(end, []).append(tokenizer.decode(shown, skip_special=False))
    return {end: "\n".join(found[end]) for end, own in zip(ends.tolist(), drew) if own and end in found}


def gives_away(hint: str, problem: Problem) -> bool:
    """Whether the hint has the answer as a word, and the prompt does not."""
    asked = problem.prompt if isinstance(problem.prompt, str) else "\n".join(str(one["content"]) for one in problem.prompt)
    return tells(problem, hint) and not tells(problem, asked)
