"""Does an EAGLE draft read the target's states that it was trained on? Layer ids count what enters a layer, or what
leaves it, and a draft that is read by the other convention still guesses, only worse."""

import dataclasses
from collections.abc import Iterator, Sequence

from specjax.bench.timing import pooled
from specjax.decode.engine import Engine, Prompt
from specjax.decode.request import Sampling
from specjax.drafters.eagle import from_draft
from specjax.loading.eagle import EagleDraft
from specjax.verify.target_first import TargetFirst

SHIFTS = (-1, 0, 1)
CLEAR = 1.02  # how much better, as a ratio of tokens per cycle, a shift has to be
NODES = 4  # of the chain that is drafted


def shifted(draft: EagleDraft, layers: int) -> dict[int, EagleDraft]:
    """The draft by how many layers later than now its states are taken, of a target of `layers` layers. Raises
    ValueError if it fuses no states."""
    if not draft.config.states:
        raise ValueError("an EAGLE-1 draft reads the target's last state alone; there are no layer ids to check")
    moved = {shift: tuple(tap + shift for tap in draft.taps_among(layers)) for shift in SHIFTS}
    return {
        shift: dataclasses.replace(draft, taps=taps)
        for shift, taps in moved.items()
        if min(taps) >= 0 and max(taps) <= layers
    }


def tokens_per_cycle(
    engine: Engine, drafts: dict[int, EagleDraft], prompts: Sequence[Prompt], new_tokens: int
) -> Iterator[tuple[int, float]]:
    """Each draft's tokens per cycle at temperature 0 over all the prompts."""
    for shift, draft in drafts.items():
        drafter = from_draft(draft, engine.target, nodes=NODES, depth=NODES - 1, width=1)
        served = engine.with_method((drafter, TargetFirst(drafter.depth)))
        results = served.generate(prompts, Sampling(max_new_tokens=new_tokens), batch_size=len(prompts))
        yield shift, pooled([result.stats for result in results]).tokens_per_cycle


def better(found: dict[int, float]) -> int:
    """The shift under which the draft guesses best: 0 unless another one is clearly better."""
    best = max(found, key=found.get)
    return best if found[best] > CLEAR * found[0] else 0
