"""Draft trees: depth, mask and position follow the parents, never the slot; a tree pass equals its paths fed alone;
ranked paths make the best tree of every size."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import CHUNK, FIELDS, MESHES, ancestors, logits, prompts, target, tensors, wishes

from specjax import Engine, trees

LOPSIDED = np.array([-1, 0, 0, 1, 1, 3, 2])
SPARSE = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 3), (0, 0, 2))  # not all ranks in use, nor in order


def test_depth_and_mask_of_a_lopsided_tree():
    tree = trees.static(LOPSIDED, np.ones((2, 7), bool))
    assert tree.depth[0].tolist() == [0, 1, 1, 2, 2, 3, 2]
    assert np.flatnonzero(tree.mask[1, 5]).tolist() == [0, 1, 3, 5]
    np.testing.assert_array_equal(tree.mask[0], ancestors(LOPSIDED))
    assert tree.parent[1].tolist() == LOPSIDED.tolist()
    assert trees.max_depth(LOPSIDED) == 3


def test_an_invalid_node_sees_itself_and_is_seen_by_no_other():
    valid = np.array([[True, True, False, True, True, True, True]])
    mask = np.asarray(trees.static(LOPSIDED, valid).mask[0])
    assert np.flatnonzero(mask[2]).tolist() == [2]
    assert np.flatnonzero(mask[:, 2]).tolist() == [2]


def test_branches_hang_from_the_root():
    assert trees.branches(3, 2).tolist() == [-1, 0, 1, 2, 0, 4]
    assert trees.branches(4).tolist() == [-1, 0, 1, 2, 3]
    assert trees.max_depth(trees.branches(3, 2)) == 3
    assert trees.max_depth(np.array([-1])) == 0


def test_leading_nodes_are_a_tree():
    part = trees.static(LOPSIDED, np.ones((1, 7), bool)).first(4)
    whole = trees.static(LOPSIDED[:4], np.ones((1, 4), bool))
    for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_chain_hangs_behind_the_beginning_of_a_tree():
    """Below another node in each row, the tree cut off at another one, and one node invalid."""
    valid = np.array([[True] * 7, [True, True, False, True, True, True, False]])
    tree = trees.static(LOPSIDED, valid)
    kept, below, length = np.array([4, 6]), np.array([2, 5]), np.array([2, 1])
    got = jax.jit(trees.with_chain, static_argnums=4)(tree, kept, below, length, 9)
    for row, parents in enumerate([[-1, 0, 0, 1, 2, 4], [-1, 0, 0, 1, 1, 3, 5]]):
        size = len(parents)
        known = np.array([*valid[row, : kept[row]], *[True] * length[row]])
        assert got.parent[row, :size].tolist() == parents
        assert got.depth[row, :size].tolist() == trees.depths(np.array(parents)).tolist()
        assert got.valid[row].tolist() == [*known, *[False] * (9 - size)]
        want = np.eye(9, dtype=bool)
        want[:size, :size] |= ancestors(parents) & known & known[:, None]
        np.testing.assert_array_equal(got.mask[row], want)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_tree_pass_equals_every_path_fed_as_plain_text(mesh):
    """For prefixes of 1 and 17 tokens in one batch."""
    method = Engine(target(MESHES[mesh]), chunk=CHUNK)
    asked = prompts([1, 17])
    state = method.prefill(method.start(asked, wishes(2), 2))
    tokens = np.random.default_rng(5).integers(0, 97, (2, 7))

    @jax.jit
    def tree_pass(leaves, kv, tokens):
        tree = trees.static(LOPSIDED, jnp.ones(tokens.shape, bool))
        positions = kv.length[:, None] + jax.reshard(tree.depth, jax.typeof(tokens).sharding.spec)
        mask = jax.reshard(tree.mask, jax.P(jax.typeof(tokens).sharding.spec[0], None, None))
        return method.target.module(leaves)(tokens, positions, kv, mask).logits

    with jax.set_mesh(method.target.mesh):
        on_mesh = jax.device_put(tokens, state.text.tokens.sharding)
        got = np.asarray(tree_pass(method.target.leaves, state.cache, on_mesh))[..., :97]
    weights = tensors(FIELDS)
    for row, prompt in enumerate(asked):
        for node in range(7):
            path = np.flatnonzero(ancestors(LOPSIDED)[node])
            want = logits(FIELDS, weights, prompt + tokens[row, path].tolist())[-1]
            np.testing.assert_allclose(got[row, node], want, atol=1e-4)


def every_tree(heads: int, guesses: int, nodes: int) -> set[frozenset]:
    """All prefix-closed sets of `nodes` - 1 paths."""
    found = {frozenset()}
    for _ in range(nodes - 1):
        grown = ((tree, path) for tree in found for path in tree | {()} if len(path) < heads)
        found = {tree | {(*path, rank)} for tree, path in grown for rank in range(guesses) if (*path, rank) not in tree}
    return found


def accepted(tree, ranks: np.ndarray) -> float:
    """Tokens per cycle of a tree, counted: at each position the longest path that the right tokens follow, and one."""
    return 1 + np.mean([max((len(p) for p in tree if tuple(right[: len(p)]) == p), default=0) for right in ranks])


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_beginning_of_the_ranked_paths_is_the_best_tree_of_its_size(seed, nodes):
    rng = np.random.default_rng(seed)
    ranks = rng.choice([[0, 0, 0], [0, 1, 2], [1, 0, 0], [1, 1, 1], [2, 2, 0], [7, 0, 1], [0, 3, 0]], 40)
    paths, frequency = trees.ranked(ranks, 5)
    best = max(accepted(tree, ranks) for tree in every_tree(3, 5, nodes))
    assert accepted(paths[: nodes - 1], ranks) == pytest.approx(best)
    assert trees.expected_tokens(frequency[: nodes - 1]) == pytest.approx(best)


def test_ranked_paths_are_counted_and_ties_go_to_the_shallow_and_low():
    ranks = np.random.default_rng(4).geometric([0.5, 0.4, 0.3], (400, 3)) - 1
    paths, frequency = trees.ranked(ranks, 63)
    for path, share in zip(paths, frequency, strict=True):
        assert share == np.mean([tuple(right[: len(path)]) == path for right in ranks])
    assert len(paths) == 63 and (np.diff(frequency) <= 0).all() and trees.layout(paths)
    paths, frequency = trees.ranked(np.array([[1, 0], [0, 2], [0, 1], [3, 0], [0, 9], [1, 0]]), 6)
    assert paths == ((0,), (1,), (1, 0), (3,), (0, 1), (0, 2))
    np.testing.assert_allclose(frequency, [3 / 6, 2 / 6, 2 / 6, 1 / 6, 1 / 6, 1 / 6])


def test_tokens_that_cannot_be_guessed_make_no_path_and_still_count():
    paths, frequency = trees.ranked(np.array([[9, 0], [9, 0], [9, 9], [0, 9]]), 8)
    assert paths == ((0,),) and frequency.tolist() == [1 / 4]
    assert trees.ranked(np.full((3, 2), 9), 8)[0] == ()
    with pytest.raises(ValueError, match="no position to count draft paths at; calibrate on more text"):
        trees.ranked(np.zeros((0, 2), int), 8)


def test_layout_keeps_the_order_of_addition():
    assert trees.layout(SPARSE) == ((-1, 0, 0, 1, 0, 1, 2, 3), (0, 0, 1, 0, 2, 1, 3, 2))
    assert trees.layout(trees.chain(3)) == ((-1, 0, 1, 2), (0, 0, 0, 0))
    with pytest.raises(ValueError, match=r"path \(0, 0\) stands twice or before its parent"):
        trees.layout(((0, 0), (0,)))


def test_likeliest_paths_are_those_of_the_highest_products_level_by_level():
    shares, depth = [0.5, 0.19, 0.11], 4
    every = [path for length in range(1, depth + 1) for path in itertools.product(range(3), repeat=length)]
    worth = {path: np.prod([shares[rank] for rank in path]) for path in every}
    for nodes in (2, 3, 8, 17, 40):
        paths = trees.likeliest(shares, nodes, depth)
        assert set(paths) == set(sorted(every, key=worth.get, reverse=True)[: nodes - 1])
        assert list(paths) == sorted(paths, key=lambda path: (len(path), path))
        parents, ranks = trees.layout(paths)
        assert len(parents) == len(ranks) == nodes
    assert len(trees.likeliest(shares, 1000, 2)) == 3 + 9
    assert trees.likeliest([0.5], 4, 3) == trees.chain(3)
