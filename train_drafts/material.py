"""The text of a run: read and masked, some of it held back, and the draft's own vocabulary chosen from it."""

import dataclasses
from pathlib import Path

import numpy as np

from specjax.decode.engine import Engine
from specjax.telemetry import say
from train_drafts import data, packing


@dataclasses.dataclass(frozen=True)
class Material:
    """Examples to train on and those held out. token_ids [V_d]: the draft's vocabulary, draft_ids [V]: the way back
    from the target's (-1: none); both None where the draft uses the target's."""

    train: list[data.Example]
    held: list[data.Example]
    token_ids: np.ndarray | None
    draft_ids: np.ndarray | None
    fingerprint: str


def prepare(engine: Engine, path: Path, *, max_tokens: int, holdout: int, seed: int, draft_vocab: int) -> Material:
    """Read `path` for the engine's target; each choice is said in a line. `holdout` examples, and an eighth of all at
    most, are held out. Raises ValueError if too few are left."""
    target = engine.target
    longest = min(max_tokens, engine.max_context)
    examples, report = data.load(path, target.tokenizer, max_tokens=longest, template_args=engine.template_args)
    for line in report.lines():
        say(line)
    order = packing.shuffled(len(examples), np.random.PCG64([seed]))
    apart = min(holdout, len(examples) // 8)
    held, train = [examples[i] for i in order[:apart]], [examples[i] for i in order[apart:]]
    if not held:
        raise ValueError(f"{path} has {len(examples)} examples; it takes 8 or more, an eighth of which are held out")
    token_ids = draft_ids = None
    if draft_vocab:
        vocab = target.config.vocab_size
        token_ids = data.draft_vocabulary(train, draft_vocab, target.tokenizer.end_ids, vocab)
        draft_ids = np.full(vocab, -1, np.int32)
        draft_ids[token_ids] = np.arange(draft_vocab)
        share = data.coverage(held, token_ids)
        say(f"draft vocabulary: {draft_vocab:,} of {vocab:,} tokens, which cover {share:.1%} of the answers held out")
    return Material(train, held, token_ids, draft_ids, data.fingerprint(examples))
