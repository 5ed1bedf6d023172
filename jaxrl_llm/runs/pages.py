"""Pages of samples: the texts of a batch, with the numbers of every token."""
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.data.forest import Forest, chains, contexts, paths
from jaxrl_llm.data.rollouts import TRAINED, Role
from jaxrl_llm.learning.learner import Learned, Learner
from jaxrl_llm.runs.samples import per_token, write_samples
from jaxrl_llm.sampling.source import Source


def write_page(path: Path, step: int, source: Source, forest: Forest, numbers: Mapping[str, np.ndarray]) -> None:
    """Writes samples of a batch as text and JSON lines, with the sampler's and further `numbers` f32[P, G, T] per token."""
    if not parallel.is_primary() or not forest.problems:
        return
    ends, names = forest.leaves, forest.names
    which, last = forest.finals
    results = ends[last[which]]
    group = int(np.bincount(forest.prompt[ends]).max())
    view = paths if source.stream.contexts == 1 else contexts
    seen = view(forest, source.stream.turns, group=group, prompts=len(forest.problems), tokens=lambda longest: longest,
                prompt_tokens=lambda longest: longest, version=0)
    owner = forest.prompt[ends]
    place = np.arange(len(ends)) - np.searchsorted(owner, owner)

    def of_rows(x):
        return np.asarray(x)[owner, place]

    measured: dict[str, Any] = {"logprobs": seen.behavior_logprobs, "entropies": seen.entropies, **numbers}
    own = of_rows(seen.mask if seen.role is None else seen.role == Role.POLICY)
    spelled = {name: rows for name, rows in ((name, of_rows(x)) for name, x in measured.items())
               if not np.isnan(rows[:, :own.shape[1]][own]).any()}  # servers may measure none
    spell = functools.partial(source.stream.tokenizer.decode_batch, skip_special=False)
    lengths = of_rows(seen.present).sum(-1).tolist()
    tokens = per_token(of_rows(seen.tokens), of_rows(seen.mask), lengths, spell, spelled)
    entries: list[dict[str, Any]] = [
        {"solved": solved, **entry} for solved, entry in zip(forest.solved[results].tolist(), tokens)]
    texts = forest.texts[ends].tolist()
    if forest.turn_rewards is not None:
        spoken = conversations(forest, ends)
        texts = ["\n".join(f"[{message['role']}]\n{message['content']}" for message in messages) for messages in spoken]
        entries = [{"messages": messages, **entry} for messages, entry in zip(spoken, entries)]
    columns: tuple[Any, ...] = (
        texts, forest.rewards[results].tolist(),
        [{name: float(x) for name, x in zip(names, row) if not np.isnan(x)} for row in forest.components[results]], lengths,
        np.where(forest.stopped[results], "stop", "length").tolist(), entries)
    starts = np.searchsorted(owner, np.arange(len(forest.problems) + 1))
    grouped: list[Any] = [[column[a:b] for a, b in zip(starts, starts[1:])] for column in columns]
    prompts = spell([forest.prompt_ids(p) for p in range(len(forest.problems))])
    write_samples(path, step, prompts, [p.answer for p in forest.problems], *grouped)


def conversations(forest: Forest, ends: np.ndarray) -> list[list[dict[str, Any]]]:
    """The messages after the prompt of each trajectory: the policy's are the assistant's, all others the user's.

    The environment's reward for a turn is the `reward` of the policy's message.
    """
    messages: list[list[dict[str, Any]]] = [[] for _ in ends]
    said = forest.messages
    for node, row in zip(*(x.tolist() for x in chains(forest, ends))):
        own = said[node]
        if forest.role[node] in TRAINED and not own:
            continue  # the beginning of a message, whose text is that of its last node
        message = {"role": "assistant" if own else "user", "content": forest.texts[node]}
        if own and forest.turn_rewards is not None:
            message["reward"] = float(forest.turn_rewards[node])
        messages[row].append(message)
    return messages


def lessons(source: Source, learner: Learner, learned: Learned) -> dict[str, np.ndarray]:
    """Numbers per token of a batch after its updates, for a page: advantages and ratios of probabilities."""
    batch, before = learned.rollouts, None
    if batch is None or source.most != source.stream.group:  # rows of unequal groups are no longer in the order of sampling
        return {}
    s, before = source.stream.sampling, batch.old_logprobs
    if before is None and s.temperature > 0 and s.top_k is None and s.top_p is None and s.min_p is None:
        before = batch.behavior_logprobs  # the sampler's, which drew from the same distribution
    if before is None:
        return parallel.fetch({"advantages": learned.advantages})
    return parallel.fetch({"advantages": learned.advantages, "ratios": learner.ratios(learned.state, batch, before)})
