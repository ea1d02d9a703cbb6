"""Ways to run the step: a compiled loop over all cycles or over a slice of n, and a host loop that shows each one.

All three run the same `step` and give the same tokens.
"""

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.state import DecodeState
from specjax.decode.step import fits, step


def run(target, drafter, verifier, state: DecodeState, cycles: jax.Array) -> DecodeState:
    """Cycle until every row has finished, one of them has filled its cache, or `cycles` (a scalar) have run.

    With no bound it is a whole generation in one dispatch; with a bound it is the slice after which a server
    streams, looks for stop strings or lets requests in. The bound is data, so both are one program.
    """

    def go_on(carry):
        state, left = carry
        return state.text.running.any() & fits(state, drafter.depth + 1) & (left > 0)

    def cycle(carry):
        state, left = carry
        after = step(target, drafter, verifier, state)
        return jax.tree.map(_as_before, after, state), left - 1

    return lax.while_loop(go_on, cycle, (state, cycles))[0]


def _as_before(new, old):
    """A loop's carry keeps its split."""
    return jax.reshard(new, jax.typeof(old).sharding.spec) if isinstance(new, jax.Array) else new


UNBOUNDED = jnp.iinfo(jnp.int32).max
