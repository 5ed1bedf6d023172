"""Sampled trajectories as columns on the host, and the views of them that estimators credit.

A node is a run of tokens with one author. The prompts are roots; tokens sampled or inserted after a node are its child. Nodes
of one trajectory share its `uid`; a fork gets a new one. Axes beside those of `rollouts`: `N` nodes, `M` tokens of all nodes.
"""
import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data import turn_info as turn_infos
from jaxrl_llm.data.columns import ANSWERS, NODES, PROMPTS, TOKENS, TURNS, Column, check_given, declared
from jaxrl_llm.data.rollouts import SAMPLED, TRAINED, Role, Rollouts
from jaxrl_llm.tasks.base import Problem


def _column(name: str) -> property:
    return property(lambda forest: forest.columns.get(name))


@dataclasses.dataclass(frozen=True)
class Forest:
    """The nodes of a batch.

    Attributes:
      problems: [P], the problems.  facts: facts about each by name, [P, ...].
      columns: the columns by name, each of which is also an attribute; None where the forest does not keep it.
      declared: their declarations, see `columns`.
      solved_above: threshold of the first component above which a problem counts as solved, for each task, or one for all.
      names: names of the K parts of the reward.
      computed: tokens that an engine computed.  failures: failures of rewards, by name.
      invalid: number of trajectories and openings that an environment lost, by name of the failure.
      seconds: the duration of each call of an environment.

    Columns of prompts:
      draw: i32[P], when it was drawn.  lost: i32[P], trajectories of each that an environment lost, and that are not in the
        forest.

    Columns of nodes:
      uid: i64[N], the trajectory.  parent: i32[N], the node before, -1 for a prompt.  prompt: i32[N], its index in `problems`.
      role: i8[N], see `Role`.  length: i32[N], tokens.  stopped: bool[N], ended by itself (False: cut at a limit).
      rewards, components: f32[N], f32[N, K], of trajectories that end here, with the `names` of the K parts; NaN for a part
        that the task of the problem does not have.
      texts: object[N], without the stop token or stop string.  answers: object[N], the answer that the first reward reads
        in a text (None: nothing); None if that reward reads no answers.
      turn_rewards: f32[N], an environment's reward for each node of the policy; None without an environment.
      turn_info: object[N], the environment's facts about each of them, by name, see `turn_info.joined`; None without one.
      reads: object[N], token ids that the writer read in place of the prompt; None: the prompt.
      writer: object[N], the name of the expert, teacher or model that wrote it; "": the policy, or a writer without a name.

    Columns of tokens:
      tokens, logprobs, entropies, version: i32[M], f32[M], f32[M], i32[M], the tokens of the nodes one after another, with the
        sampler's log-probs and entropies (nats) and the version of the weights that they were sampled with. Of what a
        completion begins with, entropies are NaN, and so are log-probs that are unknown.
    """

    problems: tuple[Problem, ...]
    facts: Mapping[str, np.ndarray]
    columns: Mapping[str, np.ndarray]
    declared: tuple[Column, ...]
    names: tuple[str, ...] = ()
    solved_above: tuple[float, ...] = (0.5,)
    computed: int = 0
    failures: Mapping[str, int] = dataclasses.field(default_factory=dict)
    invalid: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seconds: tuple[float, ...] = ()

    draw, lost = map(_column, ("draw", "lost"))
    uid, parent, prompt, role, length, stopped = map(_column, ("uid", "parent", "prompt", "role", "length", "stopped"))
    rewards, components, texts, answers = map(_column, ("rewards", "components", "texts", "answers"))
    turn_rewards, turn_info, reads, writer = map(_column, ("turn_rewards", "turn_info", "reads", "writer"))
    tokens, logprobs, entropies, version = map(_column, ("tokens", "logprobs", "entropies", "version"))

    def of(self, *kinds: str) -> tuple[Column, ...]:
        """The declarations of columns of nodes, tokens or prompts."""
        return tuple(column for column in self.declared if column.of in kinds)

    def with_columns(self, **columns: np.ndarray) -> "Forest":
        """The forest with other values in these columns."""
        return dataclasses.replace(self, columns={**self.columns, **columns})

    @property
    def solved(self) -> np.ndarray:
        """bool[N], trajectories that end here and solve their problem by the first reward's own criterion."""
        return self.components[:, 0] > np.take(self.solved_above, self.task[self.prompt], mode="clip")  # one may be all tasks'

    @property
    def task(self) -> np.ndarray:
        """i32[P], the number of each problem's task."""
        return np.array([problem.task for problem in self.problems], np.int32)

    @property
    def offset(self) -> np.ndarray:
        """i64[N], index of the first token of each node."""
        return np.cumsum(self.length, dtype=np.int64) - self.length

    @property
    def leaves(self) -> np.ndarray:
        """i32[C], the last nodes of all contexts, by prompt, and within a prompt in the order of sampling.

        A trajectory has one context, unless an environment restarted it from the prompt.
        """
        last = np.ones(len(self.uid), bool)
        last[self.parent[self.parent >= 0]] = False
        leaves = np.flatnonzero(last & (self.role != Role.PROMPT))
        return leaves[np.argsort(self.prompt[leaves], kind="stable")]

    @property
    def ends(self) -> np.ndarray:
        """i32[R], the last nodes of all trajectories, in the order of `leaves`."""
        return self.leaves[self.finals[1]]

    @property
    def aided(self) -> np.ndarray:
        """bool[R], trajectories partly written by an expert, or under another text, in the order of `ends`."""
        node, row = chains(self, self.leaves)
        which, last = self.finals
        return np.bincount(which[row], np.isin(self.role[node], (Role.EXPERT, Role.ELSEWHERE)), minlength=len(last)) > 0

    @property
    def messages(self) -> np.ndarray:
        """bool[N], the last nodes of turns that the policy or an expert wrote, each in part at least.

        A turn goes on with the words of an expert or of a hint, and with those of the policy behind another author's.
        """
        spoken, sampled = np.isin(self.role, TRAINED), np.isin(self.role, SAMPLED)
        inside = np.isin(self.role, (Role.EXPERT, Role.HINT)) | (sampled & (self.role != self.role[self.parent]))
        return spoken & ~np.isin(np.arange(len(spoken)), self.parent[inside])

    @property
    def finals(self) -> tuple[np.ndarray, np.ndarray]:
        """`(trajectory i64[C], last i64[R])`: the trajectory of each of `leaves`, and the index of each trajectory's end."""
        leaves = self.leaves
        keys = np.stack([self.prompt[leaves].astype(np.int64), self.uid[leaves]])[:, ::-1]
        _, last, which = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        last = len(leaves) - 1 - last
        order = np.argsort(last, kind="stable")
        return np.argsort(order, kind="stable")[which.reshape(-1)[::-1]], last[order]

    def prompt_ids(self, row: int) -> np.ndarray:
        """i32[S], the tokens of a prompt."""
        node = np.flatnonzero((self.prompt == row) & (self.role == Role.PROMPT))[0]
        return self.tokens[self.offset[node]:][:self.length[node]]

    def with_facts(self, facts: Mapping[str, np.ndarray]) -> "Forest":
        """The forest with these facts of its prompts."""
        return dataclasses.replace(self, facts=facts)


def objects(values: Sequence[Any]) -> np.ndarray:
    """object[N]"""
    objects = np.empty(len(values), object)
    objects[:] = values
    return objects


def plant(problems: Sequence[Problem], ids: Sequence[Sequence[int]], names: Sequence[str], *, answers: bool,
          turns: bool = False, draw: int = 0, solved_above: Sequence[float] = (0.5,), columns: Sequence[Column] = ()) -> Forest:
    """A forest of prompts alone: problems with their token ids, names of the reward's parts, and thresholds for solved.

    `answers`, `turns`: whether it has the columns of answers and of rewards of turns.  `columns`: further ones.
    Raises ValueError if two columns have one name.
    """
    parts = Column("components", "node", np.float32, (len(names),))
    known = declared((*PROMPTS, *NODES, parts, *TOKENS, *([ANSWERS] if answers else ()), *(TURNS if turns else ()), *columns))
    P, length = len(problems), np.array([len(row) for row in ids], np.int32)
    given = {"draw": np.full(P, draw), "prompt": np.arange(P), "role": np.full(P, Role.PROMPT), "length": length,
             "tokens": [i for row in ids for i in row]}
    counts = {"prompt": P, "node": P, "token": int(length.sum())}
    values = {column.name: column.array(given[column.name], counts[column.of]) if column.name in given
              else column.filled(counts[column.of]) for column in known}
    return Forest(tuple(problems), {}, values, known, names=tuple(names), solved_above=tuple(solved_above))


def grow(forest: Forest, parent, uid, columns: Mapping[str, Any], *, computed: int = 0,
         failures: Mapping[str, int] | None = None, invalid: Mapping[str, int] | None = None,
         seconds: Sequence[float] = ()) -> Forest:
    """The forest with further nodes, `parent i32[n]` being nodes of it, and all `columns` of nodes and tokens that it keeps.

    If some parents are among the new nodes, which are numbered after those of the forest, `prompt i32[n]` must be given.
    `role` and `writer` may be one for all. Without `reads` all writers read the prompt, and without `writer` none has a name.
    Raises ValueError for a column that is missing or has the wrong shape.
    """
    parent = np.asarray(parent, np.int32)
    given = {"prompt": forest.prompt[parent] if "prompt" not in columns else None, "reads": [None] * len(parent), "writer": "",
             **columns, "uid": uid, "parent": parent}
    check_given(forest.of("node", "token"), given)
    given |= {name: np.broadcast_to(given[name], parent.shape) for name in ("role", "writer")}
    counts = {"node": len(parent), "token": int(np.sum(given["length"], dtype=np.int64))}
    longer = {column.name: np.concatenate([forest.columns[column.name], column.array(given[column.name], counts[column.of])])
              for column in forest.of("node", "token")}
    return dataclasses.replace(forest.with_columns(**longer), computed=forest.computed + int(computed),
                               failures=dict(Counter(forest.failures) + Counter(failures or {})),
                               invalid=dict(Counter(forest.invalid) + Counter(invalid or {})),
                               seconds=(*forest.seconds, *seconds))


def select(forest: Forest, keep: np.ndarray) -> Forest:
    """The prompts where `keep bool[P]` is True, with all their nodes and facts."""
    keep = np.asarray(keep, bool)
    part = _of_nodes(forest, keep[forest.prompt])
    columns = {column.name: part.columns[column.name][keep] for column in forest.of("prompt")}
    columns["prompt"] = (np.cumsum(keep) - 1)[part.prompt].astype(np.int32)
    problems = tuple(problem for problem, kept in zip(forest.problems, keep) if kept)
    return dataclasses.replace(part.with_columns(**columns), problems=problems,
                               facts={name: x[keep] for name, x in forest.facts.items()})


def trim(forest: Forest, keep: np.ndarray) -> Forest:
    """The trajectories where `keep bool[R]` is True, in the order of `ends`, with all their contexts, and all prompts."""
    nodes, kept = forest.role == Role.PROMPT, np.asarray(keep, bool)[forest.finals[0]]
    nodes[chains(forest, forest.leaves[kept])[0]] = True
    return _of_nodes(forest, nodes)


def graft(forest: Forest, other: Forest, onto: Sequence[int]) -> Forest:
    """The forest with the trajectories of `other` added, those of its prompt p under the forest's prompt `onto[p]`.

    Facts are those of the forest; `other` may have others.
    """
    whole, count = join([forest.with_facts({}), other.with_facts({})]), len(forest.uid)
    root = whole.role == Role.PROMPT
    target = np.concatenate([np.arange(len(forest.problems)), onto]).astype(np.int32)[whole.prompt]
    first = (whole.parent >= 0) & root[whole.parent]
    moved = whole.with_columns(prompt=target, parent=np.where(
        first, np.flatnonzero(root)[target], whole.parent).astype(np.int32))
    part = _of_nodes(moved, ~root | (np.arange(len(root)) < count))
    own = {column.name: forest.columns[column.name] for column in forest.of("prompt")}
    return dataclasses.replace(part.with_columns(**own), problems=forest.problems, facts=forest.facts)


def _of_nodes(forest: Forest, keep: np.ndarray) -> Forest:
    """The nodes where `keep bool[N]` is True, with their ancestors, and all prompts' problems."""
    kept, number = {"node": keep, "token": np.repeat(keep, forest.length)}, np.cumsum(keep) - 1
    columns = {column.name: forest.columns[column.name][kept[column.of]] for column in forest.of("node", "token")}
    columns["parent"] = np.where(columns["parent"] >= 0, number[columns["parent"]], -1).astype(np.int32)
    return forest.with_columns(**columns)


def join(forests: Sequence[Forest]) -> Forest:
    """Several forests as one, prompts of the first before those of the others; their columns and facts have the same names."""
    first, rows, nodes = forests[0], 0, 0
    moved = []
    for one in forests:
        if one.declared != first.declared:
            other = {column.name for column in {*one.declared} ^ {*first.declared}}
            raise ValueError(f"forests that are joined differ in the columns {', '.join(sorted(other))}")
        moved.append({**one.columns, "prompt": one.prompt + np.int32(rows),
                      "parent": np.where(one.parent >= 0, one.parent + np.int32(nodes), np.int32(-1))})
        rows, nodes = rows + len(one.problems), nodes + len(one.uid)
    columns = {column.name: np.concatenate([one[column.name] for one in moved]) for column in first.declared}
    failures, invalid = (sum((Counter(getattr(one, name)) for one in forests), Counter()) for name in ("failures", "invalid"))
    return dataclasses.replace(first, columns=columns, problems=tuple(p for one in forests for p in one.problems),
                               facts={name: np.concatenate([one.facts[name] for one in forests]) for name in first.facts},
                               computed=sum(one.computed for one in forests), failures=dict(failures), invalid=dict(invalid),
                               seconds=tuple(second for one in forests for second in one.seconds))


# --- views --------------------------------------------------------------------------------------------------------------


def chains(forest: Forest, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`(node i32[E], row i32[E])`: for each of `ends i32[R]`, its row, the nodes from the prompt (excluded) down to it."""
    at, row, nodes, rows = ends, np.arange(len(ends)), [], []
    while len(at):
        nodes.append(at)
        rows.append(row)
        above = forest.parent[at]
        inside = forest.role[above] != Role.PROMPT
        at, row = above[inside], row[inside]
    node, row = np.concatenate(nodes[::-1] or [ends]), np.concatenate(rows[::-1] or [ends])
    order = np.argsort(row, kind="stable")
    return node[order], row[order]


def paths(forest: Forest, turns: int = 0, facts: Mapping[str, str] | None = None, **shape) -> Rollouts:
    """One rollout for each trajectory: all its tokens after the prompt, those of `rollouts.TRAINED` in the mask.

    `shape`: see `view`.

    If an environment rewards turns, there are also `step_ids`, the turn number of each token, and the `turn_facts` of at most
    `turns` turns, with the environment's `facts`, joined as `turn_info.JOINS` says.
    """
    ends = forest.ends
    node, row = chains(forest, ends)
    if forest.turn_rewards is None:
        return view(forest, ends, node, row, **shape)
    own = forest.messages[node]
    known = turn_facts(forest, ends, node, row, turns)
    said = turn_infos.joined(facts or {}, forest.turn_info, node[own], row[own], len(ends), turns, forest.length,
                             forest.rewards[ends])
    return view(forest, ends, node, row, known | said.rows, said.tokens, **shape)


def turn_facts(forest: Forest, ends: np.ndarray, node: np.ndarray, row: np.ndarray, turns: int) -> dict[str, np.ndarray]:
    """Facts about the turns of trajectories with an environment, `[R, K]` each, K being the maximum number of `turns`.

    `step`: number of the turn, -1 where there is none; `traj`: its trajectory, counted from 0 within its prompt;
    `step_rewards`: f32, its own reward. `obs`, `act`, `next_obs` are numbers of the state before the turn, of the policy's
    action and of the state after it: the `state` and `action` in the info of turns, where the environment gives them, else the
    texts. Equal ones of one prompt have equal numbers. After the last turn `next_obs` is the end and its reward. `turns`
    i32[R]: number of turns. Raises ValueError if there are more than K.
    """
    assert forest.turn_rewards is not None
    mine = forest.messages[node]
    count = np.bincount(row, mine, minlength=len(ends)).astype(np.int32)
    if count.max(initial=0) > turns:
        raise ValueError(f"a trajectory has {count.max()} turns, more than the {turns} of the view")
    first = np.searchsorted(row[mine], row[mine])
    at, line = node[mine], row[mine]
    place = line, np.arange(len(at)) - first
    fields = {"step": np.full((len(ends), turns), -1, np.int32), "turns": count,
              "traj": np.repeat(_numbered(forest, ends)[:, None], turns, axis=1),
              "step_rewards": np.zeros((len(ends), turns), np.float32)}
    fields["step"][place], fields["step_rewards"][place] = place[1], forest.turn_rewards[at]
    last = np.append(row[1:] != row[:-1], True)
    after = np.where(last, -1, np.roll(node, -1))[mine]
    for name, values in _edges(forest, at.tolist(), line.tolist(), after.tolist()).items():
        fields[name] = np.full((len(ends), turns), -1, np.int32)
        fields[name][place] = equal_answers(values, forest.prompt[at])
    return fields


def _edges(forest: Forest, at: Sequence[int], line: Sequence[int], after: Sequence[int]) -> dict[str, list[Hashable]]:
    """State, action and next state of each turn, for turns `at` of the trajectories `line`, and the nodes `after` them there.

    -1 in `after`: the trajectory ends with the turn.
    """
    assert forest.turn_info is not None and forest.turn_rewards is not None
    said, texts = forest.messages, forest.texts
    states = [turn_infos.identity(forest.turn_info[one], turn_infos.STATE) for one in at]
    found: dict[str, list[Hashable]] = {"obs": [], "act": [], "next_obs": []}
    for place, (one, state, follower) in enumerate(zip(at, states, after)):
        above, goes_on = int(forest.parent[one]), place + 1 < len(line) and line[place] == line[place + 1]
        while not said[above] and forest.role[above] in (*TRAINED, Role.HINT):  # of the same turn
            above = int(forest.parent[above])
        found["obs"].append(state or (int(forest.role[above]), texts[above]))
        found["act"].append(turn_infos.identity(forest.turn_info[one], turn_infos.ACTION) or texts[one].strip())
        if follower < 0:
            found["next_obs"].append((bool(forest.stopped[one]), float(forest.turn_rewards[one])))
        else:
            found["next_obs"].append((states[place + 1] if goes_on else None) or texts[follower])
    return found


def contexts(forest: Forest, turns: int = 0, facts: Mapping[str, str] | None = None, **shape) -> Rollouts:
    """As `paths`, for trajectories of several contexts, each a separate chain with the uid and reward of the trajectory.

    `extras["traj"]` i32[P, G] numbers the trajectories of a prompt, `turns` i32[P, G] is the number of turns of the context,
    `step` i32[P, G, K] their numbers in it, -1 where there is none. The `facts` are joined for each context; what agents get,
    and whether the trajectory is `settled`, is that of its last turn. If `step` is a fact, its numbers count, and there are
    `step_rewards` f32[P, G, K].
    """
    leaves, (which, last) = forest.leaves, forest.finals
    node, row = chains(forest, leaves)
    known, tokens = {"traj": _numbered(forest, leaves)}, dict[str, np.ndarray]()
    if forest.turn_info is not None:
        own = forest.messages[node]
        count = known["turns"] = np.bincount(row, own, minlength=len(leaves)).astype(np.int32)
        known["step"] = np.where(np.arange(turns) < count[:, None], np.arange(turns, dtype=np.int32), np.int32(-1))
        if turn_infos.STEP in (facts or {}) and forest.turn_rewards is not None:
            known["step_rewards"] = np.zeros((len(leaves), turns), np.float32)
            order = np.arange(own.sum()) - np.searchsorted(row[own], row[own])
            known["step_rewards"][row[own], order] = forest.turn_rewards[node[own]]
        ends = np.full(len(last), -1)
        np.maximum.at(ends, which[row[own]], node[own])
        said = turn_infos.joined(facts or {}, forest.turn_info, node[own], row[own], len(leaves), turns, forest.length,
                                 forest.rewards[leaves[last[which]]], ends[which])
        known, tokens = known | said.rows, said.tokens
    return view(forest, leaves, node, row, known, tokens, results=leaves[last[which]], **shape)


def _numbered(forest: Forest, ends: np.ndarray) -> np.ndarray:
    """i32[R], trajectories counted from 0 within each prompt, in their order."""
    known: dict[tuple[int, int], int] = {}
    count: Counter = Counter()
    for key in zip(forest.prompt[ends].tolist(), forest.uid[ends].tolist()):
        if key not in known:
            known[key] = count[key[0]]
            count[key[0]] += 1
    return np.array([known[key] for key in zip(forest.prompt[ends].tolist(), forest.uid[ends].tolist())], np.int32)


def view(forest: Forest, ends: np.ndarray, node: np.ndarray, row: np.ndarray, extras: Mapping[str, np.ndarray] | None = None,
         token_extras: Mapping[str, np.ndarray] | None = None, results: np.ndarray | None = None, *, group: int,
         prompts: int, tokens: Callable[[int], int], prompt_tokens: Callable[[int], int], version: int,
         of_problems: Sequence[str] = ()) -> Rollouts:
    """Rollouts `[prompts, group, T]` in which row r, among the rows of its prompt, has the nodes `node` where `row` is r.

    Args:
      ends: i32[R], the last node of each, in the order of prompts; its reward is the row's reward.
      extras: further entries of `Rollouts.extras`, [R, ...] each.  token_extras: further entries per token, [M] each.
      results: i32[R], nodes whose rewards the rows get; None: `ends`.
      group, prompts: the shape; missing rollouts are not valid, missing prompts are copies of the first without valid rollouts.
      tokens, prompt_tokens: functions from the length of the longest to T and S.
      version: the `policy_version` of padding.  of_problems: numbers in `Problem.extra` that become extras, f32[P].

    Roles are set if not only the policy wrote. Without them all present tokens are trained.
    """
    results, lay = ends if results is None else results, _laid(forest, ends, node, row, group, prompts, tokens)
    role = lay.tokens(np.repeat(forest.role, forest.length), fill=Role.PADDING)
    in_turns = forest.turn_rewards is not None
    valid = lay.rows(np.ones(len(ends), bool))
    valid[len(forest.problems):] = False
    asked, asked_mask = _prompts(forest, prompt_tokens)
    named: dict[str, Any] = {name: lay.rows(x) for name, x in (extras or {}).items()}
    named |= {name: lay.tokens(x) for name, x in (token_extras or {}).items()} | _known(forest, lay, results, of_problems)
    fields: dict[str, Any] = dict(
        mask=np.isin(role, TRAINED), valid=valid,
        role=role if in_turns or others(forest).any() else None,
        rewards=lay.rows(forest.rewards[results]),
        reward_components=lay.rows(np.nan_to_num(forest.components[results], nan=0.0)),
        prompt_tokens=lay.prompts(asked), prompt_mask=lay.prompts(asked_mask),
        prompt_ids=lay.prompts(np.array([p.id for p in forest.problems], np.int32)),
        step_ids=lay.tokens(np.repeat(_turn_numbers(forest), forest.length)) if in_turns else None)
    for kept in forest.declared:
        if kept.to is None:
            continue
        values, shown = forest.columns[kept.name], fields if kept.to == "field" else named
        if (name := kept.shown_as or kept.name) in shown:
            raise ValueError(f"the column {kept.name!r} has the name of what rollouts have already; show it under another one")
        if kept.of == "token":
            shown[name] = lay.tokens(values, version if kept.name == "version" else kept.fill)
        else:
            shown[name] = lay.rows(values[results], kept.fill) if kept.of == "node" else lay.prompts(values)
    return Rollouts(**fields, extras=named)


class _Lay(NamedTuple):
    """Where the rows `[R]` and tokens `[M]` of a forest are in a view: functions that place them, see `_laid`.

    tokens: `(values [M, ...], fill) -> [P, G, T, ...]`.  rows: `(values [R, ...], fill) -> [P, G, ...]`.  prompts: the view's
    `[P, ...]`.
    """

    tokens: Callable[..., np.ndarray]
    rows: Callable[..., np.ndarray]
    prompts: Callable[[np.ndarray], np.ndarray]


def _laid(forest: Forest, ends: np.ndarray, node: np.ndarray, row: np.ndarray, group: int, prompts: int,
          tokens: Callable[[int], int]) -> _Lay:
    """The places of rows and tokens, with the arguments of `view`. Raises ValueError if a prompt has more rows than a group."""
    owner = forest.prompt[ends]
    place = np.arange(len(ends)) - np.searchsorted(owner, owner)
    if len(ends) and place.max() >= group:
        raise ValueError(f"a prompt has {place.max() + 1} rollouts, more than the group of {group}")
    P, length = len(forest.problems), forest.length[node]
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    before = np.cumsum(length) - length
    start = before - (before[np.searchsorted(row, row)] if len(row) else before)  # in its row
    source, line = np.repeat(forest.offset[node], length) + within, np.repeat(row, length)
    column = np.repeat(start, length) + within
    T = tokens(int(column.max()) + 1 if len(column) else 1)

    def of_prompts(values):
        return _with_first_repeated(values, prompts)

    def of_tokens(values, fill=0):
        out = np.full((P, group, T, *values.shape[1:]), fill, values.dtype)
        out[owner[line], place[line], column] = values[source]
        return of_prompts(out)

    def of_rows(values, fill=0):
        out = np.full((P, group, *values.shape[1:]), fill, values.dtype)
        out[owner, place] = values
        return of_prompts(out)

    return _Lay(of_tokens, of_rows, of_prompts)


def _known(forest: Forest, lay: _Lay, results: np.ndarray, of_problems: Sequence[str]) -> dict[str, np.ndarray]:
    """The extras of every view: how rows ended, which answers are equal, facts of problems."""
    named = {"truncated": lay.rows(~forest.stopped[results]), "task": lay.prompts(forest.task),
             "correct": lay.rows(forest.solved[results])}
    if forest.answers is not None:  # -1 where there is no row, too
        named["answers"] = lay.rows(equal_answers(forest.answers[results], forest.prompt[results]) + 1) - np.int32(1)
    named |= {name: lay.prompts(np.array([problem.extra[name] for problem in forest.problems], np.float32))
              for name in of_problems}
    return named | ({"prior": lay.prompts(forest.facts["expected"])} if "expected" in forest.facts else {})


def _turn_numbers(forest: Forest) -> np.ndarray:
    """i32[N], number of the policy's turns that have ended before a node in its trajectory."""
    number, ends = np.zeros(len(forest.uid), np.int32), forest.messages
    for node, parent in enumerate(forest.parent.tolist()):  # parents come first
        if parent >= 0:
            number[node] = number[parent] + ends[parent]
    return number


def others(forest: Forest) -> np.ndarray:
    """bool[N], the nodes that neither the policy nor the task wrote."""
    return (forest.role != Role.POLICY) & (forest.role != Role.PROMPT)


def _prompts(forest: Forest, prompt_tokens: Callable[[int], int]) -> tuple[np.ndarray, np.ndarray]:
    """`(i32[P, S], bool[P, S])`"""
    nodes = np.flatnonzero(forest.role == Role.PROMPT)
    length = forest.length[nodes]
    mask = np.arange(prompt_tokens(int(length.max()))) < length[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = forest.tokens[np.repeat(forest.role == Role.PROMPT, forest.length)]
    return tokens, mask


def _with_first_repeated(x: np.ndarray, prompts: int) -> np.ndarray:
    """`[P, ...]` with its first row repeated until there are `prompts`."""
    return np.concatenate([x, np.repeat(x[:1], prompts - len(x), axis=0)]) if prompts > len(x) else x


def equal_answers(answers: Sequence[Hashable | None], owner: np.ndarray) -> np.ndarray:
    """`i32[R]`: equal answers of one prompt have equal numbers, counted from 0 in order of appearance; None is -1."""
    known: dict[tuple[int, Hashable], int] = {}
    count: Counter = Counter()
    numbers = []
    for row, answer in zip(owner.tolist(), answers):
        if answer is not None and (row, answer) not in known:
            known[row, answer] = count[row]
            count[row] += 1
        numbers.append(-1 if answer is None else known[row, answer])
    return np.array(numbers, np.int32)


def outcomes(forest: Forest, group: int) -> tuple[np.ndarray, np.ndarray]:
    """`(rewards f32[P, group], valid bool[P, group])` of the trajectories of each prompt."""
    ends = forest.ends
    owner = forest.prompt[ends]
    place = np.arange(len(ends)) - np.searchsorted(owner, owner)
    rewards, valid = np.zeros((len(forest.problems), group), np.float32), np.zeros((len(forest.problems), group), bool)
    rewards[owner, place], valid[owner, place] = forest.rewards[ends], True
    return rewards, valid


def versions(forest: Forest) -> np.ndarray:
    """i32[R], the oldest version of the weights that sampled each trajectory's tokens; without any, the newest of all."""
    node, row = chains(forest, ends := forest.ends)
    newest = forest.version.max(initial=-1)
    oldest, per_row = np.full(len(forest.uid), newest, np.int32), np.full(len(ends), newest, np.int32)
    np.minimum.at(oldest, np.repeat(np.arange(len(forest.uid)), forest.length), forest.version)
    own = np.isin(forest.role[node], SAMPLED)
    np.minimum.at(per_row, row[own], oldest[node[own]])
    return per_row


def policy_lengths(forest: Forest) -> np.ndarray:
    """i64[R], the tokens that the policy wrote in each trajectory, in all turns and contexts, in the order of `ends`."""
    node, row = chains(forest, forest.leaves)
    which, last = forest.finals
    own = forest.length[node] * np.isin(forest.role[node], SAMPLED)
    return np.bincount(which[row], own, minlength=len(last)).astype(np.int64)


def metrics(forest: Forest) -> dict[str, float]:
    """Metrics of a batch: rewards, lengths, truncation, groups without a learning signal.

    `prompt/length` is the mean number of tokens of a prompt. `completion/tokens` counts all policy tokens that were drawn,
    `completion/length` is their mean number per trajectory, `completion/present` the mean number of all tokens, if not only the
    policy wrote. `completion/computed` is the number of tokens that an engine computed per existing token: above 1 if prefixes
    were computed twice. `environment/seconds` is the mean duration of a call of an environment, `environment/slowest` the
    longest. Every prompt has the same weight in means of rewards: prompts that are drawn most often are not a fair sample.
    """
    ends, lengths = forest.ends, policy_lengths(forest)
    owner, rewards = forest.prompt[ends], forest.rewards[ends]
    node, row = chains(forest, forest.leaves)
    row = forest.finals[0][row]  # all contexts of a trajectory
    size = np.bincount(owner, minlength=len(forest.problems))
    weights = 1 / size[owner]
    lowest, highest = (np.full(len(size), fill) for fill in (np.inf, -np.inf))
    np.minimum.at(lowest, owner, rewards)
    np.maximum.at(highest, owner, rewards)
    written = np.isin(forest.role, SAMPLED)
    by_name = {
        "reward/mean": float(np.average(rewards, weights=weights)), "reward/std": float(rewards.std()),
        "prompt/length": float(forest.length[forest.role == Role.PROMPT].mean()),
        "completion/length": float(lengths.mean()), "completion/tokens": float(forest.length[written].sum()),
        "completion/truncated": float(1 - forest.stopped[ends].mean()),
        "groups/all_equal": float((lowest[size > 0] == highest[size > 0]).mean()), "groups/largest": float(size.max()),
    }
    if others(forest).any():
        by_name["completion/present"] = float(np.bincount(row, forest.length[node], minlength=len(ends)).mean())
    if forest.turn_rewards is not None:
        by_name["environment/turns"] = float(np.bincount(row, written[node], minlength=len(ends)).mean())
        by_name["environment/invalid"] = float(sum(forest.invalid.values()))
    if forest.seconds:
        by_name |= {"environment/seconds": float(np.mean(forest.seconds)), "environment/slowest": max(forest.seconds)}
    if forest.computed:
        by_name["completion/computed"] = forest.computed / float(forest.length.sum())
    for name, values in zip(forest.names, forest.components[ends].T):
        if (there := ~np.isnan(values)).any():
            by_name[f"reward/{name}"] = float(np.average(values[there], weights=weights[there]))
    by_name |= {f"environment/invalid/{name}": float(count) for name, count in forest.invalid.items()}
    return by_name | {f"reward_failures/{name}": float(count) for name, count in forest.failures.items()}
