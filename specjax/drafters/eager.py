"""No draft: one target pass per token, the baseline that every figure is measured against."""

import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import trees
from specjax.sharding import rowwise
from specjax.trees import Draft


@struct.dataclass
class Eager:
    """A tree of the root alone."""

    blocks = (1,)
    depth = 0
    taps = ()

    def init(self, batch, slots):
        return ()

    def draft(self, state, tokens, count, sampling, running, stats):
        return rowwise(_root_alone)(tokens, count)

    def extend(self, state, tokens, features, count, after):
        return state

    def grow(self, state, slots):
        return state

    def cut(self, state, length):
        return state


def _root_alone(tokens, count) -> Draft:
    last = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)
    return Draft(trees.static(np.array([-1]), last >= 0), last, jnp.ones_like(count))
