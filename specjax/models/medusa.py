"""Medusa heads: several guesses at what comes next, all from one hidden state of the target (Cai et al. 2024).

target's last hidden state of token t, after the final norm  ->  head i: residual blocks  ->  LM head: token t + 2 + i
"""

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.layers import parameter, project
from specjax.models.transformer import vocabulary_logits
from specjax.sharding import padded


class MedusaHeads(nnx.Module):
    """`heads` stacks of `layers` residual blocks x + silu(W x + b) (arXiv 2401.10774).

    Blocks begin as the identity, so a fresh head proposes the target's own next token. One LM head serves all
    stacks: the target's, or with `draft_vocab` an own `lm_head` [padded(draft_vocab), D] over fewer tokens.
    """

    def __init__(self, width: int, *, heads: int, layers: int, draft_vocab: int | None, rngs: nnx.Rngs, dtype):
        self.weight = nnx.Param(jnp.zeros((heads, layers, width, width), dtype))
        self.bias = nnx.Param(jnp.zeros((heads, layers, width), dtype))
        if draft_vocab:
            self.lm_head = parameter(rngs, (padded(draft_vocab, "vocab"), width), ("vocab", None), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The target's normed last hidden states x [B, T, D] -> each head's [B, T, heads, D]."""
        weight, bias = self.weight[...], self.bias[...]
        # All heads read the same x in their first layer: one product.
        hidden = x[:, :, None] + jax.nn.silu(project(weight[:, 0], x, (None, None)) + bias[:, 0])
        for layer in range(1, weight.shape[1]):
            heads = range(weight.shape[0])
            products = [project(weight[head, layer], hidden[:, :, head], (None,)) for head in heads]
            hidden = hidden + jax.nn.silu(jnp.stack(products, axis=2) + bias[:, layer])
        return hidden

    def logits(self, hidden: jax.Array, lm_head: jax.Array, vocab_size: int) -> jax.Array:
        """hidden [B, T, heads, D] and lm_head [V', D], of which `vocab_size` rows are tokens -> float32 logits
        [B, T, heads, V'], split over the vocabulary, its padding masked: one product for all heads."""
        batch, tokens, heads, width = hidden.shape
        flat = vocabulary_logits(lm_head, hidden.reshape(batch, tokens * heads, width), vocab_size)
        return flat.reshape(batch, tokens, heads, lm_head.shape[0])
