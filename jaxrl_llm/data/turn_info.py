"""Facts that an environment reports about turns (`Turn.info`), as entries of the extras of trajectories."""
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.tools.registry import one_of

JOINS = {
    "count": "i32[P, G], the sum over the turns of a trajectory",
    "any": "bool[P, G], whether it holds for a turn",
    "once": "i32[P, G], that of the first turn",
    "turn": "i32[P, G, K], -1 where there is no turn",
    "tokens": "bool[P, G, T], the tokens of the turns for which it holds",
    "score": "f32[P, G, T], on the last token of each turn",
    "last": "bool[P, G, T], the last tokens of the turns for which it holds",
    "list": "f32[P, G, L], the L numbers of the last turn",
    "spans": "i32[P, G, T], numbers of parts of the text, given as (start, end, number) in characters; -1 elsewhere",
}
AGENT, GAME, RETURNS, AGENT_RETURNS = "agent", "game", "returns", "agent_returns"
SETTLED = "settled"  # False for trajectories that are games, and ended without `returns`
STEP = "step"  # a fact of environments that number the turns of a trajectory themselves, whatever its contexts
STATE, ACTION = "state", "action"  # identities of a turn that replace its texts, see `environments.base.Turn`
EOS = "eos"  # whether the policy ended the turn by a stop token, as the sampler reports


class Joined(NamedTuple):
    """Entries of extras by name: `rows` [R, ...] for trajectories, `tokens` [M] for all tokens of a forest."""

    rows: dict[str, np.ndarray]
    tokens: dict[str, np.ndarray]


def check(facts: Mapping[str, str], info: Mapping[str, Any]) -> None:
    """Raises ValueError if the `info` of a turn lacks one of the facts, or holds a value that does not fit its join."""
    for name, join in facts.items():
        value, wanted = info.get(name), "a number or a boolean"
        fits = isinstance(value, (bool, int, float)) or name == EOS
        if join == "list":
            wanted, fits = "a list of numbers", isinstance(value, list) and all(isinstance(x, (int, float)) for x in value)
        elif join == "spans":
            wanted = "a list of (start, end, number)"
            fits = isinstance(value, list) and all(
                isinstance(span, list) and len(span) == 3 and all(isinstance(x, int) for x in span) for span in value)
        if not fits:
            raise ValueError(f"info has {name}={value!r}; the environment declares the fact {name!r}, {wanted} of every turn")


def of_tokens(facts: Mapping[str, str], info: Mapping[str, Any], starts: Sequence[int], ended: bool) -> dict[str, Any]:
    """The facts of a turn whose tokens begin at these places of its text; `ended` says whether by a stop token.

    Spans of characters become a number for each token: the number of the last span that contains the token's beginning.
    """
    values = {**info, **({EOS: ended} if EOS in facts else {})}
    for name in (name for name, join in facts.items() if join == "spans"):
        numbers = np.full(len(starts), -1)
        for start, end, number in info[name]:
            numbers[(np.asarray(starts) >= start) & (np.asarray(starts) < end)] = number
        values[name] = numbers.tolist()
    return values


def check_joins(facts: Mapping[str, str]) -> None:
    """Raises ValueError for a join that does not exist, and if `agent` is not joined by turn."""
    for name, join in facts.items():
        one_of(f"join of the fact {name!r}", join, JOINS)
    if facts.get(AGENT, "turn") != "turn":
        raise ValueError(f"the fact {AGENT!r} is joined by {facts[AGENT]!r}; it belongs to a turn: 'turn'")


def joined(facts: Mapping[str, str], info: np.ndarray, node: np.ndarray, row: np.ndarray, rows: int, turns: int,
           length: np.ndarray, rewards: np.ndarray, ends: np.ndarray | None = None) -> Joined:
    """The facts of `rows` trajectories with at most `turns` turns.

    Args:
      facts: name -> join, see `JOINS`.
      info: object[N], the facts of each node, by name; read for the nodes in `node`.
      node, row: i32[E], the turns of the policy in their order, and the trajectory of each, in ascending order.
      length: i32[N], tokens of each node.  rewards: f32[R], rewards of the trajectories.
      ends: i32[R], the last turn of each trajectory, for rows that are contexts; None: the last turn of the row.

    If `agent` is a fact, there are `agent_returns` f32[R, K] beside it, the return of each turn's agent, from the list
    `returns` in the info of the last turn, or the reward of the trajectory if that has no such list; and `settled` bool[R],
    whether they are the outcome: False for a `game` without such a list, which was cut before its end.
    """
    columns, tokens = dict[str, np.ndarray](), dict[str, np.ndarray]()
    step = np.arange(len(row)) - np.searchsorted(row, row)
    for name, join in facts.items():
        if join == "list":
            columns[name] = _lists(name, info, node, row, rows)
            continue
        if join == "spans":
            tokens[name] = _numbers(name, info, node, length)
            continue
        values = np.array([info[one].get(name, 0) for one in node.tolist()], np.float64)
        if join == "count":
            columns[name] = np.bincount(row, values, minlength=rows).astype(np.int32)
        elif join == "any":
            columns[name] = np.bincount(row, values != 0, minlength=rows) > 0
        elif join == "once":
            columns[name] = np.bincount(row, values * (step == 0), minlength=rows).astype(np.int32)
        elif join == "turn":
            columns[name] = np.full((rows, turns), -1, np.int32)
            columns[name][row, step] = values
        else:
            tokens[name] = _of_tokens(join, values, node, length)
    if AGENT in facts:
        columns[AGENT_RETURNS], given = _agent_returns(info, node, row, columns[AGENT], rewards, ends)
        columns[SETTLED] = given if GAME in facts else np.ones(rows, bool)
    return Joined(columns, tokens)


def _of_tokens(join: str, values: np.ndarray, node: np.ndarray, length: np.ndarray) -> np.ndarray:
    by_node = np.zeros(len(length))
    by_node[node] = values
    if join == "tokens":
        return np.repeat(by_node != 0, length)
    out, last = np.zeros(length.sum(), np.float32), np.cumsum(length) - 1
    out[last[length > 0]] = by_node[length > 0]
    return out if join == "score" else out != 0


def _lists(name: str, info: np.ndarray, node: np.ndarray, row: np.ndarray, rows: int) -> np.ndarray:
    """f32[R, L], the list of each row's last turn. Raises ValueError for lists of different lengths."""
    lists = {line: info[one][name] for one, line in zip(node.tolist(), row.tolist())}
    if len(lengths := {len(values) for values in lists.values()}) > 1:
        raise ValueError(f"the lists {name!r} of an environment have the lengths {sorted(lengths)}; give all the same one")
    array = np.zeros((rows, max(lengths, default=1)), np.float32)
    for line, values in lists.items():
        array[line] = values
    return array


def _numbers(name: str, info: np.ndarray, node: np.ndarray, length: np.ndarray) -> np.ndarray:
    """i32[M], the number of each token; -1 in other nodes. A turn may have begun in the nodes before the one with its facts."""
    numbers, end = np.full(length.sum(), -1, np.int32), np.cumsum(length)
    for one in node.tolist():
        numbers[end[one] - len(info[one][name]):end[one]] = info[one][name]
    return numbers


def _agent_returns(info, node, row, agent: np.ndarray, rewards: np.ndarray, ends: np.ndarray | None
                   ) -> tuple[np.ndarray, np.ndarray]:
    """`(returns f32[R, K], given bool[R])`; the latter: whether the last turn has `returns`."""
    by_agent, given = np.where(agent >= 0, rewards[:, None], 0).astype(np.float32), np.zeros(len(agent), bool)
    last = np.append(row[1:] != row[:-1], True) if len(row) else np.zeros(0, bool)
    own = node[last] if ends is None else ends[row[last]]
    for one, line in zip(own.tolist(), row[last].tolist()):
        if (returns := info[one].get(RETURNS)) is not None:
            by_agent[line] = np.where(agent[line] >= 0, np.asarray(returns, np.float32)[agent[line]], 0)
            given[line] = True
    return by_agent, given


def identity(info: Mapping[str, Any], name: str) -> tuple[str, str] | None:
    """The `state` or `action` of a turn, hashable and apart from texts: equal values are equal; None if the info has none."""
    return None if info.get(name) is None else (name, json.dumps(info[name], sort_keys=True))
