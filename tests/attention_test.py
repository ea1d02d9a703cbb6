"""Attention over prefix and block, merged, equals one softmax over both in numpy."""

import jax
import numpy as np
import pytest

from specjax.models.attention import attend
from specjax.sharding import make_mesh

ROWS, NODES, KEYS, HEADS, GROUPS, SIZE, SLOTS = 4, 5, 7, 2, 3, 8, 12
LENGTH = np.array([0, 1, 7, 12])


@pytest.fixture(autouse=True)
def one_device():
    with jax.set_mesh(make_mesh()):
        yield


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(ROWS, NODES, HEADS, GROUPS, SIZE)).astype(dtype)
    k, v = rng.normal(size=(2, ROWS, KEYS, HEADS, SIZE)).astype(dtype)
    cache_k, cache_v = rng.normal(size=(2, ROWS, HEADS, SLOTS, SIZE)).astype(dtype)
    for row, length in enumerate(LENGTH):  # what lies behind the length must not be read
        cache_k[row, :, length:] = cache_v[row, :, length:] = 1e3
    depth = np.array([0, 1, 1, 2, 3, 2, 4])
    mask = rng.random((ROWS, NODES, KEYS)) < 0.5
    mask |= np.eye(NODES, KEYS, dtype=bool)
    positions = LENGTH[:, None] + depth
    return q, k, v, cache_k, cache_v, positions, mask


def one_softmax(q, k, v, cache_k, cache_v, positions, mask, window) -> np.ndarray:
    out = np.zeros_like(q)
    for row, node, head, group in np.ndindex(ROWS, NODES, HEADS, GROUPS):
        seen = [slot for slot in range(LENGTH[row]) if window is None or slot > positions[row, node] - window]
        nodes = [
            other
            for other in range(KEYS)
            if mask[row, node, other] and (window is None or positions[row, other] > positions[row, node] - window)
        ]
        keys = np.concatenate([cache_k[row, head, seen], k[row, nodes, head]])
        values = np.concatenate([cache_v[row, head, seen], v[row, nodes, head]])
        scores = keys @ q[row, node, head, group]
        weights = np.exp(scores - scores.max())
        out[row, node, head, group] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_merged_attention_equals_one_softmax(window):
    """Rows with nothing, one slot, some and all slots cached; more block keys than queries."""
    q, k, v, cache_k, cache_v, positions, mask = inputs()
    got = jax.jit(attend, static_argnums=9)(
        q, k, v, cache_k, cache_v, LENGTH, positions[:, :NODES], positions, mask, window
    )
    want = one_softmax(q, k, v, cache_k, cache_v, positions, mask, window)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_extreme_scores_neither_overflow_nor_vanish():
    q, k, v, cache_k, cache_v, positions, mask = inputs()
    got = jax.jit(attend)(100 * q, k, v, cache_k, cache_v, LENGTH, positions[:, :NODES], positions, mask)
    want = one_softmax(100 * q, k, v, cache_k, cache_v, positions, mask, None)
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_a_mask_for_all_rows_is_one_for_each():
    q, k, v, cache_k, cache_v, positions, mask = inputs()
    run = jax.jit(attend)
    shared = run(q, k, v, cache_k, cache_v, LENGTH, positions[:, :NODES], positions, mask[:1])
    each = run(q, k, v, cache_k, cache_v, LENGTH, positions[:, :NODES], positions, np.repeat(mask[:1], ROWS, 0))
    np.testing.assert_array_equal(shared, each)
