"""The protocol of a drafter: how to propose tokens. Networks that it proposes with live in `models/`."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import trees
from specjax.sampling import SamplingState
from specjax.trees import Draft


@struct.dataclass
class Stats:
    """What came of each row's drafts; prefill does not count. Integers [B]: `cycles`, `drafted`, `accepted`, `emitted`,
    `levels` (draft levels run); `drafted_at`, `accepted_at` [B, depth]: cycles that proposed, or kept, a token at each
    depth; `passes` [B, n]: cycles whose target pass had each of the drafter's n block sizes."""

    cycles: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    emitted: jax.Array
    levels: jax.Array
    drafted_at: jax.Array
    accepted_at: jax.Array
    passes: jax.Array


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

    def draft(
        self,
        state: Any,
        tokens: jax.Array,
        count: jax.Array,
        sampling: SamplingState,
        running: jax.Array,
        stats: Stats,
    ) -> Draft:
        """Propose a continuation of tokens [B, S], of which the first count [B] are the text so far.

        For decisions that concern the whole batch: which rows are running [B], and what came of their drafts so far.
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


class FixedTree:
    """What a drafter's plan is where its tree never changes: `parents` [T] (see `trees.layout`)."""

    parents: tuple[int, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        return (len(self.parents),)

    @property
    def depth(self) -> int:
        return trees.max_depth(np.array(self.parents))


def last_of(old: jax.Array, new: jax.Array, count: jax.Array) -> jax.Array:
    """The last of the first count [B] of new [B, P, D]; in rows without any the old one [B, D]."""
    last = jnp.maximum(count - 1, 0)[:, None, None]
    return jnp.where((count > 0)[:, None], jnp.take_along_axis(new, last, axis=1)[:, 0], old)
