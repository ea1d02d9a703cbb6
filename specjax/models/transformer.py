"""The target: a decoder of the Llama, Mistral, Qwen2 and Qwen3 families.

Tokens in; logits, features and block KV out.
"""

import jax
import jax.numpy as jnp
from flax import nnx, struct

from specjax.models.attention import MASKED, Attention
from specjax.models.config import ModelConfig
from specjax.models.layers import Mlp, parameter, project, rms_norm, rotary
from specjax.sharding import padded, spec


@struct.dataclass
class BlockKV:
    """Keys and values of a block that is not in the cache yet: per layer [B, T, K, H]."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


@struct.dataclass
class TargetOutput:
    """What one target pass gives; it writes nothing.

    `logits` [B, T', V'] float32 at the positions asked for, split over the vocabulary, its padding masked: all of
    them on every device would be dear, and few are looked at; `features`: the
    tapped hidden states [B, T, D] (tap i: what enters layer i, so 0 is the embedding and L the last
    layer's output before the final norm).
    """

    logits: jax.Array
    features: tuple[jax.Array, ...]
    block_kv: BlockKV


class Block(nnx.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, window: int | None, *, rngs: nnx.Rngs, dtype):
        self.eps = config.norm_eps
        self.attention_norm = nnx.Param(jnp.ones(config.width, dtype))
        self.attention = Attention(config, window, rngs=rngs, dtype=dtype)
        self.mlp_norm = nnx.Param(jnp.ones(config.width, dtype))
        self.mlp = Mlp(config.width, config.mlp_width, rngs=rngs, dtype=dtype)

    def __call__(self, x, rope, cache_k, cache_v, length, positions, mask):
        h = rms_norm(x, self.attention_norm[...], self.eps)
        y, k, v = self.attention(h, rope, cache_k, cache_v, length, positions, mask)
        x = x + y
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps)), k, v


class Transformer(nnx.Module):
    """Parameters and forward pass; `config` says the shapes, the current mesh how they are split."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = config
        vocab = padded(config.vocab_size, "vocab")
        self.embed = parameter(rngs, (vocab, config.width), ("vocab", None), dtype)
        self.layers = nnx.List([Block(config, window, rngs=rngs, dtype=dtype) for window in config.windows])
        self.norm = nnx.Param(jnp.ones(config.width, dtype))
        if not config.tied:
            self.lm_head = parameter(rngs, (vocab, config.width), ("vocab", None), dtype)

    def __call__(self, tokens, positions, cache, mask, *, at=None, taps: tuple[int, ...] = ()) -> TargetOutput:
        """One pass over a block on top of a cached prefix.

        tokens, positions [B, T]; cache with `k`, `v` (per layer [B, K, S, H]) and `length` [B]; mask
        [B | 1, T, T]; `at` [B, n]: block indices whose logits are wanted (default all).
        """
        x = self.embed[...].at[tokens].get(out_sharding=spec("batch", None, None))
        rope = rotary(positions, self.config.rope.frequencies(self.config.head_dim), self.config.rope.attention_factor)
        features, keys, values = [], [], []
        for layer, cache_k, cache_v in zip(self.layers, cache.k, cache.v, strict=True):
            features.append(x)
            x, k, v = layer(x, rope, cache_k, cache_v, cache.length, positions, mask)
            keys.append(k)
            values.append(v)
        features.append(x)
        wanted = x if at is None else jnp.take_along_axis(x, at[..., None], axis=1)
        logits = self.logits(self.normed(wanted))
        block_kv = BlockKV(tuple(keys), tuple(values))
        return TargetOutput(logits, tuple(features[i] for i in taps), block_kv)

    def normed(self, x: jax.Array) -> jax.Array:
        """The last layer's output [B, T, D] as the language model head reads it."""
        return rms_norm(x, self.norm[...], self.config.norm_eps)

    @property
    def head(self) -> jax.Array:
        """The language model head [V', D]: the embedding where the two are tied."""
        return (self.embed if self.config.tied else self.lm_head)[...]

    def logits(self, x: jax.Array) -> jax.Array:
        """Normed hidden states [B, T, D] -> float32 logits [B, T, V'], split over the vocabulary."""
        return vocabulary_logits(self.head, x, self.config.vocab_size)


def vocabulary_logits(lm_head: jax.Array, x: jax.Array, vocab_size: int) -> jax.Array:
    """lm_head [V', D], of which `vocab_size` rows are tokens, times x [B, T, D] -> float32 [B, T, V'], split over the
    vocabulary, its padding masked."""
    logits = project(lm_head, x, ("vocab",), jnp.float32)
    if logits.shape[-1] == vocab_size:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, MASKED)
