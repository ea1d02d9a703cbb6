"""Draft trees: which node continues which.

node      0        0 is the last accepted token, the root; a parent always stands before its children.
        / | \\      depth counts from the root, so a node's position in the text is
       1  4  6     position(root) + depth, whatever its number is.
       |  |
       2  5        The shape (number of nodes T, depth) is static; contents may differ per row. A node
       |           that is not valid in a row attends only to itself and is never accepted.
       3
"""

import heapq
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

# A node by the ranks of its guesses from the root down: (0, 2) is a third guess after a best one.
Path = tuple[int, ...]


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
class Law:
    """What each node's children were drawn from: without replacement, in the order of their numbers.

    `logits` [B, N, V_d]: the draft's, to which temperature, top-k and top-p apply as they do to the target's; `of`
    [B, T]: which of the N belongs to a node (any, where it has no children); `token_ids`: the target's ids of the
    leading logits, the others being padding (None: all are the target's own tokens).
    """

    logits: jax.Array
    of: jax.Array
    token_ids: jax.Array | None


@struct.dataclass
class Draft:
    """What a drafter proposes: a tree and its tokens [B, T]; token 0 is the last accepted one.

    `size` [B]: how many leading nodes are worth a target pass in this cycle. `levels` [B]: how many levels of guesses
    the drafter has made, one after another (None: it has no levels). `law`: for verifiers
    that ask what the tokens were drawn from; None where they were not drawn.
    """

    tree: Tree
    tokens: jax.Array
    size: jax.Array
    levels: jax.Array | None = None
    law: Law | None = None


def branches(*lengths: int) -> np.ndarray:
    """Parents of a root with one chain per length hanging from it: `branches(3, 2)` -> [-1, 0, 1, 2, 0, 4]."""
    parents = [-1]
    for length in lengths:
        for step in range(length):
            parents.append(0 if step == 0 else len(parents) - 1)
    return np.array(parents)


def static(parents: np.ndarray, valid: jax.Array) -> Tree:
    """A tree of fixed shape, parents [T], whose nodes are valid [B, T] per row (a child of an invalid node is not)."""
    mask = ancestors(parents)
    depth = mask.sum(1) - 1
    shape = valid.shape
    seen = (mask & valid[:, None, :] & valid[:, :, None]) | np.eye(len(parents), dtype=bool)
    return Tree(
        jnp.broadcast_to(parents, shape).astype(jnp.int32),
        jnp.broadcast_to(depth, shape).astype(jnp.int32),
        seen,
        valid,
    )


def grown(parent: jax.Array, depth: jax.Array, valid: jax.Array, deepest: int) -> Tree:
    """A tree of any shape per row: parent, depth, valid [B, T], no valid node below one that is not, or deeper than
    `deepest`."""
    itself = jnp.eye(parent.shape[1], dtype=bool)
    mask = itself & valid[..., None]
    for _ in range(deepest):
        mask = mask | jnp.take_along_axis(mask, jnp.maximum(parent, 0)[..., None], axis=1)
    mask = (mask & valid[..., None]) | itself
    return Tree(parent.astype(jnp.int32), depth.astype(jnp.int32), mask, valid)


def with_chain(tree: Tree, kept: jax.Array, below: jax.Array, length: jax.Array, nodes: int) -> Tree:
    """The first kept [B] nodes of `tree` and behind them `length` [B] more, one after the other below node `below` [B].

        0 - 1 - 2        kept 4, below 1, length 2        0 - 1 - 2
        |                                                 |    \\
        3 - 4 - 5                                         3     4 - 5        of `nodes` nodes the others are not valid
    """
    rows, spare = tree.parent.shape[0], nodes - tree.parent.shape[1]
    number, below = jnp.broadcast_to(jnp.arange(nodes), (rows, nodes)), below[:, None]
    place = number - kept[:, None]  # in the chain; negative: of the tree
    fresh = place >= 0

    def placed(old, new):
        return jnp.where(fresh, new, jnp.pad(old, ((0, 0), (0, spare))))

    parent = placed(tree.parent, jnp.where(place == 0, below, number - 1))
    depth = placed(tree.depth, jnp.take_along_axis(tree.depth, below, axis=1) + 1 + place)
    valid = placed(tree.valid, place < length[:, None])
    mask = jnp.pad(tree.mask, ((0, 0), (0, spare), (0, spare)))
    chain = jnp.take_along_axis(mask, below[..., None], axis=1) | (fresh[:, None] & jnp.tri(nodes, dtype=bool))
    seen = jnp.where(fresh[..., None], chain, mask) & valid[:, None] & valid[..., None]
    return Tree(parent, depth, seen | jnp.eye(nodes, dtype=bool), valid)


def ancestors(parents: np.ndarray) -> np.ndarray:
    """[T, T]: which nodes lie on the path from the root to each node of parents [T], itself included."""
    seen = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        seen[node] |= seen[parents[node]]
    return seen


def depths(parents: np.ndarray) -> np.ndarray:
    """Depth [T] of each node of parents [T]."""
    return ancestors(parents).sum(1) - 1


def max_depth(parents: np.ndarray) -> int:
    """Depth of the deepest node of parents [T]."""
    return int(depths(parents).max())


def ranked(ranks: np.ndarray, limit: int) -> tuple[tuple[Path, ...], np.ndarray]:
    """The most frequent paths, at most `limit`, and the share of the n positions that each is right at, non-increasing.

    ranks [n, heads]: at each position, how many guesses of head `depth - 1` stand before the right token; guesses from
    `limit` on are no candidates, so a rank of `limit` or more also stands for a token that cannot be guessed at all.
    A node is accepted where the ranks begin with its path, so its frequency is its worth, and a path is never more
    frequent than its beginning: the first N - 1 paths are the best tree of N nodes, for every N. Of equally frequent
    paths the shallowest comes first, then the one of the lowest ranks. (Medusa, arXiv 2401.10774, searches by products
    of each head's accuracies instead, as if the heads were right independently.)
    Raises ValueError without any position.
    """
    if not len(ranks):
        raise ValueError("there is no position to count draft paths at; calibrate on more text")
    positions, found = len(ranks), []
    for depth in range(1, ranks.shape[1] + 1):
        ranks = ranks[ranks[:, depth - 1] < limit]
        paths, counts = np.unique(ranks[:, :depth], axis=0, return_counts=True)
        found += [(-count, depth, tuple(path)) for path, count in zip(paths.tolist(), counts.tolist())]
    best = sorted(found)[:limit]
    return tuple(path for _, _, path in best), np.array([-count for count, _, _ in best]) / positions


def likeliest(shares: Sequence[float], nodes: int, depth: int) -> tuple[Path, ...]:
    """The `nodes` - 1 paths, none longer than `depth`, that are most often right if the guess of rank i is in shares[i]
    of all places, whatever stands above it; level by level, fewer where there are no more.

    shares do not increase, so a path is never likelier than its beginning, and taking the likeliest again and again
    makes the best tree. (Sequoia, arXiv 2402.12374, finds it by dynamic programming.)
    """
    found, waiting = [], [(-1.0, 0, ())]
    while waiting and len(found) < nodes:
        share, length, path = heapq.heappop(waiting)
        found.append(path)
        if length < depth:
            for rank, more in enumerate(shares):
                heapq.heappush(waiting, (share * more, length + 1, (*path, rank)))
    return tuple(sorted(found[1:], key=lambda path: (len(path), path)))


def chain(depth: int) -> tuple[Path, ...]:
    """The paths of `depth` best guesses in a row."""
    return tuple((0,) * step for step in range(1, depth + 1))


def layout(paths: Sequence[Path]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Paths in order of addition -> per node, the root first, its parent [T] and the rank of its guess [T].

    Raises ValueError if a path stands before its parent or twice.
    """
    number = {(): 0}
    for path in paths:
        if path in number or path[:-1] not in number:
            raise ValueError(f"tree path {path} stands twice or before its parent; list parents first")
        number[path] = len(number)
    parents = (-1, *(number[path[:-1]] for path in paths))
    return parents, (0, *(path[-1] for path in paths))


def expected_tokens(frequency: np.ndarray) -> float:
    """Tokens per cycle, the target's own included, that a tree promises whose paths are so frequent [T - 1]."""
    return 1.0 + float(np.sum(frequency))
