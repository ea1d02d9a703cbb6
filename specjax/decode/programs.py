"""Compiled programs of one target and one method, made when first needed and kept."""

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.decode.loop import run
from specjax.decode.state import DecodeState
from specjax.decode.step import prefill_step, step
from specjax.decode.target import Target
from specjax.drafters.base import Drafter
from specjax.telemetry import say
from specjax.verify.base import Verifier

FIRST_BUCKET, GROWTH, LANES = 512, 4, 128


def bucket_ladder(max_context: int, slack: int) -> list[int]:
    """Cache sizes in slots, growing fourfold; the last holds max_context tokens and a block's overhang.

    `slack`: the most tokens that one step writes behind a row's length, accepted or not.
    """
    last = -(-(max_context + slack) // LANES) * LANES
    sizes, size = [], FIRST_BUCKET
    while 2 * size <= last:
        sizes.append(size)
        size *= GROWTH
    return [*sizes, last]


def keep_compiled_programs() -> None:
    """Turn on JAX's persistent compilation cache, unless the user has set it up or turned it off."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(home / "specjax" / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


class Programs:
    """`prefill`, `loop` and `step` per batch size and cache bucket; each compile is announced and timed.

    `drafter`: an argument of every program; another of the same shapes may take its place.
    """

    def __init__(self, target: Target, drafter: Drafter, verifier: Verifier, name: str, chunk: int, buckets: list[int]):
        self._target, self._name, self._buckets = target, name, buckets
        module = target.module
        self._functions = {
            "prefill": lambda leaves, drafter, state: prefill_step(module(leaves), drafter, chunk, state),
            "loop": lambda leaves, drafter, state, cycles: run(module(leaves), drafter, verifier, state, cycles),
            "step": lambda leaves, drafter, state: step(module(leaves), drafter, verifier, state),
        }
        self.drafter = drafter
        self._compiled = {}
        self.compile_seconds = 0.0

    def __len__(self) -> int:
        return len(self._compiled)

    def __call__(self, kind: str, state: DecodeState, *arguments) -> DecodeState:
        """Run a program on `state`, which is donated."""
        program = self.compiled(kind, state)
        return program(self._target.leaves, self.drafter, state, *arguments)

    def compiled(self, kind: str, state: DecodeState):
        """The program for states of this shape; `state` may be abstract."""
        batch, slots = state.text.tokens.shape[0], state.cache.slots
        key = kind, batch, slots
        if key not in self._compiled:
            arguments = (jax.ShapeDtypeStruct((), jnp.int32),) if kind == "loop" else ()
            start = time.perf_counter()
            with jax.set_mesh(self._target.mesh):
                jitted = jax.jit(self._functions[kind], donate_argnums=2)
                lowered = jitted.lower(self._target.leaves, self.drafter, state, *arguments)
                self._compiled[key] = lowered.compile()
            seconds = time.perf_counter() - start
            self.compile_seconds += seconds
            alike = sum(known[:2] == (kind, batch) for known in self._compiled)
            say(
                f"compiled {self._name} {kind} for batch {batch}, {slots} slots: {alike} of at most "
                f"{len(self._buckets)} such programs, {seconds:.1f} s"
            )
        return self._compiled[key]
