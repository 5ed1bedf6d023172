"""Trajectories as paths through trees of tokens, rows that compute every node once, and the index that joins both.

A prompt with its completions is a tree: they share the prompt, and whatever tokens some of them have in common at their
beginning, such as the turns before a fork. Learning uses a view of trajectories, `[P, G, T]`; the model computes rows `[R, N]`,
each with some nodes and all their ancestors. Packing runs on the host, in numpy. `Transformer.tree_states` computes the rows.
"""
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.unpadding import through_last

MAX_LENGTHS = 3  # lengths of rows: each has programs to compile


class Trees(NamedTuple):
    """Nodes of tokens, each of which continues its parent. Parents come before their children.

    tokens: i32[n], tokens of all nodes, one node after the other.  offsets: i[M + 1], where each begins; the last entry is n.
    parent: i32[M], -1 for roots. A root is a prompt: its tokens are seen but not trained.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    parent: np.ndarray


class PackedRows(NamedTuple):
    """The rows that the model computes, `[R, N]` each; nodes of a row are in depth-first order.

    tokens, positions: i32, token of each slot, and its position counted from its root; 0 on padding.
    end: i32, the first slot after the descendants of the slot's node. A query in slot q sees the keys in slots k with
      `k <= q < end[k]`: its own node up to itself, and all ancestors as a whole. 0 on padding, which no query sees.
    before: i32, the slot whose state predicts the token; the first slot of a root, which nothing predicts, names itself.
    wanted: bool, slots whose log-probs are needed; None: of all.
    temperature: f32, temperature of these log-probs; None: that of the policy.
    experts: i[R, N, L, k], experts of a mixture that the tokens take, see `models.moe.Router`; None: the routers choose.
    seeds: u32, those of what is drawn at the position of each token, see `Objective.position`; None: nothing is drawn.
    targets: i32, tokens whose log-probs are taken in place of those that the slots hold; None: the same.
    """

    tokens: np.ndarray
    positions: np.ndarray
    end: np.ndarray
    before: np.ndarray
    wanted: np.ndarray | None
    temperature: np.ndarray | None = None
    experts: np.ndarray | None = None
    seeds: np.ndarray | None = None
    targets: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows and the view of trajectories, joined by an index.

    rows: see `PackedRows`.
    node: i32[R, N], the node of each slot; -1 on padding.
    index: i32[P, G, T], for trained tokens of trajectories the slot that computes them, counted through `[R, N]`; else -1.
    root: i32[P, G], the first slot of the root of each trajectory, counted likewise; -1 where the trajectory is not computed.
    """

    rows: PackedRows
    node: np.ndarray
    index: np.ndarray
    root: np.ndarray


class _Tree(NamedTuple):
    """A forest in depth-first order: nodes are renumbered such that the descendants of node i are `i + 1 .. past[i] - 1`.

    node: i[M'], the original number of each node; only nodes on some trajectory are kept.
    parent: its parent, -1 for roots.  begin, length: its tokens.  above: tokens of all its ancestors.
    size: tokens of the node and of all its descendants.  tail: the nearest ancestor that has tokens, -1 for roots.
    """

    node: np.ndarray
    parent: np.ndarray
    past: np.ndarray
    begin: np.ndarray
    length: np.ndarray
    above: np.ndarray
    size: np.ndarray
    tail: np.ndarray


def of_groups(prompt_tokens, prompt_mask, tokens, mask) -> tuple[Trees, np.ndarray]:
    """The trees of P prompts with G completions each, and the node `i32[P, G]` in which each ends; -1 without a trained token.

    Completions of a prompt share the nodes of the tokens with which they begin alike, whoever wrote them: a token's log-prob
    depends on the tokens before it alone.

    Args:
      prompt_tokens, prompt_mask: `[P, S]`.
      tokens, mask: `[P, G, T]`; tokens after the last trained one are dropped.
    """
    parts: list[np.ndarray] = []
    parents: list[int] = []
    leaves, count = np.full(mask.shape[:2], -1, np.int32), through_last(mask).sum(-1)
    for p, (asked, there) in enumerate(zip(prompt_tokens, prompt_mask)):
        parts.append(asked[there])
        parents.append(-1)
        learned = np.flatnonzero(count[p])
        leaves[p, learned] = _branch(parts, parents, [tokens[p, g, :count[p, g]] for g in learned])
    offsets = np.append(0, np.cumsum([len(part) for part in parts]))
    return Trees(np.concatenate(parts).astype(np.int32), offsets, np.array(parents, np.int32)), leaves


def _branch(parts: list[np.ndarray], parents: list[int], rows: Sequence[np.ndarray]) -> list[int]:
    """Adds the nodes of `rows` of tokens below the last node, and returns the node in which each row ends.

    In lexicographic order, what a row shares with any earlier one it shares with the one before it; and what it shares with a
    later one is the least that any two neighbours between them share. There its path branches, and a node ends.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row].tobytes())
    shared = [0, *(_in_common(rows[a], rows[b]) for a, b in zip(order, order[1:])), 0]
    path, ends = {0: len(parts) - 1}, [0] * len(rows)  # the nodes of the last row, by how many of its tokens they end after
    for place, row in enumerate(order):
        start, whole = shared[place], len(rows[row])
        path = {depth: node for depth, node in path.items() if depth <= start}
        for end in sorted({whole, *np.minimum.accumulate(shared[place + 1:]).tolist()}):
            if end > start:
                path[end] = len(parts)
                parents.append(path[start])
                parts.append(rows[row][start:end])
                start = end
        ends[row] = path[whole]
    return ends


def _in_common(a: np.ndarray, b: np.ndarray) -> int:
    """The number of elements with which both begin."""
    least = min(len(a), len(b))
    differs = a[:least] != b[:least]
    return int(differs.argmax()) if differs.any() else least


def pack(forest: Trees, leaves: np.ndarray, mask: np.ndarray, lengths: Sequence[int], multiple: int = 1) -> Packed:
    """The rows that compute all trajectories, and the slot of each of their tokens.

    A token is computed once, except for prefixes of trees that are split over rows: they are repeated in each row that
    continues them. Rows have one of the `lengths`, and hold subtrees that are as large or as small as possible: whichever needs
    the fewest slots, of equals the shorter rows, and then the larger subtrees.

    Args:
      forest: the nodes.
      leaves: `i32[P, G]`, the node in which each trajectory ends; -1: there is none.
      mask: `bool[P, G, T]`, which of the first T tokens after its root are trained. Trajectories without any are not
        computed.
      lengths: the row lengths to choose from, at most `MAX_LENGTHS`.
      multiple: the number of rows is padded to a multiple of it.
    Raises ValueError: when a trajectory is longer than every row, or the arguments do not describe one.
    """
    if not 0 < len(lengths) <= MAX_LENGTHS:
        raise ValueError(f"{len(lengths)} row lengths; give 1 to {MAX_LENGTHS}, each has programs to compile")
    leaves = np.where(mask.any(-1), leaves, -1)
    tree, number = _depth_first(forest, leaves)
    paths = [_path(tree, number[leaf]) for leaf in leaves.reshape(-1)]
    longest = max((tree.above[path[-1]] + tree.length[path[-1]] for path in paths if path), default=0)
    fitting = sorted(n for n in lengths if n >= longest)
    if not fitting:
        raise ValueError(f"a trajectory has {longest} tokens, more than the {max(lengths)} of the longest row; allow longer "
                         "rows, or limit prompts and completions")
    tips = np.flatnonzero(tree.past == np.arange(len(tree.past)) + 1).tolist()
    filled = {(n, small): _fill(tree, tips if small else _pieces(tree, n), n) for n in fitting for small in (False, True)}
    counts = {key: multiple * max(1, -(-len(rows) // multiple)) for key, rows in filled.items()}
    length, _ = best = min(filled, key=lambda key: (counts[key] * key[0], key))
    rows, node, home = _lay_out(forest, tree, filled[best], counts[best], length)
    index = _view(tree, paths, home, mask)
    np.asarray(rows.wanted).reshape(-1)[index[index >= 0]] = True
    root = np.array([home[path[0]] if path else -1 for path in paths], np.int32).reshape(leaves.shape)
    return Packed(rows, node, index, root)


def at_temperatures(packed: Packed, temperature_P: np.ndarray) -> Packed:
    """The same rows, the tokens of each prompt's trajectories at its temperature f32[P]."""
    slots = np.ones(packed.node.shape, np.float32)
    some = packed.index >= 0
    slots.reshape(-1)[packed.index[some]] = np.broadcast_to(temperature_P[:, None, None], some.shape)[some]
    return dataclasses.replace(packed, rows=packed.rows._replace(temperature=slots))


def with_seeds(packed: Packed, seeds: np.ndarray) -> Packed:
    """The same rows, the trained tokens of trajectories with their seeds u32[P, G, T].

    Tokens with which trajectories of a prompt begin alike are one, with the seed of the last of these trajectories.
    """
    slots, some = np.zeros(packed.node.shape, np.uint32), packed.index >= 0
    slots.reshape(-1)[packed.index[some]] = seeds[some]
    return dataclasses.replace(packed, rows=packed.rows._replace(seeds=slots))


def with_experts(packed: Packed, experts: np.ndarray) -> Packed:
    """The same rows, whose tokens take the `experts i[P, G, T, L, k]` of trajectories; other tokens have -1.

    A token that several rows repeat takes the same experts in each.
    """
    slots = np.full((packed.node.size, *experts.shape[3:]), -1, experts.dtype)
    some = packed.index >= 0
    slots[packed.index[some]] = experts[some]
    order, begins = np.arange(packed.node.shape[1]), np.diff(packed.node, axis=1, prepend=-2) != 0
    place = order - np.maximum.accumulate(np.where(begins, order, 0), axis=1)  # in its node
    key = packed.node.astype(np.int64) * packed.node.shape[1] + place
    _, first, which = np.unique(np.where(packed.node < 0, -1, key), return_index=True, return_inverse=True)
    whole = slots[first][which.reshape(-1)].reshape(*packed.node.shape, *experts.shape[3:])
    return dataclasses.replace(packed, rows=packed.rows._replace(experts=whole))


def with_targets(packed: Packed, targets: np.ndarray) -> Packed:
    """The same rows, in which log-probs are those of the `targets i32[P, G, T]` after what comes before each token.

    Trajectories of a prompt that begin alike, whose first tokens are one, have equal targets there.
    """
    slots, some = packed.rows.tokens.copy(), packed.index >= 0
    slots.reshape(-1)[packed.index[some]] = targets[some]
    return dataclasses.replace(packed, rows=packed.rows._replace(targets=slots))


def apart(packed: Packed, size: int) -> list[tuple[np.ndarray, Packed]]:
    """Parts of `size` rows, the last filled up with empty ones, and the trajectories `i[p]` of each, which no row repeats.

    Raises ValueError for trajectories that lie in several parts, or with a second one of their prompt.
    """
    (count, length), parts = packed.node.shape, []
    slots = packed.index[:, 0].max(-1, initial=-1)
    if packed.index.shape[1] != 1 or (packed.root[:, 0] // (size * length) != slots // (size * length)).any():
        raise ValueError(f"trajectories of shape {packed.index.shape} do not each lie within {size} rows; give one per prompt")
    for first in range(0, count, size):
        which = np.flatnonzero((slots >= first * length) & (slots < (first + size) * length))
        def cut(x, fill=0, first=first):
            part = x[first:first + size]
            return np.pad(part, ((0, size - len(part)), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
        rows, index = PackedRows(*(None if x is None else cut(x) for x in packed.rows)), packed.index[which]
        parts.append((which, Packed(rows, cut(packed.node, -1), np.where(index < 0, -1, index - first * length),
                                    packed.root[which] - first * length)))
    return parts


def _depth_first(forest: Trees, leaves: np.ndarray) -> tuple[_Tree, np.ndarray]:
    """The nodes on the path to any of the leaves in depth-first order, and the place of each node there (-1: none)."""
    parent, length = np.asarray(forest.parent), np.diff(forest.offsets)
    if len(length) != len(parent) or (parent >= np.arange(len(parent))).any():
        raise ValueError("forest.parent names a node that does not come before its child, or forest.offsets does not fit it")
    order = _order(parent, leaves)
    place = np.full(len(parent) + 1, -1)  # the last entry is for "no node"
    place[order] = np.arange(len(order))
    parent, length = place[parent[order]], length[order]
    if empty := [int(i) for i in order[(parent < 0) & (length == 0)]]:
        raise ValueError(f"nodes {empty} are roots without tokens: nothing predicts what comes first behind them")
    above, size, past, tail = np.zeros_like(length), length.copy(), np.arange(len(order)) + 1, parent.copy()
    for i in np.flatnonzero(parent >= 0):
        above[i] = above[parent[i]] + length[parent[i]]
        tail[i] = parent[i] if length[parent[i]] else tail[parent[i]]
    for i in np.flatnonzero(parent >= 0)[::-1]:
        size[parent[i]] += size[i]
        past[parent[i]] = max(past[parent[i]], past[i])
    return _Tree(order, parent, past, np.asarray(forest.offsets)[order], length, above, size, tail), place


def _order(parent: np.ndarray, leaves: np.ndarray) -> np.ndarray:
    """The nodes on the path to any of the leaves, depth first."""
    used, children = np.zeros(len(parent), bool), [[] for _ in parent]
    used[leaves[leaves >= 0]] = True
    for i in range(len(parent) - 1, -1, -1):
        if used[i] and parent[i] >= 0:
            used[parent[i]] = True
            children[parent[i]].append(i)
    stack, order = [*np.flatnonzero(used & (parent < 0))[::-1]], []
    while stack:
        order.append(stack.pop())
        stack += children[order[-1]]  # the last child first, so that the first is taken first
    return np.array(order, int)


def _path(tree: _Tree, leaf: int) -> list[int]:
    """The nodes from the root to a leaf; none for -1."""
    path = []
    while leaf >= 0:
        path.append(int(leaf))
        leaf = tree.parent[leaf]
    return path[::-1]


def _pieces(tree: _Tree, length: int) -> Iterator[int]:
    """Nodes whose subtrees, as large as possible, fit a row of this length together with their ancestors."""
    i = 0
    while i < len(tree.node):
        if tree.above[i] + tree.size[i] <= length:
            yield i
            i = tree.past[i]
        else:  # its own tokens come before those of each child
            i += 1


def _fill(tree: _Tree, pieces: Iterable[int], length: int) -> list[np.ndarray]:
    """The nodes of each row: the largest of the `pieces`, which are subtrees, first, each into the first row with room.

    Rows that already hold more of a piece's ancestors are tried first.
    """
    pieces = sorted(pieces, key=lambda i: (-(tree.above[i] + tree.size[i]), i))
    free, rows, holding = np.zeros(len(pieces), int), [], {}
    for piece in pieces:
        nodes, cost, ancestor = [*range(piece, tree.past[piece])], tree.size[piece], tree.parent[piece]
        row = None
        while row is None and ancestor >= 0:
            row = next((r for r in holding.get(ancestor, ()) if free[r] >= cost), None)
            if row is None:
                nodes.append(ancestor)
                cost, ancestor = cost + tree.length[ancestor], tree.parent[ancestor]
        if row is None:
            room = free[:len(rows)] >= cost
            row = int(room.argmax()) if room.any() else len(rows)
        if row == len(rows):
            rows.append([])
            free[row] = length
        free[row] -= cost
        rows[row] += nodes
        for i in nodes:
            holding.setdefault(i, []).append(row)
    return [np.sort(nodes) for nodes in rows]


def _lay_out(forest: Trees, tree: _Tree, filled: list[np.ndarray], count: int, length: int):
    """`(rows, node, home)`: the contents of each slot, and the first slot, counted through all rows, of each node."""
    def zeros(dtype=np.int32):
        return np.zeros((count, length), dtype)
    rows = PackedRows(zeros(), zeros(), zeros(), zeros(), zeros(bool))
    node, home = np.full((count, length), -1, np.int32), np.full(len(tree.node), -1)
    for r, nodes in enumerate(filled):
        sizes = tree.length[nodes]
        edges = np.append(0, sizes.cumsum())
        start, used = edges[:-1], edges[-1]
        def each(x):
            return np.repeat(x, sizes)
        offset = np.arange(used) - each(start)
        tail = np.searchsorted(nodes, tree.tail[nodes])
        first = np.where(tree.tail[nodes] < 0, start, edges[tail + 1] - 1)
        rows.tokens[r, :used] = forest.tokens[each(tree.begin[nodes]) + offset]
        rows.positions[r, :used] = each(tree.above[nodes]) + offset
        rows.end[r, :used] = each(edges[np.searchsorted(nodes, tree.past[nodes])])
        rows.before[r, :used] = np.where(offset == 0, each(first), np.arange(used) - 1)
        node[r, :used] = each(tree.node[nodes])
        home[nodes] = np.where(home[nodes] < 0, r * length + start, home[nodes])
    return rows, node, home


def _view(tree: _Tree, paths: list[list[int]], home: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """`index i32[P, G, T]`, see `Packed`, from where each node is computed first."""
    T = mask.shape[-1]
    index, counts = np.full((len(paths), T), -1, np.int32), mask.reshape(-1, T)
    for row, counting, path in zip(index, counts, paths):
        slots = np.concatenate([home[i] + np.arange(tree.length[i]) for i in path[1:]] or [np.zeros(0, int)])
        if counting[len(slots):].any():
            raise ValueError(f"mask counts tokens behind the {len(slots)} that a trajectory has after its root")
        shown = slots[:T]
        row[:len(shown)] = np.where(counting[:len(shown)], shown, -1)
    return index.reshape(mask.shape)
