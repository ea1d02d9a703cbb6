"""Where a text begins to repeat itself. Small models loop, and loops flatter every draft."""

from collections.abc import Sequence

LONGEST_PERIOD, TIMES = 32, 3


def onset(tokens: Sequence[int]) -> int | None:
    """The first position from which a period of at most 32 tokens stands three times in a row; None: there is none."""
    found = [spot for period in range(1, LONGEST_PERIOD + 1) if (spot := _first_repeat(tokens, period)) is not None]
    return min(found, default=None)


def _first_repeat(tokens: Sequence[int], period: int) -> int | None:
    """The first position from which `period` tokens stand three times: a run of equal pairs one period apart."""
    need, run = period * (TIMES - 1), 0
    for spot in range(len(tokens) - period):
        run = run + 1 if tokens[spot] == tokens[spot + period] else 0
        if run == need:
            return spot - need + 1
    return None
