"""Is a method's text the baseline's? Equal tokens, or ties that rounding explains, or no.

A block of several tokens rounds differently from a pass over one. So where two texts part, the text is scored with
the one-token pass: each of its tokens must be the best there, or so close to the best that rounding may swap the two.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache
from specjax.cache import KVCache
from specjax.decode.engine import Engine
from specjax.decode.request import Sampling, sampling_rows
from specjax.models.transformer import Transformer
from specjax.sampling import SamplingState, greedy, gumbel, process
from specjax.sharding import row_spec

FLOAT32_BOUND = 1e-3  # a flip under it happens about once in 500,000 tokens
NOISE_TAIL = 32  # tokens of a text over which the width noise is measured


@dataclasses.dataclass(frozen=True)
class Tie:
    """Two tokens that rounding may swap, at `position` of a prompt's new tokens; `gap` of their scores."""

    prompt: str
    position: int
    expected: int
    got: int
    gap: float


@dataclasses.dataclass
class Comparison:
    """Texts compared with the baseline's. `failures`: sentences about those that no tie explains, or why none
    was compared that would have to be. `law_tested`: none was, because the verifier keeps the target's law, as its
    tests show, and not the baseline's text."""

    compared: int = 0
    identical: int = 0
    law_tested: bool = False
    ties: list[Tie] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def lossless(self) -> str:
        if self.failures:
            return "no"
        if self.law_tested:
            return "law-tested"
        return "tokens-equal" if self.compared else "not compared"


class Scorer:
    """Scores texts token by token with the target's one-token pass, at the batch size that was measured."""

    def __init__(self, engine: Engine, batch_size: int):
        self._engine, self._batch_size = engine, batch_size
        target = engine.target
        self._pass = jax.jit(lambda leaves, *rest: _forced_pass(target.module(leaves), *rest), donate_argnums=1)

    def compare(self, into: Comparison, name: str, prompt, expected, got, sampling: Sampling, bound: float) -> None:
        """Add the verdict on one text: prompt, expected and got are token ids; `bound` is a gap of logits."""
        into.compared += 1
        if got == expected:
            into.identical += 1
            return
        parting = next((i for i, (a, b) in enumerate(zip(expected, got)) if a != b), None)
        if parting is None:
            into.failures.append(f"{name}: {len(got)} tokens where the baseline has {len(expected)}, equal so far")
            return
        bound = bound / sampling.temperature if sampling.temperature else bound
        for position, scores in enumerate(self.scores(prompt, got, sampling)):
            best = expected[position] if position == parting else int(scores.argmax())
            if position < parting or best == got[position]:
                continue
            gap = float(scores.max() - min(scores[best], scores[got[position]]))
            if gap >= bound:
                into.failures.append(f"{name}: token {position} is {got[position]}, not {best}, {gap:.2g} better")
                return
            into.ties.append(Tie(name, position, best, got[position], gap))

    def scores(self, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling) -> Iterator[np.ndarray]:
        """For each of `tokens` after `prompt`, what it was the argmax of [V]: logits, or weights plus noise."""
        fed = [prompt[-1], *tokens[:-1]]
        for position, logits in enumerate(self.logits(prompt[:-1], fed, 1), start=len(prompt)):
            yield _perturbed(logits, sampling, position) if sampling.temperature else logits

    def logits(self, prefix: Sequence[int], tokens: Sequence[int], block: int) -> Iterator[np.ndarray]:
        """Logits [V] after each of `tokens`, fed in passes over `block` tokens; a shorter rest is left out."""
        engine, mesh = self._engine, self._engine.target.mesh
        # An engine takes no empty prompt: for an empty prefix there is nothing to prefill.
        state = engine.start([list(prefix) or [0]], [Sampling(max_new_tokens=1)], self._batch_size)
        kv = engine.prefill(state).cache if len(prefix) else state.cache
        slots = engine.bucket(len(prefix) + len(tokens))
        with jax.set_mesh(mesh):
            kv = kv if kv.slots >= slots else jax.jit(cache.grow, static_argnums=1)(kv, slots)
        for first in range(0, len(tokens) - block + 1, block):
            fed = np.tile(np.array(tokens[first : first + block], np.int32), (kv.length.shape[0], 1))
            with jax.set_mesh(mesh):  # not around the loop: between two yields it is the caller who runs
                fed = jax.device_put(fed, jax.NamedSharding(mesh, row_spec(2)))
                kv, logits = self._pass(engine.target.leaves, kv, fed)
            yield from np.asarray(logits)[0]

    def width_noise(self, texts: Sequence[Sequence[int]], blocks: Sequence[int]) -> float:
        """The largest difference of one position's logits between passes over one token and over each block size."""
        noise = 0.0
        for text in texts:
            prefix, tail = text[:-NOISE_TAIL], text[-NOISE_TAIL:]
            alone = list(self.logits(prefix, tail, 1))
            for block in blocks:
                wide = self.logits(prefix, tail, block)
                noise = max([noise, *(float(np.abs(a - b).max()) for a, b in zip(alone, wide))])
        return noise


def _forced_pass(target: Transformer, kv: KVCache, tokens: jax.Array) -> tuple[KVCache, jax.Array]:
    """Take tokens [B, T] into the cache as they are; also their logits [B, T, V]."""
    steps = jnp.arange(tokens.shape[1])
    causal = jnp.tril(jnp.ones((1, len(steps), len(steps)), bool))
    output = target(tokens, kv.length[:, None] + steps, kv, causal)
    path = jnp.broadcast_to(steps, tokens.shape)
    taken = jnp.full_like(kv.length, len(steps))
    return cache.append(kv, output.block_kv, path, taken, after=greedy(output.logits[:, -1])), output.logits


def _perturbed(logits: np.ndarray, sampling: Sampling, position: int) -> np.ndarray:
    """Logits [V] -> the scores [V] whose argmax is the draw at text `position`."""
    return np.asarray(_scores(logits[None], sampling_rows([sampling]), np.array([position], np.int32)))[0]


@jax.jit
def _scores(logits: jax.Array, sampling: SamplingState, position: jax.Array) -> jax.Array:
    return process(logits, sampling) + gumbel(sampling.key, position, jnp.arange(logits.shape[-1]))
