"""The protocol of a drafter: how to propose tokens. Networks that it proposes with live in `models/`."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specjax.sampling import SamplingState
from specjax.trees import Draft


class Drafter(Protocol):
    """A frozen dataclass pytree: parameters are its leaves, everything else is static.

    `blocks`: the block sizes its plan can choose, ascending; the last is the tree's size T.
    `depth`: the deepest node; `taps`: the target features that `extend` wants (see `TargetOutput`).
    """

    blocks: tuple[int, ...]
    depth: int
    taps: tuple[int, ...]

    def init(self, batch: int, slots: int) -> Any:
        """State for `batch` rows, every array leading with B."""

    def draft(self, state: Any, tokens: jax.Array, count: jax.Array, sampling: SamplingState) -> Draft:
        """Propose a continuation of tokens [B, S], of which the first count [B] are the text so far.

        Called in explicit-sharding mode: what only gathers and compares within a row is wrapped in `rowwise`.
        """

    def extend(
        self, state: Any, tokens: jax.Array, features: tuple[jax.Array, ...], count: jax.Array, after: jax.Array
    ) -> Any:
        """Take in the first count [B] of tokens [B, P] and their target features [B, P, D]: prompt chunks and
        accepted paths alike. after [B]: the token that follows them; any, in a row that has ended."""

    def grow(self, state: Any, slots: int) -> Any:
        """The same state with room for `slots` tokens a row."""

    def cut(self, state: Any, length: jax.Array) -> Any:
        """The state without what lies behind the first length [B] tokens, from which another text goes on. At least one
        more token of that text is one that the state has seen, and will be told again."""


def last_of(old: jax.Array, new: jax.Array, count: jax.Array) -> jax.Array:
    """The last of the first count [B] of new [B, P, D]; in rows without any the old one [B, D]."""
    last = jnp.maximum(count - 1, 0)[:, None, None]
    return jnp.where((count > 0)[:, None], jnp.take_along_axis(new, last, axis=1)[:, 0], old)
