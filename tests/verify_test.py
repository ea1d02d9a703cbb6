"""Target-first verification equals a walk in plain Python, for any tree, tie, duplicate and invalid node."""

import jax
import numpy as np
import pytest

from specjax import trees
from specjax.sampling import SamplingState, draw
from specjax.trees import Draft
from specjax.verify.base import child
from specjax.verify.target_first import TargetFirst

ROWS, VOCAB = 64, 6
SHAPES = {
    "root": np.array([-1]),
    "chain": trees.branches(4),
    "lopsided": np.array([-1, 0, 0, 1, 1, 3, 2]),
    "bush": np.array([-1, 0, 0, 0, 0, 1, 1, 2, 5, 8]),
}


def random_draft(parents: np.ndarray, seed: int):
    rng = np.random.default_rng(seed)
    nodes = len(parents)
    tokens = rng.integers(0, VOCAB, (ROWS, nodes))
    valid = rng.random((ROWS, nodes)) < 0.85
    valid[:, 0] = True
    for node in range(1, nodes):
        valid[:, node] &= valid[:, parents[node]]
    logits = np.round(3 * rng.normal(size=(ROWS, nodes, VOCAB))).astype(np.float32)  # with ties
    for row in range(ROWS // 2):  # half of the rows can go deep
        for node in range(1, nodes):
            logits[row, parents[node], tokens[row, node]] += 4
    return Draft(trees.static(parents, valid), tokens, np.full(ROWS, nodes)), logits


def walk(parents, draft: Draft, chosen: np.ndarray, row: int) -> tuple[list[int], int]:
    """(path, next token): go to the lowest valid child that carries the node's chosen token while there is one."""
    valid, node, path = np.asarray(draft.tree.valid[row]), 0, [0]
    while True:
        below = [
            i
            for i in range(1, len(parents))
            if parents[i] == node and valid[i] and draft.tokens[row, i] == chosen[row, node]
        ]
        if not below:
            return path, chosen[row, node]
        node = below[0]
        path.append(node)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0, "mixed"])
def test_verdict_equals_a_plain_walk(shape, temperature):
    parents = SHAPES[shape]
    draft, logits = random_draft(parents, seed=len(parents))
    heat = np.arange(ROWS) % 2 if temperature == "mixed" else np.full(ROWS, temperature)
    keys = np.stack([np.zeros(ROWS), np.arange(ROWS)], axis=1).astype(np.uint32)
    sampling = SamplingState(heat.astype(np.float32), np.full(ROWS, 4), np.full(ROWS, 0.9, np.float32), keys)
    position = 10 + np.arange(ROWS)
    verifier = TargetFirst(trees.max_depth(parents))
    verdict = jax.jit(verifier.verify)(draft, logits, sampling, position)
    depth = np.asarray(draft.tree.depth[0])
    drawn = jax.jit(draw)
    nodes = range(len(parents))
    chosen = np.stack([drawn(logits[:, node], sampling, position + depth[node]) for node in nodes], axis=1)
    lengths = set()
    for row in range(ROWS):
        path, token = walk(parents, draft, chosen, row)
        assert int(verdict.count[row]) == len(path) - 1
        assert np.asarray(verdict.path[row]).tolist()[: len(path)] == path
        assert int(verdict.next_token[row]) == token
        lengths.add(len(path))
    assert verdict.path.shape == (ROWS, verifier.depth + 1)
    assert lengths >= {1, verifier.depth + 1}  # nothing and everything was accepted somewhere


def test_the_lowest_of_equal_children_is_taken():
    tree = trees.static(np.array([-1, 0, 0, 0]), np.array([[True, False, True, True]]))
    draft = Draft(tree, np.array([[0, 5, 5, 5]]), np.array([4]))
    found, node = jax.jit(child)(draft, np.array([0]), np.array([5]))
    assert bool(found[0]) and int(node[0]) == 2
    assert not bool(jax.jit(child)(draft, np.array([0]), np.array([4]))[0][0])
    assert not bool(jax.jit(child)(draft, np.array([2]), np.array([5]))[0][0])
