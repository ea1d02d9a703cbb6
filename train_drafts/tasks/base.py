"""What all tasks share: labels and losses of drafts that guess several tokens ahead at every place of a text.

text      ... t   t+1    t+2    t+3        at place t, guess 0 is token t + 2, guess 1 token t + 3, ...; a guess
                  root   guess  guess      teaches wherever both its token and the root are the assistant's
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from specjax.decode.target import Target
from specjax.drafters.base import Drafter
from specjax.models.config import ModelConfig
from specjax.models.transformer import Transformer, vocabulary_logits
from specjax.sharding import padded, rowwise, spec
from train_drafts import losses
from train_drafts.packing import Batch

PLACES = 2**26  # logits that a chunk of positions may have: its memory, a few times over
ROUND = 128  # rows of zeros fill a draft vocabulary up to a multiple, so that checkpoints fit any mesh that divides it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, from which of the target's states, and with which loss.

    Loss: scale * sum over guesses of decay^i * `loss`, which is `ce` (the token that followed), `kl` (the target's own
    law there) or `lk` (acceptance itself). `prompts`: how much a place counts that the assistant did not write.
    `draft_vocab`: tokens of the draft's own LM head, which starts as the target's rows (0: the target's whole head,
    frozen).
    """

    draft_vocab: int = 8192
    loss: str = "kl"
    scale: float = 1.0
    decay: float = 0.8
    prompts: float = 0.0

    spans: ClassVar[bool]  # whether nothing is looked at that stands before the answers

    def __post_init__(self):
        if self.draft_vocab < 0:
            raise ValueError(f"draft_vocab is {self.draft_vocab}; give 0 for the target's whole vocabulary, or more")
        if not 0 <= self.prompts < float("inf") or (self.prompts and self.loss == "ce"):
            raise ValueError(
                f"prompts {self.prompts} does not go with loss {self.loss!r}; give 0, or more with a loss of the "
                "target's own law"
            )
        if self.loss not in losses.LOSSES:
            raise ValueError(f"loss {self.loss!r} is unknown; choose one of {', '.join(losses.LOSSES)}")

    @property
    def guesses(self) -> int:
        """Tokens guessed at each place."""
        raise NotImplementedError

    def taps(self, config: ModelConfig) -> tuple[int, ...]:
        """The target's states that a step takes, ascending; the last one is the one that its LM head reads."""
        raise NotImplementedError

    def declare(self, target: Target) -> tuple[nnx.GraphDef, nnx.State]:
        """Shapes, dtypes and shardings of what is trained: float32, whatever the target runs in."""
        with jax.set_mesh(target.mesh):
            return nnx.split(jax.eval_shape(lambda: self._fresh(target.config)))

    def init(self, target: Target, token_ids: np.ndarray | None) -> nnx.State:
        """The parameters that training starts from; token_ids [V_d]: the draft's vocabulary."""

        def make(leaves, token_ids):
            draft, model = self._fresh(target.config), target.module(leaves)
            self._start(draft, model)
            if self.draft_vocab:
                draft.lm_head[...] = self._draft_rows(model.head, token_ids).astype(jnp.float32)
            return nnx.state(draft)

        with jax.set_mesh(target.mesh):
            return jax.jit(make)(target.leaves, token_ids)

    def outputs(self, draft: nnx.Module, target: Transformer, batch: Batch, states: jax.Array, key=None) -> jax.Array:
        """States [R, T, taps, D] -> what the LM head reads for each guess [R, T, guesses, W]; `key`: of the noise that
        a training step may add."""
        raise NotImplementedError

    def feature_loss(self, outputs: jax.Array, hidden: jax.Array) -> jax.Array | None:
        """A further loss of each guess at each place [R, T, guesses], by what the target's LM head reads [R, T, D]."""
        return None

    def export(self, params: nnx.State, token_ids: np.ndarray | None, target: Target, about: Mapping[str, Any]):
        """The draft as it is served and stored. `about`: its `target`, `template_args` and `training`."""
        raise NotImplementedError

    def drafters(self, draft, target: Target) -> dict[str, Drafter]:
        """How an exported draft is served in evaluations, by the name of the shape: the same shapes every time, so that
        curves compare and nothing compiles again during training."""
        raise NotImplementedError

    def coefficients(self) -> np.ndarray:
        """Each guess's share of the loss [guesses]."""
        return self.scale * self.decay ** np.arange(self.guesses)

    def labels(self, batch: Batch, ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """What each guess should be at each place of batch [..., T], and which places teach it: [..., T, guesses] both.

        Labels are draft ids by ids [V] (None: the target's own), -1 where the draft has no such token.
        """
        taught = self._within(batch.segment, batch.mask)
        labels = jnp.stack([jnp.roll(batch.tokens, -2 - guess, axis=-1) for guess in range(self.guesses)], axis=-1)
        if ids is not None:
            labels = ids.at[labels].get(out_sharding=jax.typeof(labels).sharding.spec)
        return labels, taught

    def loss_sums(self, draft, target: Transformer, token_ids, batch: Batch, states, labels, taught, key):
        """Per guess: the loss [guesses], and how often the best candidate was right [guesses], summed over the places
        taught.

        `target`: the frozen model; token_ids [V_d] (None: no draft vocabulary); states [R, T, taps, D]: those of
        `taps`; labels, taught [R, T, guesses] as `labels` gives them; key: of noise. Places whose label the draft
        cannot say add no loss. Places are taken in chunks whose logits are made anew for the gradient: a large
        vocabulary costs time, not memory.
        """
        outputs, hidden = self.outputs(draft, target, batch, states, key), target.normed(states[:, :, -1])
        measure, size = rowwise(_summed(losses.LOSSES[self.loss])), self._vocab(target)
        weight = taught.astype(jnp.float32)
        if self.prompts:
            elsewhere = self._within(batch.segment, batch.segment > 0) & ~taught
            weight = jnp.where(elsewhere, self.prompts, weight)
        lm_head, teacher_rows = self._lm_head(draft, target), target.head
        if token_ids is not None:
            teacher_rows = self._draft_rows(target.head, token_ids)
        chunk = self._chunk(*hidden.shape[:2], size)
        beyond = jnp.pad(hidden, ((0, 0), (0, self.guesses), (0, 0)))

        def part(totals, start):
            def cut(x, more=0):
                return lax.dynamic_slice_in_dim(x, start, chunk + more, axis=1)

            # Guess by guess: stacking the teacher's laws, each a place further on, would cost as much as a product.
            laws = None
            if self.loss != "ce":
                laws = vocabulary_logits(teacher_rows, cut(beyond, self.guesses), size)
            sums = []
            for guess in range(self.guesses):
                logits = vocabulary_logits(lm_head, cut(outputs)[:, :, guess], size)
                teacher = None if laws is None else laws[:, 1 + guess : 1 + guess + chunk]
                places = (cut(x)[..., guess] for x in (labels, taught, weight))
                sums.append(measure(logits, teacher, *places))
            return tuple(total + jnp.stack(rows).sum(1) for total, rows in zip(totals, zip(*sums))), None

        totals = (jnp.zeros(self.guesses), jnp.zeros(self.guesses))
        if chunk == hidden.shape[1]:
            (sums, right), _ = part(totals, 0)
        else:
            starts = jnp.arange(0, hidden.shape[1], chunk)
            (sums, right), _ = lax.scan(jax.checkpoint(part), totals, starts)
        further = self.feature_loss(outputs, hidden)
        if further is not None:
            sums = sums + jnp.where(taught & (labels >= 0), further, 0.0).sum((0, 1))
        return sums, right

    def ranks(self, draft, target: Transformer, batch: Batch, states, labels) -> jax.Array:
        """How many guesses stand before the right one: states as above, labels [R, T, guesses] -> the same shape,
        beyond any rank where the draft cannot say it. Taken in chunks, as in `loss_sums`."""
        outputs, size = self.outputs(draft, target, batch, states), self._vocab(target)
        chunk, lm_head = self._chunk(*outputs.shape[:2], size), self._lm_head(draft, target)

        def before(logits, labels):
            right = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)
            equal = (logits == right) & (jnp.arange(logits.shape[-1]) < labels[..., None])
            return jnp.where(labels < 0, jnp.iinfo(jnp.int32).max, ((logits > right) | equal).sum(-1))

        def part(start):
            cut = [lax.dynamic_slice_in_dim(x, start, chunk, axis=1) for x in (outputs, labels)]
            each = [vocabulary_logits(lm_head, cut[0][:, :, guess], size) for guess in range(self.guesses)]
            ranks = [rowwise(before)(logits, cut[1][..., guess]) for guess, logits in enumerate(each)]
            return jnp.stack(ranks, axis=-1)

        parts = lax.map(part, jnp.arange(0, outputs.shape[1], chunk))
        return jnp.moveaxis(parts, 0, 1).reshape(labels.shape)

    def _within(self, segment: jax.Array, mask: jax.Array) -> jax.Array:
        """Where the root and the label of each guess are in the place's own sequence and in `mask`: [..., T, guesses],
        of segment and mask [..., T]."""
        root = _ahead(mask, segment, 1)
        return jnp.stack([root & _ahead(mask, segment, 2 + guess) for guess in range(self.guesses)], axis=-1)

    def _fresh(self, config: ModelConfig) -> nnx.Module:
        """The module, with any parameters."""
        raise NotImplementedError

    def _start(self, draft: nnx.Module, target: Transformer) -> None:
        """Set the parameters, but for the LM head's rows, to where training starts."""

    def _vocab(self, target: Transformer) -> int:
        return self.draft_vocab or target.config.vocab_size

    def _lm_head(self, draft: nnx.Module, target: Transformer) -> jax.Array:
        return draft.lm_head[...] if self.draft_vocab else target.head

    @property
    def _rows(self) -> int:
        """Rows that a draft vocabulary is trained with, before what the mesh may need more."""
        return -(-self.draft_vocab // ROUND) * ROUND

    def _draft_rows(self, lm_head: jax.Array, token_ids: jax.Array) -> jax.Array:
        """The rows of lm_head [V', D] for token_ids [V_d], zeros below, split like a head of their own."""
        rows = lm_head.at[token_ids].get(out_sharding=spec(None, None))
        surplus = padded(self._rows, "vocab") - len(token_ids)
        return jax.reshard(jnp.pad(rows, ((0, surplus), (0, 0))), spec("vocab", None))

    def _chunk(self, rows: int, tokens: int, vocab: int) -> int:
        """Positions a row that are taken at once: the largest divisor of `tokens` by halving that fits."""
        chunk = tokens
        while chunk % 2 == 0 and rows * chunk * self.guesses * vocab > PLACES:
            chunk //= 2
        return chunk


def _summed(loss):
    """`loss` over the places of each row by their weight, and the right best candidates where it is taught: two [R]."""

    def run(guesses, teacher, labels, taught, weight):
        known = labels >= 0
        labels = jnp.maximum(labels, 0)
        each = loss(guesses, teacher, labels)
        right = known & taught & (losses.at(guesses, labels) >= guesses.max(-1))  # cheaper than a maximum's place
        return jnp.where(known & (weight > 0), weight * each, 0.0).sum(1), right.sum(1).astype(jnp.float32)

    return run


def _ahead(mask: jax.Array, segment: jax.Array, steps: int) -> jax.Array:
    """Whether the token `steps` ahead [..., T] is in the same sequence and supervised."""
    place = jnp.arange(mask.shape[-1]) < mask.shape[-1] - steps
    same = jnp.roll(segment, -steps, axis=-1) == segment
    return place & same & jnp.roll(mask, -steps, axis=-1)
