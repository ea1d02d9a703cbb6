"""Watches text grow: passes pieces on as they are certain, finds stop strings and clips at them."""

import bisect
from collections.abc import Callable, Sequence

from specjax.loading.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what a token decodes to whose character is not complete yet


class Watch:
    """One watch over the rows of a batch; `stops[row]` are the row's stop strings."""

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Sequence[Sequence[str]], stream: Callable[[int, str], None] | None
    ):
        self._tokenizer, self._stops, self._stream = tokenizer, stops, stream
        self._shown = [0] * len(stops)
        self._closed = [False] * len(stops)

    @property
    def rows(self) -> int:
        return len(self._stops)

    def see(self, row: int, tokens: list[int], done: bool) -> bool:
        """Take in a row's output so far; stream what is certain. Returns whether a stop string ended the row now."""
        if self._closed[row]:
            return False
        text = self._decode(tokens)
        spot = self._spot(row, text)
        self._closed[row] = done or spot is not None
        if self._stream is not None:
            certain = text[:spot] if self._closed[row] else text[: len(text) - self._uncertain(row, text)]
            if len(certain) > self._shown[row]:
                self._stream(row, certain[self._shown[row] :])
                self._shown[row] = len(certain)
        return spot is not None

    def clip(self, row: int, tokens: list[int]) -> tuple[list[int], str]:
        """Tokens up to the one that completes a stop string, and the text before that string."""
        text = self._decode(tokens)
        spot = self._spot(row, text)
        if spot is None:
            return tokens, text
        lengths = range(len(tokens) + 1)
        kept = bisect.bisect_left(lengths, True, key=lambda n: self._spot(row, self._decode(tokens[:n])) is not None)
        return tokens[:kept], text[:spot]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens) if self._tokenizer else ""

    def _spot(self, row: int, text: str) -> int | None:
        """Where the first stop string begins."""
        return min((text.find(stop) for stop in self._stops[row] if stop in text), default=None)

    def _uncertain(self, row: int, text: str) -> int:
        """How many characters at the end may still change or turn out to begin a stop string."""
        certain = text.rstrip(INCOMPLETE)
        begun = (n for stop in self._stops[row] for n in range(1, len(stop)) if certain.endswith(stop[:n]))
        return len(text) - len(certain) + max(begun, default=0)
