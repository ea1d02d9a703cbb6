"""What is trained: a task says which parameters, from which features of the target, and with which loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from specjax import trees
from specjax.decode.target import Target
from specjax.loading.drafts import MedusaDraft
from specjax.models.medusa import MedusaHeads
from specjax.models.transformer import vocabulary_logits
from specjax.sharding import padded, rowwise, spec
from train_drafts import losses

PLACES = 2**26  # logits that a chunk of positions may have: its memory, a few times over
ROUND = 128  # rows of zeros fill a draft vocabulary up to a multiple, so that checkpoints fit any mesh that divides it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa:
    """Medusa-1 (Cai et al. 2024, arXiv 2401.10774): `heads` of `layers` residual blocks, the target frozen.

    text      ... t   t+1    t+2    t+3        head i learns token t + 2 + i from the hidden state of token t, wherever
                  h   root   head 0 head 1     both that token and the root are the assistant's

    `draft_vocab`: tokens of the draft's own LM head, which starts as the target's rows (0: the heads share the
    target's whole head, frozen). Loss: scale * sum over heads of decay^i * `loss`, which is `ce` (the token that
    followed), `kl` (the target's own law there) or `lk` (acceptance itself).
    """

    heads: int = 4
    layers: int = 1
    draft_vocab: int = 8192
    loss: str = "ce"
    scale: float = 0.2
    decay: float = 0.8

    def __post_init__(self):
        if self.heads < 1 or self.layers < 1 or self.draft_vocab < 0:
            raise ValueError(
                f"heads {self.heads}, layers {self.layers} and draft_vocab {self.draft_vocab} make no Medusa heads; "
                "give at least 1, 1 and 0"
            )
        if self.loss not in losses.LOSSES:
            raise ValueError(f"loss {self.loss!r} is unknown; choose one of {', '.join(losses.LOSSES)}")

    def declare(self, target: Target) -> tuple[nnx.GraphDef, nnx.State]:
        """Shapes, dtypes and shardings of what is trained: float32, whatever the target runs in."""
        with jax.set_mesh(target.mesh):
            return nnx.split(jax.eval_shape(lambda: self._fresh(target.config.width)))

    def init(self, target: Target, token_ids: np.ndarray | None) -> nnx.State:
        """Identity blocks and, with a draft vocabulary, the target's rows of its tokens: token_ids [V_d]."""

        def make(lm_head, token_ids):
            heads = self._fresh(target.config.width)
            if self.draft_vocab:
                heads.lm_head[...] = self._draft_rows(lm_head, token_ids).astype(jnp.float32)
            return nnx.state(heads)

        with jax.set_mesh(target.mesh):
            return jax.jit(make)(target.lm_head, token_ids)

    def labels(self, batch, ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """What each head should say at each place of batch [..., T], and which places teach it: [..., T, heads] both.

        Labels are draft ids by ids [V] (None: the target's own), -1 where the draft has no such token.
        """
        root = _ahead(batch.mask, batch.segment, 1)
        steps = range(2, 2 + self.heads)
        taught = jnp.stack([root & _ahead(batch.mask, batch.segment, step) for step in steps], axis=-1)
        labels = jnp.stack([jnp.roll(batch.tokens, -step, axis=-1) for step in steps], axis=-1)
        if ids is not None:
            labels = ids.at[labels].get(out_sharding=jax.typeof(labels).sharding.spec)
        return labels, taught

    def loss_sums(self, heads: MedusaHeads, target, token_ids, hidden, labels, taught) -> tuple[jax.Array, jax.Array]:
        """Per head: the loss [heads], and how many first guesses were right [heads], summed over the places taught.

        `target`: the frozen model; token_ids [V_d] (None: no draft vocabulary); hidden [R, T, D]: the target's normed
        last hidden states; labels, taught [R, T, heads] as `labels` gives them. Places whose label the draft cannot
        say add no loss. Places are taken in chunks whose logits are made anew for the gradient: a large vocabulary
        costs time, not memory.
        """
        measure = rowwise(summed(losses.LOSSES[self.loss]))
        size = self.draft_vocab or target.config.vocab_size
        lm_head = heads.lm_head[...] if self.draft_vocab else target.head
        chunk = self._chunk(*hidden.shape[:2], size)
        beyond = jnp.pad(hidden, ((0, 0), (0, self.heads), (0, 0)))

        def part(totals, start):
            def cut(x, more=0):
                return lax.dynamic_slice_in_dim(x, start, chunk + more, axis=1)

            # Head by head: stacking the teacher's laws, each a place further on, would cost as much as a product.
            states, laws = heads(cut(hidden)), None
            if self.loss != "ce":
                laws = self._laws(target, token_ids, cut(beyond, self.heads))
            sums = []
            for head in range(self.heads):
                guesses = vocabulary_logits(lm_head, states[:, :, head], size)
                teacher = None if laws is None else laws[:, 1 + head : 1 + head + chunk]
                sums.append(measure(guesses, teacher, cut(labels)[..., head], cut(taught)[..., head]))
            return tuple(total + jnp.stack(rows).sum(1) for total, rows in zip(totals, zip(*sums))), None

        nothing = (jnp.zeros(self.heads), jnp.zeros(self.heads))
        if chunk == hidden.shape[1]:
            return part(nothing, 0)[0]
        return lax.scan(jax.checkpoint(part), nothing, jnp.arange(0, hidden.shape[1], chunk))[0]

    def ranks(self, heads: MedusaHeads, target, hidden, labels) -> jax.Array:
        """How many of a head's guesses stand before the right one: hidden [R, T, D], labels [R, T, heads] -> the same
        shape, beyond any rank where the draft cannot say it. Taken in chunks, as in `loss_sums`."""
        chunk = self._chunk(*hidden.shape[:2], self.draft_vocab or target.config.vocab_size)

        def before(guesses, labels):
            right = jnp.take_along_axis(guesses, jnp.maximum(labels, 0)[..., None], axis=-1)
            equal = (guesses == right) & (jnp.arange(guesses.shape[-1]) < labels[..., None])
            return jnp.where(labels < 0, jnp.iinfo(jnp.int32).max, ((guesses > right) | equal).sum(-1))

        def part(start):
            cut = [lax.dynamic_slice_in_dim(x, start, chunk, axis=1) for x in (hidden, labels)]
            return rowwise(before)(self.guesses(heads, target, cut[0]), cut[1])

        parts = lax.map(part, jnp.arange(0, hidden.shape[1], chunk))
        return jnp.moveaxis(parts, 0, 1).reshape(labels.shape)

    def guesses(self, heads: MedusaHeads, target, hidden: jax.Array) -> jax.Array:
        """Logits [R, T, heads, V'] of all heads at hidden [R, T, D]."""
        lm_head = heads.lm_head[...] if self.draft_vocab else target.head
        return heads.logits(heads(hidden), lm_head, self.draft_vocab or target.config.vocab_size)

    def _laws(self, target, token_ids, hidden: jax.Array) -> jax.Array:
        """The target's own logits over the draft's tokens at hidden [R, T, D]: [R, T, V']."""
        lm_head = target.head if token_ids is None else self._draft_rows(target.head, token_ids)
        return vocabulary_logits(lm_head, hidden, self.draft_vocab or target.config.vocab_size)

    def coefficients(self) -> np.ndarray:
        """Each head's share of the loss [heads]."""
        return self.scale * self.decay ** np.arange(self.heads)

    def export(self, params: nnx.State, token_ids: np.ndarray | None, about: dict) -> MedusaDraft:
        """The draft as it is served and stored, not calibrated yet: a chain. `about`: its `target`, `template_args` and
        `training`."""
        host = {name: np.asarray(value.get_value()) for name, value in params.items()}
        chain = trees.chain(self.heads)
        return MedusaDraft(
            weight=host["weight"],
            bias=host["bias"],
            lm_head=host["lm_head"][: self.draft_vocab] if self.draft_vocab else None,
            token_ids=token_ids,
            accuracy=np.zeros((self.heads, 1)),
            paths=chain,
            frequency=np.zeros(len(chain)),
            nodes=len(chain) + 1,
            **about,
        )

    def _fresh(self, width: int) -> MedusaHeads:
        return MedusaHeads(
            width,
            heads=self.heads,
            layers=self.layers,
            draft_vocab=self._rows or None,
            rngs=nnx.Rngs(0),
            dtype=jnp.float32,
        )

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
        while chunk % 2 == 0 and rows * chunk * self.heads * vocab > PLACES:
            chunk //= 2
        return chunk


def summed(loss):
    """`loss` over the places of each row that teach something, and the right first guesses there: two [R, heads]."""

    def run(guesses, teacher, labels, taught):
        known = taught & (labels >= 0)
        labels = jnp.maximum(labels, 0)
        each = loss(guesses, teacher, labels)
        right = known & (losses.at(guesses, labels) >= guesses.max(-1))  # a maximum is far cheaper than its place
        return jnp.where(known, each, 0.0).sum(1), right.sum(1).astype(jnp.float32)

    return run


def _ahead(mask: jax.Array, segment: jax.Array, steps: int) -> jax.Array:
    """Whether the token `steps` ahead [..., T] is in the same sequence and supervised."""
    place = jnp.arange(mask.shape[-1]) < mask.shape[-1] - steps
    same = jnp.roll(segment, -steps, axis=-1) == segment
    return place & same & jnp.roll(mask, -steps, axis=-1)
