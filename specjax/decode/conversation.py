"""A conversation: each turn continues on the prefix that the cache already holds."""

from collections.abc import Callable, Sequence

from specjax.decode.engine import Engine
from specjax.decode.request import Result, Sampling


class Conversation:
    """Turns of one chat with an engine; `messages` is the transcript so far."""

    def __init__(self, engine: Engine, messages: Sequence[dict] = ()):
        self._engine, self._state = engine, None
        self.messages = [dict(message) for message in messages]

    def say(
        self, text: str, sampling: Sampling = Sampling(), stream: Callable[[int, str], None] | None = None
    ) -> Result:
        """Add a user's message and the target's answer to it.

        Raises ValueError if the message is empty or the conversation no longer fits the context; the
        transcript is then as before.
        """
        if not text.strip():
            raise ValueError("the message is empty; give it some text")
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self._engine.encode(asked, "the conversation")
        # Decoding consumes the state: if it is interrupted, the next turn has to begin afresh.
        held, self._state = self._state, None
        fresh = held is None
        state = self._engine.start([ids], [sampling], 1) if fresh else self._engine.restart(held, ids, sampling)
        self._state, (result,) = self._engine.finish(self._engine.prefill(state), [sampling], stream)
        self.messages = [*asked, {"role": "assistant", "content": result.text}]
        return result
