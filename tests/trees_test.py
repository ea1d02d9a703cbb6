"""Draft trees: depth, mask and position follow the parents, never the slot; a tree pass equals its paths fed alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import CHUNK, FIELDS, MESHES, ancestors, logits, prompts, target, tensors, wishes

from specjax import Engine, trees

LOPSIDED = np.array([-1, 0, 0, 1, 1, 3, 2])


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
