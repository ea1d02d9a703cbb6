"""The EAGLE layer: one decoder layer that drafts token after token at feature level. All variants are flags of it.

             EAGLE-1 (arXiv 2401.15077)              EAGLE-3 (arXiv 2503.01840)
hidden g     the target's normed last state          fc of a few of the target's states, low to high
attention    of fc[embedding, g]                     of [norm(embedding), norm(g)], twice as wide
residual     fc[embedding, g]                        g
LM head      the target's, on the output             its own, on norm(output), often over fewer tokens

A pair is the token at position t + 1 and the hidden g of position t; the layer's output guesses what g at t + 1 would
be, so it is the hidden of the next pair, and the LM head reads token t + 2 from it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.attention import Attention, Earlier
from specjax.models.config import ModelConfig
from specjax.models.layers import Mlp, parameter, project, rms_norm
from specjax.models.transformer import vocabulary_logits
from specjax.sharding import padded


@dataclass(frozen=True)
class EagleConfig:
    """Shapes and variant. `layer`: those of the decoder layer and its width; `target_width`: that of the target.

    `states`: target states that fc fuses (0: EAGLE-1, whose hidden is the target's normed last state); `draft_vocab`:
    tokens of an own LM head (None: the target's). `fc_bias`: fc has one (EAGLE-1). `state_norms`: each target state is
    normed before fc, `norm_output`: what goes back in is the normed output (together EAGLE-3.1, arXiv 2605.09992);
    `norm_before_residual`: the residual is the normed hidden.
    """

    layer: ModelConfig
    target_width: int
    states: int
    draft_vocab: int | None = None
    fc_bias: bool = False
    state_norms: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    def __post_init__(self):
        flags = ("state_norms", "norm_output", "norm_before_residual")
        if not self.states and any(getattr(self, flag) for flag in flags):
            raise ValueError(f"{', '.join(flags)} are variants of EAGLE-3, which fuses target states; leave them out")
        if not self.states and self.layer.width != self.target_width:
            raise ValueError(
                f"an EAGLE-1 layer of width {self.layer.width} cannot guess states of width {self.target_width}; "
                "it needs the target's own width"
            )


class EagleLayer(nnx.Module):
    """Parameters and forward pass; the embedding is the target's and comes in with the call."""

    def __init__(self, config: EagleConfig, *, rngs: nnx.Rngs, dtype):
        layer, width = config.layer, config.layer.width
        self.config = config
        self.mlp_norm = nnx.Param(jnp.ones(width, dtype))
        self.mlp = Mlp(width, layer.mlp_width, rngs=rngs, dtype=dtype)
        joined = 2 * width
        if config.states:
            self.fc = parameter(rngs, (width, config.states * config.target_width), (None, None), dtype)
            self.embed_norm = nnx.Param(jnp.ones(width, dtype))
            self.hidden_norm = nnx.Param(jnp.ones(width, dtype))
            self.norm = nnx.Param(jnp.ones(width, dtype))
        else:
            self.fc = parameter(rngs, (width, joined), (None, None), dtype)
        if config.fc_bias:
            self.fc_bias = nnx.Param(jnp.zeros(width, dtype))
        if config.state_norms:
            self.state_norms = nnx.Param(jnp.ones((config.states, config.target_width), dtype))
        in_width = joined if config.states else width
        self.attention = Attention(layer, layer.windows[0], rngs=rngs, dtype=dtype, in_width=in_width)
        if config.draft_vocab:
            self.lm_head = parameter(rngs, (padded(config.draft_vocab, "vocab"), width), ("vocab", None), dtype)

    def fuse(self, states: tuple[jax.Array, ...]) -> jax.Array:
        """Target states [B, T, D], low to high -> hidden [B, T, W]. For EAGLE-1 the one state is taken as it is."""
        if not self.config.states:
            return states[0]
        if self.config.state_norms:
            scales, eps = self.state_norms[...], self.config.layer.norm_eps
            states = tuple(rms_norm(state, scale, eps) for state, scale in zip(states, scales, strict=True))
        return project(self.fc[...], jnp.concatenate(states, axis=-1), (None,))

    def __call__(self, embedded, hidden, rope, cache_k, cache_v, length, positions, mask, earlier: Earlier | None):
        """One pass over pairs: embedded, hidden [B, T, W] -> (output [B, T, W], k, v [B, T, K, H]).

        Cached pairs, block and mask as in `Attention`.
        """
        eps = self.config.layer.norm_eps
        if self.config.states:
            normed = rms_norm(hidden, self.hidden_norm[...], eps)
            x = jnp.concatenate([rms_norm(embedded, self.embed_norm[...], eps), normed], axis=-1)
            residual = normed if self.config.norm_before_residual else hidden
        else:
            x = project(self.fc[...], jnp.concatenate([embedded, hidden], axis=-1), (None,))
            if self.config.fc_bias:
                x = x + self.fc_bias[...]
            residual = x
        y, k, v = self.attention(x, rope, cache_k, cache_v, length, positions, mask, earlier)
        y = residual + y
        return y + self.mlp(rms_norm(y, self.mlp_norm[...], eps)), k, v

    def normed(self, output: jax.Array) -> jax.Array:
        """Output [B, T, W] as the LM head reads it."""
        return rms_norm(output, self.norm[...], self.config.layer.norm_eps) if self.config.states else output

    def fed_back(self, output: jax.Array) -> jax.Array:
        """Output [B, T, W] as the hidden of the next pair."""
        return self.normed(output) if self.config.norm_output else output

    def logits(self, output: jax.Array, lm_head: jax.Array, vocab_size: int) -> jax.Array:
        """Output [B, T, W] -> float32 logits [B, T, V'], its padding masked."""
        return vocabulary_logits(lm_head, self.normed(output), vocab_size)
