"""Given texts as a forest: a prompt, and behind it a chain of nodes for each text."""
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.columns import Column
from jaxrl_llm.data.forest import Forest, grow, plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.data.texts import Text
from jaxrl_llm.tasks.base import Problem

TEXTS = "texts"  # the entry of `Problem.extra` with the texts of a group: one, or the chosen and the rejected one of a pair
WEIGHT = Column("weight", "node", np.float32, fill=1.0, to="extras")
CHOSEN = Column("chosen", "node", bool, to="extras")


def planted(problems: Sequence[Problem], groups: Sequence[Sequence[Text]],
            spell: Callable[[Sequence[Sequence[int]]], list[str]], *, first_uid: int = 0, version: int = 0, draw: int = 0
            ) -> Forest:
    """The forest of these problems, each with the texts of its group, which begin with the same prompt.

    Of two texts the first is the chosen one, of reward 1, and the other has reward 0. The other arguments are those of `grown`.
    """
    pairs = bool(groups) and len(groups[0]) == 2
    forest = plant(problems, prompts_of(groups), ("chosen" if pairs else "given",), answers=False, draw=draw,
                   columns=(WEIGHT, CHOSEN))
    return grown(forest, groups, spell, first_uid=first_uid, apart=len(groups[0]) if groups else 1, version=version)


def prompts_of(groups: Sequence[Sequence[Text]]) -> list[list[int]]:
    """The token ids of the prompt of each group."""
    return [group[0].ids[:group[0].prompt].tolist() for group in groups]


def grown(forest: Forest, groups: Sequence[Sequence[Text]], spell: Callable[[Sequence[Sequence[int]]], list[str]], *,
          first_uid: int, apart: int, version: int) -> Forest:
    """The forest of prompts alone with the texts of each prompt's group behind it.

    Trained tokens have the role of an expert, others behind the prompt that of an environment. Unknown log-probs are NaN, and
    so are entropies; columns that say nothing of texts have their fill.

    Args:
      groups: of equal sizes, 1 or 2.  spell: texts of rows of token ids.
      first_uid: of the first text of the first prompt; that of the next prompt is larger by `apart`.
      version: of the tokens, the weights that learn from them first.
    """
    pairs, nodes = bool(groups) and len(groups[0]) == 2, list[dict[str, Any]]()
    for p, group in enumerate(groups):
        for g, text in enumerate(group):
            uid, parent = first_uid + p * apart + g, p
            for start, end in runs(text):
                nodes.append({"uid": uid, "parent": parent, "prompt": p, "start": start, "end": end, "text": text,
                              "reward": float(pairs and g == 0), "chosen": pairs and g == 0})
                parent = len(groups) + len(nodes) - 1
    return _grown(forest, nodes, spell, version)


def _grown(forest: Forest, nodes: list[dict[str, Any]], spell: Callable, version: int) -> Forest:
    """The forest with these nodes."""
    def of(name: str) -> list[Any]:
        return [node[name] for node in nodes]

    def part(node: dict[str, Any], values: np.ndarray) -> np.ndarray:
        return np.asarray(values)[node["start"]:node["end"]]

    ids, rewards = [part(node, node["text"].ids) for node in nodes], np.asarray(of("reward"), np.float32)
    logprobs = [np.full(len(own), np.nan, np.float32) if node["text"].logprobs is None else part(node, node["text"].logprobs)
                for node, own in zip(nodes, ids)]
    trained = [bool(node["text"].trained[node["start"]]) for node in nodes]
    tokens = np.concatenate([*ids, np.zeros(0, np.int32)])
    counts = {"node": len(nodes), "token": len(tokens)}
    other = {column.name: column.filled(counts[column.of]) for column in forest.of("node", "token")}
    return grow(forest, of("parent"), of("uid"), other | {
        "prompt": of("prompt"), "role": np.where(trained, Role.EXPERT, Role.ENVIRONMENT), "length": list(map(len, ids)),
        "stopped": np.ones(len(nodes), bool), "rewards": rewards,
        "components": np.repeat(rewards[:, None], len(forest.names), axis=1), "texts": spell([own.tolist() for own in ids]),
        "writer": [node["text"].writer if own else "" for node, own in zip(nodes, trained)],
        "weight": [node["text"].weight for node in nodes],
        "chosen": of("chosen"), "tokens": tokens, "logprobs": np.concatenate([*logprobs, np.zeros(0, np.float32)]),
        "entropies": np.full(len(tokens), np.nan), "version": np.full(len(tokens), version)})


def runs(text: Text) -> Iterator[tuple[int, int]]:
    """`(start, end)` of the stretches of tokens behind the prompt that are all trained, or none of them."""
    edges = np.flatnonzero(np.diff(text.trained[text.prompt:])) + text.prompt + 1
    bounds = [text.prompt, *edges.tolist(), len(text.ids)]
    return ((start, end) for start, end in zip(bounds, bounds[1:]) if end > start)


def turns_of(text: Text) -> int:
    """The number of stretches of trained tokens of a text."""
    return sum(bool(text.trained[start]) for start, _ in runs(text))
