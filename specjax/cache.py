"""The key-value cache: accepted tokens only, appended after verification, never rolled back."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from specjax.models.config import ModelConfig
from specjax.models.transformer import BlockKV
from specjax.sharding import padded, spec


@struct.dataclass
class KVCache:
    """Per layer `k`, `v` [B, K, S, H]; slots at or past `length` [B] hold nothing that is ever read."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: jax.Array

    @property
    def slots(self) -> int:
        return self.k[0].shape[2]


def empty(config: ModelConfig, batch: int, slots: int, dtype) -> KVCache:
    """A cache of `slots` slots a row, zeroed, born on its shards."""
    shape = (batch, padded(config.kv_heads, "kv_heads"), slots, config.head_dim)

    def zeros():
        return tuple(jnp.zeros(shape, dtype, out_sharding=_split()) for _ in range(config.layers))

    return KVCache(zeros(), zeros(), jnp.zeros(batch, jnp.int32, out_sharding=spec("batch")))


def append(cache: KVCache, block: BlockKV, path: jax.Array, count: jax.Array, after: jax.Array) -> KVCache:
    """Append the block's entries at `path` [B, P] behind each row's length; the first `count` [B] are kept.

        slots   0 ........ length | path[0] path[1] .. | path[count] ..   (the last ones are overwritten later)

    A row must have P free slots: `dynamic_update_slice` moves a write that does not fit. `after` [B]
    (token ids, never negative) is something that was computed from this pass's reads of the cache: making
    the write depend on it keeps XLA from scheduling the write first and copying the cache to protect itself.
    """
    start = cache.length + jnp.minimum(after, 0)

    def write(slab, new):
        picked = jnp.take_along_axis(new, path[:, :, None, None], axis=1)
        return _write(slab, jnp.swapaxes(picked, 1, 2).astype(slab.dtype), start)

    k = tuple(write(slab, new) for slab, new in zip(cache.k, block.k, strict=True))
    v = tuple(write(slab, new) for slab, new in zip(cache.v, block.v, strict=True))
    return KVCache(k, v, cache.length + count)


def grow(cache: KVCache, slots: int) -> KVCache:
    """The same contents with room for `slots` slots a row."""
    extra = ((0, 0), (0, 0), (0, slots - cache.slots), (0, 0))
    return cache.replace(k=tuple(jnp.pad(x, extra) for x in cache.k), v=tuple(jnp.pad(x, extra) for x in cache.v))


def _split():
    return spec("batch", "kv_heads", None, None)


def _write(slab: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Rows of `new` [B, K, P, H] into `slab` [B, K, S, H] at slots start [B]: one in-place update a row.

    Unrolled inside `shard_map`, because the vmapped form becomes a serial loop on TPUs.
    """

    @partial(jax.shard_map, out_specs=_split())
    def local(slab, new, start):
        for row in range(slab.shape[0]):
            slab = lax.dynamic_update_slice(slab, new[row : row + 1], (row, 0, start[row], 0))
        return slab

    return local(slab, new, start)
