"""Building blocks shared by the target and the drafts: one weight product, norm, rotary positions, MLP."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from specjax.sharding import padded, spec

FEW_TOKENS = 256  # a pass over more gains nothing by taking the weight first, and pays for the transposition


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype) -> nnx.Param:
    """A weight [*out, *in] born on its shards, normal with variance 1 / fan-in (the last dimension's size)."""
    noise = jax.random.normal(rngs.params(), shape, jnp.float32, out_sharding=spec(*axes))
    return nnx.Param((noise * shape[-1] ** -0.5).astype(dtype))


def precision(dtype):
    """float32 has to mean float32 on accelerators too, whose default is less."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def project(w: jax.Array, x: jax.Array, axes: tuple[str | None, ...], dtype=None) -> jax.Array:
    """The one weight product: w [*O, *I] times x [B, T, *I] -> [B, T, *O] in `dtype` (default: x's).

    `axes` names the split of O.

    On CPUs, for the few tokens of a decode pass, the weight is the left operand, as it is stored: up to twice as
    fast. XLA would turn the transposition after it into the slower product, so a barrier keeps the two apart. Elsewhere
    the compiler chooses layouts, and the plain product lets it.
    """
    inner = x.ndim - 2
    of_w, of_x = tuple(range(w.ndim - inner, w.ndim)), tuple(range(2, x.ndim))
    form = {"precision": precision(x.dtype), "preferred_element_type": dtype}

    def weight_first(w, x):
        y = lax.dot_general(w, x, ((of_w, of_x), ((), ())), out_sharding=spec(*axes, "batch", None), **form)
        return jnp.moveaxis(lax.optimization_barrier(y), (-2, -1), (0, 1))

    def plain(w, x):
        return lax.dot_general(x, w, ((of_x, of_w), ((), ())), out_sharding=spec("batch", None, *axes), **form)

    if x.shape[0] * x.shape[1] > FEW_TOKENS:
        return plain(w, x)
    return lax.platform_dependent(w, x, cpu=weight_first, default=plain)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., D] over its root mean square, in float32, times scale [D]."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def rotary(positions: jax.Array, frequencies: jax.Array, factor: float) -> tuple[jax.Array, jax.Array]:
    """Positions [B, T] and inverse frequencies [H/2] -> cosines and sines [B, T, H/2], float32."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding in the half-split form: x [B, T, ..., H] with cos, sin [B, T, H/2]."""
    shape = cos.shape[:2] + (1,) * (x.ndim - 3) + cos.shape[2:]
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Mlp(nnx.Module):
    """SwiGLU: x [B, T, D] -> [B, T, D] through F = `mlp_width` hidden units."""

    def __init__(self, width: int, mlp_width: int, *, rngs: nnx.Rngs, dtype):
        hidden = padded(mlp_width, "mlp")
        self.gate_up = parameter(rngs, (2, hidden, width), (None, "mlp", None), dtype)
        self.down = parameter(rngs, (width, hidden), (None, "mlp"), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = project(self.gate_up[...], x, (None, "mlp"))
        hidden = jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]
        return project(self.down[...], hidden, (None,))
