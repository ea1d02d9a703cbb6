"""Many prompts through one batch: a row that ends makes room for the next prompt.

rows      0  AAAAAAAAAA|EEEEEE|HHHHHHHHHH      a fixed batch would wait for its longest row;
          1  BBBB|DDDDDDDDDDDD|IIIII           here only the end of the whole list does
          2  CCCCCCC|FFFFFFF|GGGGGGGGG
"""

from collections.abc import Iterator, Sequence

import numpy as np

from specjax.decode.engine import Engine
from specjax.decode.request import Result, Sampling
from specjax.decode.watch import Watch

SLICE = 8  # cycles between two looks at who has finished
SHARE = 4  # a quarter of the rows is let in at once: a prefill of a few rows costs little more than one of one row


def slots_needed(engine: Engine, prompt_tokens: int, max_new_tokens: int) -> int:
    """The cache bucket in which a request begins and ends."""
    prefilled = -(-prompt_tokens // engine.chunk) * engine.chunk
    longest = min(prompt_tokens + max_new_tokens, engine.max_context)
    return engine.bucket(max(prefilled, longest + engine.drafter.depth + 1))


def generate(
    engine: Engine, prompts: Sequence[list[int]], wishes: Sequence[Sampling], *, batch_size: int
) -> Iterator[tuple[int, Result]]:
    """Yield (index of the prompt, its result) as rows end; prompts are token ids, as `Engine.encode` gives them.

    `batch_size` rows decode in one cache, whose size the largest request decides. A row's tokens depend on its own
    prompt and wish, not on when it was let in. Raises ValueError if a wish has stop strings: nobody looks for them.
    """
    if any(wish.stop for wish in wishes):
        raise ValueError("stop strings are looked for by Engine.generate only; leave them out")
    if not prompts:
        return
    slots = max(slots_needed(engine, len(ids), wish.max_new_tokens) for ids, wish in zip(prompts, wishes, strict=True))
    state = engine.start([], [], batch_size, slots)
    rows = state.text.count.shape[0]
    together = max(engine.target.mesh.shape["data"], rows // SHARE)
    watch = Watch(engine.target.tokenizer, [()] * rows, None)
    owner: list[int | None] = [None] * rows  # the prompt that each row answers
    waiting = 0
    while waiting < len(prompts) or owner != [None] * rows:
        free = [row for row in range(rows) if owner[row] is None]
        while waiting < len(prompts) and len(free) >= min(together, len(prompts) - waiting):
            taken = range(waiting, min(waiting + together, len(prompts)))
            places, free, waiting = free[: len(taken)], free[len(taken) :], taken.stop
            fresh = engine.start([prompts[i] for i in taken], [wishes[i] for i in taken], together, slots)
            state = engine.insert(state, engine.prefill(fresh), places)
            for row, index in zip(places, taken, strict=True):
                owner[row] = index
        state = engine.decode(state, SLICE)
        running = np.asarray(state.text.running)
        for row in range(rows):
            if owner[row] is not None and not running[row]:
                yield owner[row], engine.result(state, row, watch)
                owner[row] = None
