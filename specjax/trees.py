"""Draft trees: which node continues which.

node      0        0 is the last accepted token, the root; a parent always stands before its children.
        / | \\      depth counts from the root, so a node's position in the text is
       1  4  6     position(root) + depth, whatever its number is.
       |  |
       2  5        The shape (number of nodes T, depth) is static; contents may differ per row. A node
       |           that is not valid in a row attends only to itself and is never accepted.
       3
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class Tree:
    """`parent`, `depth`, `valid` [B, T]; `mask` [B, T, T]: node i sees node j (its ancestors and itself)."""

    parent: jax.Array
    depth: jax.Array
    mask: jax.Array
    valid: jax.Array

    def first(self, nodes: int) -> "Tree":
        """The tree of the leading nodes: a prefix of an ordered tree is a tree."""
        return Tree(self.parent[:, :nodes], self.depth[:, :nodes], self.mask[:, :nodes, :nodes], self.valid[:, :nodes])


@struct.dataclass
class Draft:
    """What a drafter proposes: a tree and its tokens [B, T]; token 0 is the last accepted one.

    `size` [B]: how many leading nodes are worth a target pass in this cycle.
    """

    tree: Tree
    tokens: jax.Array
    size: jax.Array


def branches(*lengths: int) -> np.ndarray:
    """Parents of a root with one chain per length hanging from it: `branches(3, 2)` -> [-1, 0, 1, 2, 0, 4]."""
    parents = [-1]
    for length in lengths:
        for step in range(length):
            parents.append(0 if step == 0 else len(parents) - 1)
    return np.array(parents)


def static(parents: np.ndarray, valid: jax.Array) -> Tree:
    """A tree of fixed shape, parents [T], whose nodes are valid [B, T] per row (a child of an invalid node is not)."""
    nodes = len(parents)
    mask = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        mask[node] |= mask[parents[node]]
    depth = mask.sum(1) - 1
    shape = valid.shape
    seen = (mask & valid[:, None, :] & valid[:, :, None]) | np.eye(nodes, dtype=bool)
    return Tree(
        jnp.broadcast_to(parents, shape).astype(jnp.int32),
        jnp.broadcast_to(depth, shape).astype(jnp.int32),
        seen,
        valid,
    )


def max_depth(parents: np.ndarray) -> int:
    """Depth of the deepest node of parents [T]."""
    depth = np.zeros(len(parents), int)
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
    return int(depth.max())
