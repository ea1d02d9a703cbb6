"""One cycle: draft -> target pass -> verify -> append; and one prefill chunk. State in, state out."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from specjax.cache import append
from specjax.decode.state import DecodeState, Text, emit
from specjax.drafters.base import Drafter, Stats
from specjax.models.transformer import TargetOutput, Transformer
from specjax.sampling import SamplingState, draw, greedy
from specjax.sharding import rowwise, whole
from specjax.trees import Draft
from specjax.verify.base import Verdict, Verifier


def step(target: Transformer, drafter: Drafter, verifier: Verifier, state: DecodeState) -> DecodeState:
    """One speculative cycle of every running row; finished rows do not change.

    Every row must have room for drafter.depth + 1 more tokens in its cache (see `fits`).
    """
    with jax.named_scope("draft"):
        draft = propose(drafter, state)
    with jax.named_scope("target"):
        block = block_number(drafter, state, draft)
        output = target_pass(target, drafter, state, draft, block)
    with jax.named_scope("verify"):
        verdict, emitted = rowwise(partial(_judge, verifier))(draft, output.logits, state.sampling, state.text.count)
    with jax.named_scope("append"):
        text, taken = rowwise(emit)(state.text, emitted, verdict.count)
        cache = append(state.cache, output.block_kv, verdict.path, taken, after=verdict.next_token)
        accepted, features = rowwise(_along)(verdict.path, draft.tokens, output.features)
        drafter_state = drafter.extend(state.drafter, accepted, features, taken, verdict.next_token)
        stats = rowwise(_count)(state.stats, draft, taken, block)
    return state.replace(text=text, cache=cache, drafter=drafter_state, stats=stats)


def propose(drafter: Drafter, state: DecodeState) -> Draft:
    """The drafter's proposal, without nodes past its `size` and without any in finished rows."""
    text = state.text
    draft = drafter.draft(state.drafter, text.tokens, text.count, state.sampling, text.running, state.stats)
    # Not the whole draft: what `rowwise` returns is split by rows alone, and a law has a vocabulary.
    valid = rowwise(_worth_a_pass)(draft.tree.valid, draft.size, text.running)
    return draft.replace(tree=draft.tree.replace(valid=valid))


def fits(state: DecodeState, tokens: int) -> jax.Array:
    """Whether every row has room for `tokens` more in its cache: a scalar."""
    return (state.cache.length + tokens <= state.cache.slots).all()


def block_number(drafter: Drafter, state: DecodeState, draft: Draft) -> jax.Array:
    """Which of the drafter's blocks is the smallest that holds what the running rows' drafts need: a scalar."""
    needed = jnp.where(state.text.running, draft.size, 1).max()
    return (jnp.array(drafter.blocks) < needed).sum()


def target_pass(target: Transformer, drafter: Drafter, state: DecodeState, draft: Draft, block: jax.Array):
    """The target over the block of that number, its output padded to the full tree: a `TargetOutput`."""

    def over(size: int):
        def run() -> TargetOutput:
            tree = draft.tree.first(size)
            positions = state.cache.length[:, None] + tree.depth
            output = target(draft.tokens[:, :size], positions, state.cache, tree.mask, taps=drafter.taps)
            return jax.tree.map(lambda x: _pad_block(x, draft.tokens.shape[1]), output)

        return run

    if len(drafter.blocks) == 1:
        return over(drafter.blocks[0])()
    return lax.switch(block, [over(size) for size in drafter.blocks])


def prefill_step(target: Transformer, drafter: Drafter, chunk: int, state: DecodeState) -> DecodeState:
    """Take `chunk` more prompt tokens of every row into the cache; a row whose prompt ends draws its first token.

    Rows that have nothing left are unchanged; each row must have `chunk` free slots.
    """
    start = state.cache.length
    spots = start[:, None] + jnp.arange(chunk)
    text = state.text
    tokens = jnp.take_along_axis(text.tokens, jnp.minimum(spots, text.tokens.shape[1] - 1), axis=1)
    taken = jnp.clip(text.prompt - start, 0, chunk)
    last = jnp.maximum(taken - 1, 0)[:, None]
    causal = jnp.tril(jnp.ones((1, chunk, chunk), bool))
    output = target(tokens, spots, state.cache, causal, at=last, taps=drafter.taps)
    ends_here = (taken > 0) & (start + taken == text.prompt)
    text, first = rowwise(_first_token)(text, state.sampling, output.logits[:, 0], ends_here)
    path = jnp.broadcast_to(jnp.arange(chunk), spots.shape)
    cache = append(state.cache, output.block_kv, path, taken, after=first)
    after = rowwise(_after)(text, start + taken)
    drafter_state = drafter.extend(state.drafter, tokens, output.features, taken, after)
    return state.replace(text=text, cache=cache, drafter=drafter_state)


def _after(text: Text, spot: jax.Array) -> jax.Array:
    """The token at position `spot` [B] of each row's text."""
    return jnp.take_along_axis(text.tokens, jnp.minimum(spot, text.tokens.shape[1] - 1)[:, None], axis=1)[:, 0]


def _worth_a_pass(valid: jax.Array, size: jax.Array, running: jax.Array) -> jax.Array:
    return valid & (jnp.arange(valid.shape[1]) < size[:, None]) & running[:, None]


def _judge(verifier: Verifier, draft: Draft, logits, sampling: SamplingState, position) -> tuple[Verdict, jax.Array]:
    """The verdict, and the tokens that it lets through in text order [B, depth + 1]."""
    verdict = verifier.verify(draft, logits, sampling, position)
    after = jnp.roll(jnp.take_along_axis(draft.tokens, verdict.path, axis=1), -1, axis=1)
    steps = jnp.arange(after.shape[1])
    return verdict, jnp.where(steps < verdict.count[:, None], after, verdict.next_token[:, None])


def _along(path: jax.Array, tokens: jax.Array, features: tuple[jax.Array, ...]):
    """tokens [B, T] and features [B, T, D] of the nodes on path [B, P]."""
    picked = tuple(jnp.take_along_axis(f, path[:, :, None], axis=1) for f in features)
    return jnp.take_along_axis(tokens, path, axis=1), picked


def _first_token(
    text: Text, sampling: SamplingState, logits: jax.Array, ends_here: jax.Array
) -> tuple[Text, jax.Array]:
    """Draw the token after the prompt and write it in rows whose prompt ends here."""
    sampled = (sampling.temperature > 0).any()
    token = lax.cond(sampled, lambda: draw(whole(logits), sampling, text.count), lambda: greedy(logits))
    after, _ = emit(text, token[:, None], jnp.zeros_like(token))

    def chosen(new, old):
        return jnp.where(ends_here.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(chosen, after, text), token


def _count(stats: Stats, draft: Draft, taken: jax.Array, block: jax.Array) -> Stats:
    """Add one cycle over the block of that number, in which each row took `taken` [B] tokens: its accepted drafts and
    one of the target's own."""
    active = taken > 0
    depths = jnp.arange(1, stats.accepted_at.shape[1] + 1)
    proposed = (draft.tree.valid[:, :, None] & (draft.tree.depth[:, :, None] == depths)).any(1)
    return Stats(
        cycles=stats.cycles + active,
        drafted=stats.drafted + jnp.where(active, draft.tree.valid.sum(-1) - 1, 0),
        accepted=stats.accepted + jnp.maximum(taken - 1, 0),
        emitted=stats.emitted + taken,
        levels=stats.levels + (0 if draft.levels is None else jnp.where(active, draft.levels, 0)),
        drafted_at=stats.drafted_at + (proposed & active[:, None]),
        accepted_at=stats.accepted_at + (depths < taken[:, None]),
        passes=stats.passes + ((jnp.arange(stats.passes.shape[1]) == block) & active[:, None]),
    )


def _pad_block(x: jax.Array, nodes: int) -> jax.Array:
    """x [B, T, ...] with T raised to `nodes`."""
    return jnp.pad(x, [(0, 0), (0, nodes - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
