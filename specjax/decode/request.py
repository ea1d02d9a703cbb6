"""What a caller asks for and gets back."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from specjax.sampling import SamplingState

MAX_SEED, MAX_COUNT = 2**32, 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to continue a prompt.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; `seed` fixes the text at any temperature.
    `stop`: strings that end the text (they are cut off); `ignore_end`: go on past end tokens.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_end: bool = False

    def __post_init__(self):
        def need(ok: bool, name: str, what: str):
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {what}")

        need(_is_count(self.max_new_tokens), "max_new_tokens", "an integer from 0 to 2^31 - 1")
        need(_is_real(self.temperature) and self.temperature >= 0, "temperature", "a number from 0 up")
        need(_is_count(self.top_k), "top_k", "an integer from 0 (off) to 2^31 - 1")
        need(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number above 0 and at most 1")
        need(_is_int(self.seed) and 0 <= self.seed < MAX_SEED, "seed", "an integer from 0 to 2^32 - 1")
        need(
            not isinstance(self.stop, str) and all(isinstance(s, str) and s for s in self.stop),
            "stop",
            "non-empty strings",
        )


def sampling_rows(wishes: Sequence[Sampling]) -> SamplingState:
    """Host arrays of one row per wish; the seed is the low word of a request's key."""
    return SamplingState(
        np.array([wish.temperature for wish in wishes], np.float32),
        np.array([wish.top_k for wish in wishes], np.int32),
        np.array([wish.top_p for wish in wishes], np.float32),
        np.array([[0, wish.seed] for wish in wishes], np.uint32),
    )


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """Counts of one request. A cycle is one target pass after prefill; prefill's own token belongs to none.

    `drafted_at[d]`, `accepted_at[d]`: cycles that proposed, or kept, a token at depth d + 1; `levels`: draft levels
    run; `passes`: cycles whose target pass had each of the drafter's block sizes.
    """

    cycles: int
    emitted: int
    drafted: int
    accepted: int
    drafted_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    levels: int
    passes: tuple[int, ...]

    @property
    def tokens_per_cycle(self) -> float:
        """Mean tokens a cycle emits, the target's own (bonus) token included."""
        return self.emitted / self.cycles if self.cycles else 0.0

    @property
    def accepted_per_cycle(self) -> float:
        """Mean draft tokens a cycle keeps."""
        return self.accepted / self.cycles if self.cycles else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of all cycles that kept a token at depth 1, 2, ...: not conditional on the depth before."""
        return [kept / self.cycles if self.cycles else 0.0 for kept in self.accepted_at]

    @property
    def conditional_acceptance_by_depth(self) -> list[float]:
        """Share of the cycles that kept depth d - 1 and proposed depth d that also kept depth d."""
        before = (self.cycles, *self.accepted_at)
        return [kept / min(b, d) if min(b, d) else 0.0 for kept, b, d in zip(self.accepted_at, before, self.drafted_at)]

    @property
    def levels_per_cycle(self) -> float:
        """Mean draft levels that a cycle runs; 0 for a drafter that has none."""
        return self.levels / self.cycles if self.cycles else 0.0

    def mean_over_passes(self, figures: Sequence[float]) -> float:
        """The mean over target passes of a figure that each of the drafter's block sizes has."""
        return float(np.dot(self.passes, figures)) / self.cycles if self.cycles else 0.0

    def __add__(self, other: "GenerationStats") -> "GenerationStats":
        def added(a: int | tuple[int, ...], b: int | tuple[int, ...]) -> int | tuple[int, ...]:
            return a + b if isinstance(a, int) else tuple(x + y for x, y in zip(a, b, strict=True))

        return GenerationStats(**{name: added(count, getattr(other, name)) for name, count in vars(self).items()})


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished text.

    `tokens` holds the end token if there was one; `finish_reason` is "stop" or "length"; `context_full`: it was
    the context, not max_new_tokens, that set the length. `stats` count whole cycles, also the few that had run
    past a stop string before it was found.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: GenerationStats
    prompt_tokens: int
    context_full: bool = False


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value) -> bool:
    return _is_int(value) and 0 <= value < MAX_COUNT


def _is_real(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
