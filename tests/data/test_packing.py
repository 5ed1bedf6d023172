"""Packed rows have every trajectory, each node once, for any trees; what does not fit is repeated or refused."""
import forests
import numpy as np
import pytest

from jaxrl_llm.data.packing import Trees, apart, of_groups, pack, with_experts, with_targets

CASES = [forests.group, forests.conversations, *[forests.search] * 60]


def seen_by(packed, row: int, slot: int) -> np.ndarray:
    slots = np.arange(packed.node.shape[1])
    return np.flatnonzero((slots <= slot) & (slot < packed.rows.end[row]))


def check(case: forests.Case, packed) -> None:
    """Each token that counts sees its trajectory up to itself, in order, and is predicted by the one before it."""
    R, N = packed.node.shape
    np.testing.assert_array_equal(packed.index >= 0, case.mask)
    for (p, g), prompt, rest, counts in case.trajectories():
        whole = np.concatenate([prompt, rest])
        for t in np.flatnonzero(counts):
            row, slot = divmod(packed.index[p, g, t], N)
            seen = seen_by(packed, row, slot)
            np.testing.assert_array_equal(packed.rows.tokens[row, seen], whole[:len(prompt) + t + 1])
            np.testing.assert_array_equal(packed.rows.positions[row, seen], np.arange(len(seen)))
            assert seen[-1] == slot and packed.rows.before[row, slot] == seen[-2]
    np.testing.assert_array_equal(np.flatnonzero(packed.rows.wanted), np.unique(packed.index[packed.index >= 0]))
    assert packed.rows.temperature is None
    for name, x in packed.rows._asdict().items():
        assert x is None or not x[packed.node < 0].any(), name


def used_tokens(case: forests.Case) -> int:
    nodes = {i for leaf in case.leaves[case.mask.any(-1)] for i in case.path(leaf)}
    return sum(len(case.tokens_of([i])) for i in nodes)


@pytest.mark.parametrize("seed", range(len(CASES)))
def test_every_node_is_computed_once_where_its_tree_fits(seed):
    case = CASES[seed](np.random.default_rng(seed))
    if not case.mask.any():
        return
    packed = pack(case.forest, case.leaves, case.mask, [used_tokens(case)])
    check(case, packed)
    assert packed.node.shape[0] == 1 and (packed.node >= 0).all()  # one row, without room for anything twice


@pytest.mark.parametrize("seed", range(len(CASES)))
def test_trees_that_do_not_fit_straddle_rows_and_repeat_what_leads_to_them(seed):
    rng = np.random.default_rng(seed)
    case = CASES[seed](rng)
    if not case.mask.any():
        return
    length = case.longest() + int(rng.integers(0, 4))
    packed = pack(case.forest, case.leaves, case.mask, [length], multiple=3)
    check(case, packed)
    assert packed.node.shape[0] % 3 == 0
    for row in packed.node:
        nodes, counts = np.unique(row[row >= 0], return_counts=True)
        np.testing.assert_array_equal(counts, [len(case.tokens_of([i])) for i in nodes])  # whole, and once in a row
        with_tokens = {i for i in range(len(case.forest.parent)) if len(case.tokens_of([i]))}
        assert {j for i in nodes for j in case.path(i)} & with_tokens == set(nodes)  # with all that leads to them
    repeated = {i for i in np.unique(packed.node) if i >= 0 and ((packed.node == i).any(1)).sum() > 1}
    inner = {i for leaf in case.leaves.ravel() for i in case.path(leaf)[:-1]}
    assert repeated <= inner


def test_a_group_straddles_rows_with_its_prompt_in_each():
    case = forests.of_lengths(np.random.default_rng(0), [-1, 0, 0, 0, 0], [4, 6, 6, 6, 6], [[1, 2, 3, 4]])
    packed = pack(case.forest, case.leaves, case.mask, [16])
    assert packed.node.tolist() == [[0] * 4 + [1] * 6 + [2] * 6, [0] * 4 + [3] * 6 + [4] * 6]
    assert packed.rows.end[0].tolist() == [16] * 4 + [10] * 6 + [16] * 6
    assert packed.rows.before[0].tolist() == [0, 0, 1, 2, *range(3, 9), 3, *range(10, 15)]
    assert packed.index.min() == 4 and packed.rows.wanted.sum() == 24


def test_experts_of_trajectories_go_to_their_slots_and_to_all_repetitions():
    """Prompt of 4; a node of 6 that two rows need, behind which two completions have 6 tokens each."""
    case = forests.of_lengths(np.random.default_rng(0), [-1, 0, 1, 1], [4, 6, 6, 6], [[2, 3]])
    packed = pack(case.forest, case.leaves, case.mask, [16])
    assert packed.node.tolist() == [[0] * 4 + [1] * 6 + [2] * 6, [0] * 4 + [1] * 6 + [3] * 6]
    given = np.arange(2 * 12, dtype=np.int16).reshape(1, 2, 12, 1, 1)
    given[:, 1, :6] = given[:, 0, :6]  # of the tokens that both share
    laid = with_experts(packed, given).rows.experts
    assert laid.dtype == np.int16 and laid.shape == (2, 16, 1, 1)
    assert laid[..., 0, 0].tolist() == [[-1] * 4 + [*range(12)], [-1] * 4 + [*range(6), *range(18, 24)]]
    part = case.mask.copy()
    part[0, 0, :6] = part[0, 1, :6] = False  # tokens of others, for instance
    assert with_experts(pack(case.forest, case.leaves, part, [16]), given).rows.experts[1, :, 0, 0].tolist() == [
        -1] * 10 + [*range(18, 24)]


def test_parts_of_rows_hold_their_trajectories_whole():
    """Prompts of 2 tokens, whose completions have 6, 4, 3 and none that counts, in rows of 8: one each, then parts of two."""
    tokens = np.arange(4 * 6, dtype=np.int32).reshape(4, 1, 6)
    mask = np.arange(6) < np.array([6, 4, 3, 0])[:, None, None]
    prompts = np.full((4, 2), 90, np.int32)
    packed = with_targets(pack(*of_groups(prompts, np.ones((4, 2), bool), tokens, mask), mask, [8]), tokens + 30)
    assert packed.node.shape == (3, 8)
    first, last = apart(packed, 2)
    assert [first[0].tolist(), last[0].tolist()] == [[0, 1], [2]]
    for which, part in (first, last):
        assert part.rows.tokens.shape == part.rows.targets.shape == part.node.shape == (2, 8)
        for i, index, root in zip(which, part.index[:, 0], part.root[:, 0]):
            slots = index[index >= 0]
            assert part.rows.tokens.reshape(-1)[slots].tolist() == tokens[i][mask[i]].tolist()
            assert part.rows.targets.reshape(-1)[slots].tolist() == (tokens[i][mask[i]] + 30).tolist()
            assert part.rows.tokens.reshape(-1)[root:root + 2].tolist() == [90, 90]
    assert (last[1].node[1] == -1).all() and not last[1].rows.end[1].any()
    with pytest.raises(ValueError, match="of shape .2, 2, 12. do not each lie within 1 rows; give one per prompt"):
        case = forests.of_lengths(np.random.default_rng(0), [-1, 0, 1, 1, -1, 4, 5, 5], [4, 6, 6, 6] * 2, [[2, 3], [6, 7]])
        apart(pack(case.forest, case.leaves, case.mask, [16]), 1)


def test_the_length_with_the_fewest_slots_is_taken():
    case = forests.of_lengths(np.random.default_rng(0), [-1, 0, 0, 0, 0], [4, 6, 6, 6, 6], [[1, 2, 3, 4]])
    def shape(lengths, multiple=1):
        return pack(case.forest, case.leaves, case.mask, lengths, multiple).node.shape
    assert shape([64, 32, 16]) == (2, 16)  # 1 x 32 are as many
    assert shape([28, 16]) == (1, 28)
    assert shape([28, 16], multiple=2) == (2, 16)  # the other row of 28 would be empty


def test_what_is_not_learned_from_is_not_computed():
    case = forests.group(np.random.default_rng(0))
    mask = case.mask.copy()
    mask[0, 1] = False
    mask[1] = False
    packed = pack(case.forest, case.leaves, mask, [64])
    assert set(packed.node[0].tolist()) == {-1, 0, 1, 3}
    nothing = pack(case.forest, case.leaves, mask & False, [64], multiple=2)
    assert nothing.node.shape == (2, 64) and (nothing.node == -1).all() and not nothing.rows.wanted.any()


def test_tokens_that_two_trajectories_share_are_computed_once():
    case = forests.of_lengths(np.random.default_rng(0), [-1, 0, 1, 1], [2, 3, 2, 4], [[2, 3, 3]])
    packed = pack(case.forest, case.leaves, case.mask, [16])
    np.testing.assert_array_equal(packed.index[0, 0, :3], packed.index[0, 1, :3])
    np.testing.assert_array_equal(packed.index[0, 1], packed.index[0, 2])
    assert packed.rows.wanted.sum() == 9 and (packed.index >= 0).sum() == 5 + 7 + 7


def test_rollouts_of_a_group_that_differ_from_the_start_share_their_prompt_alone():
    rng = np.random.default_rng(0)
    prompt_mask = np.array([[False, True, True], [True, False, False]])
    mask = np.array([[[1, 0, 1, 0], [0, 0, 0, 0]], [[1, 1, 1, 1], [0, 1, 0, 0]]], bool)
    prompts, tokens = rng.integers(0, 9, (2, 3)), rng.permutation(16).reshape(2, 2, 4)
    forest, leaves = of_groups(prompts, prompt_mask, tokens, mask)
    assert np.sort(leaves).tolist() == [[-1, 1], [3, 4]] and leaves[0, 1] == -1 and forest.parent.tolist() == [-1, 0, -1, 2, 2]
    case = forests.Case(forest, leaves, mask)
    rows = [(place, prompt.tolist(), rest.tolist()) for place, prompt, rest, _ in case.trajectories()]
    assert [(tuple(map(int, place)), *result) for place, *result in rows] == [
        ((0, 0), prompts[0, 1:].tolist(), tokens[0, 0, :3].tolist()),  # with what was seen between the tokens that count
        ((1, 0), prompts[1, :1].tolist(), tokens[1, 0].tolist()), ((1, 1), prompts[1, :1].tolist(), tokens[1, 1, :2].tolist())]
    check(case, pack(forest, leaves, mask, [6]))


def test_a_group_is_cut_where_its_completions_differ_for_the_first_time():
    """Two end together, one ends where two others go on, and the last has nothing of them; what is not trained counts too."""
    texts = [[5, 6, 7, 8], [5, 6, 9, 0], [5, 6, 7, 8], [5, 6, 9, 1], [4, 6, 7, 8], [5, 6, 0, 0]]
    mask = np.ones((1, 6, 4), bool)
    mask[0, 5, 2:] = mask[0, :, 0] = False
    forest, leaves = of_groups(np.array([[2, 3]]), np.ones((1, 2), bool), np.array([texts]), mask)
    nodes = [forest.tokens[a:b].tolist() for a, b in zip(forest.offsets, forest.offsets[1:])]
    assert sorted(nodes) == [[0], [1], [2, 3], [4, 6, 7, 8], [5, 6], [7, 8], [9]]
    above = {tuple(nodes[i]): nodes[parent] for i, parent in enumerate(forest.parent) if parent >= 0}
    assert above == {(4, 6, 7, 8): [2, 3], (5, 6): [2, 3], (7, 8): [5, 6], (9,): [5, 6], (0,): [9], (1,): [9]}
    assert [nodes[leaf] for leaf in leaves[0]] == [[7, 8], [0], [7, 8], [1], [4, 6, 7, 8], [5, 6]]


def alike(rng):
    """Groups whose completions have two kinds of tokens, so that many begin alike, with holes and a missing one."""
    P, G, T = 2, int(rng.integers(1, 9)), int(rng.integers(1, 9))
    mask = (np.arange(T) < rng.integers(0, T + 1, (P, G, 1))) & (rng.random((P, G, T)) < 0.8)
    given = rng.integers(0, 9, (P, 3)), np.arange(3) < rng.integers(1, 4, (P, 1)), rng.integers(0, 2, (P, G, T)), mask
    return given, forests.Case(*of_groups(*given), mask)


@pytest.mark.parametrize("seed", range(30))
def test_every_beginning_of_a_group_is_computed_once(seed):
    given, case = alike(np.random.default_rng(seed))
    beginnings = {(p, *rest[:t].tolist()) for (p, _), _, rest, _ in case.trajectories() for t in range(1, len(rest) + 1)}
    used = {p: prompt for (p, _), prompt, _, _ in case.trajectories()}
    for (p, g), prompt, rest, _ in case.trajectories():
        assert prompt.tolist() == given[0][p][given[1][p]].tolist() and rest.tolist() == given[2][p, g, :len(rest)].tolist()
    if used:
        distinct = len(beginnings) + sum(map(len, used.values()))
        packed = pack(case.forest, case.leaves, case.mask, [distinct])
        check(case, packed)
        assert packed.node.shape == (1, distinct) and (packed.node >= 0).all()


@pytest.mark.parametrize("seed", range(30))
def test_sharing_beginnings_never_takes_more_slots(seed):
    """Rows that hold a part of a group: single completions fill them where subtrees leave room."""
    given, case = alike(np.random.default_rng(seed))
    if not case.mask.any():
        return
    own = [*given[:2], given[2] + 2 * np.arange(given[2].shape[1])[:, None], given[3]]  # no two completions begin alike
    length = case.longest() + seed % 5
    shared, apart = (pack(forest, leaves, case.mask, [length]) for forest, leaves in (case[:2], of_groups(*own)))
    check(case, shared)
    assert len(shared.node) <= len(apart.node)


def test_trees_fill_rows_by_their_leaves_if_that_takes_fewer():
    """Three of four completions fill a row; one row for each half of a group would be six for the three prompts."""
    tokens = np.array([[[1, 2, g, 4 + g] for g in range(2)] + [[1, 3, g, 4 + g] for g in range(2)]] * 3)
    mask, prompts = np.ones(tokens.shape, bool), np.array([[7], [8], [9]])
    packed = pack(*of_groups(prompts, np.ones((3, 1), bool), tokens, mask), mask, [10])
    assert packed.node.shape == (5, 10)


def test_what_cannot_be_packed_is_refused():
    case = forests.group(np.random.default_rng(0))
    def give(lengths=(64,), forest=case.forest, mask=case.mask):
        return pack(forest, case.leaves, mask, lengths)
    with pytest.raises(ValueError, match="a trajectory has 11 tokens, more than the 10 of the longest row; allow longer rows"):
        give([8, 10])
    with pytest.raises(ValueError, match="4 row lengths; give 1 to 3"):
        give(range(20, 24))
    with pytest.raises(ValueError, match="parent names a node that does not come before its child"):
        give(forest=case.forest._replace(parent=np.array([1, -1, 0, 0, -1, 4, 4, 4])))
    with pytest.raises(ValueError, match=r"nodes \[0\] are roots without tokens"):
        give(forest=Trees(case.forest.tokens[4:], np.maximum(case.forest.offsets - 4, 0), case.forest.parent))
    with pytest.raises(ValueError, match="mask counts tokens behind the 5 that a trajectory has after its root"):
        give(mask=case.mask | True)
    with pytest.raises(ValueError, match="mask counts tokens behind the 0 that"):
        pack(case.forest, np.where(case.leaves == 2, -1, case.leaves), case.mask, [64])


def test_no_token_that_counts_sees_tokens_behind_the_view():
    case = forests.group(np.random.default_rng(0))
    packed = pack(case.forest, case.leaves, case.mask[:, :, :3], [64])
    check(case._replace(mask=case.mask[:, :, :3]), packed)
