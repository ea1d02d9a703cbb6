"""Losses of a draft's guesses, position by position.

All take guesses [..., V] (the draft's logits), teacher [..., V] (the target's logits there; None where unused) and
labels [...] (the token that followed), and give float32 [...].
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

SHARPNESS = 3.0  # how fast the mixture of `lk` moves from KL to acceptance


def cross_entropy(guesses, teacher, labels):
    """-log q(label)."""
    return logsumexp(guesses, axis=-1) - at(guesses, labels)


def divergence(guesses, teacher, labels):
    """KL(p || q) of the target's law p over the draft's tokens."""
    of_p, of_q = logsumexp(teacher, axis=-1), logsumexp(guesses, axis=-1)
    p = jnp.exp(teacher - of_p[..., None])
    return (p * (teacher - guesses)).sum(-1) - of_p + of_q


def acceptance(guesses, teacher, labels):
    """lambda KL + (1 - lambda) TV with lambda = exp(-3 alpha), alpha = sum of min(p, q), no gradient through lambda:
    the hybrid LK loss (arXiv 2602.23881). TV(p, q) = 1 - alpha is the chance that a draft token is refused."""
    alpha = jnp.minimum(jax.nn.softmax(teacher), jax.nn.softmax(guesses)).sum(-1)
    share = jnp.exp(-SHARPNESS * jax.lax.stop_gradient(alpha))
    return share * divergence(guesses, teacher, labels) + (1 - share) * (1 - alpha)


def at(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """logits [..., V] at labels [...]. A masked sum: unlike a gather it has a cheap gradient."""
    return jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], logits, 0.0).sum(-1)


LOSSES = {"ce": cross_entropy, "kl": divergence, "lk": acceptance}
