"""What a pass costs: the target over blocks of tokens, the drafters alone, whole cycles, and the memory's speed.

Everything is timed in rounds, each job once a round in alternating order, and reported as a median: a machine
that slows down for a minute then slows all of them, and their ratios stay.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from specjax import cache
from specjax.costs import CostTable, environment
from specjax.decode.engine import Engine
from specjax.decode.request import Sampling
from specjax.decode.step import propose
from specjax.decode.target import Target
from specjax.drafters.lookup import Lookup
from specjax.sharding import rowwise
from specjax.telemetry import say
from specjax.verify.target_first import TargetFirst

FILLED = 0.75  # share of the cache slots that hold text
LOOP_CYCLES = 8  # cycles per timed loop
MIB = 2**20
NUCLEUS = Sampling(max_new_tokens=10**6, temperature=1.0, top_p=0.9, ignore_end=True)
GREEDY = Sampling(max_new_tokens=10**6, ignore_end=True)


@dataclasses.dataclass(frozen=True)
class Job:
    """Something to time: `run` on what `fresh` makes anew, untimed, before each run."""

    run: Callable[[Any], Any]
    fresh: Callable[[], Any] = lambda: None

    def seconds(self) -> float:
        given = jax.block_until_ready(self.fresh())
        start = time.perf_counter()
        jax.block_until_ready(self.run(given))
        return time.perf_counter() - start


def measure(
    engine: Engine,
    batches: Sequence[int],
    contexts: Sequence[int],
    blocks: Sequence[int],
    methods: Sequence[tuple[str, str | None]],
    *,
    repeats: int,
    cycles: bool,
) -> CostTable:
    """Time everything that a CostTable holds, on the engine's target. `methods`: names and their drafts' folders.

    `cycles`: also whole loops at batch 1 (see `cycle_figures`). Raises ValueError if a size does not fit.
    """
    check_sizes(engine, batches, contexts, blocks, repeats)
    grid = list(itertools.product(batches, contexts))
    jobs: dict[Hashable, Job] = {("read", name): job for name, job in read_jobs(engine.target).items()}
    for point in grid:
        jobs |= {("pass", *point, block): job for block, job in pass_jobs(engine.target, *point, blocks).items()}
        jobs |= {("draft", name, *point): draft_job(engine.with_method(name, draft), *point) for name, draft in methods}
    if cycles:
        jobs |= {("cycle", name): job for name, job in cycle_jobs(engine).items()}
    seconds = medians(jobs, repeats)

    def of(kind: str) -> dict[tuple, float]:
        return {key[1:]: s for key, s in seconds.items() if key[0] == kind}

    target, drafts = engine.target, of("draft")
    return CostTable(
        environment=environment(target.mesh, target.dtype, target.fingerprint),
        passes={key: 1e3 * s for key, s in of("pass").items()},
        drafts={name: {point: 1e3 * drafts[name, *point] for point in grid} for name, _ in methods},
        weight_bytes=bytes_per_pass(target),
        bandwidth=read_bytes(target) / min(of("read").values()),
        cycles=cycle_figures({name: 1e3 * s for (name,), s in of("cycle").items()}) if cycles else {},
    )


def check_sizes(engine: Engine, batches, contexts, blocks, repeats: int) -> None:
    """Raises ValueError in one sentence if something cannot be measured."""
    for name, sizes in {"batch sizes": batches, "contexts": contexts, "blocks": blocks, "repeats": [repeats]}.items():
        if not sizes or min(sizes) < 1:
            raise ValueError(f"{name} are {', '.join(map(str, sizes))}; give positive integers")
    if 1 not in blocks:
        raise ValueError(f"blocks are {', '.join(map(str, blocks))}; block 1 must be among them, the eager pass")
    if max(contexts) > engine.buckets[-1]:
        raise ValueError(
            f"context {max(contexts)} is above {engine.buckets[-1]}, the most slots a cache has; choose less"
        )
    rows = engine.target.mesh.shape["data"]
    if odd := [batch for batch in batches if batch % rows]:
        raise ValueError(f"batch size {odd[0]} does not divide over data={rows} of the mesh; give multiples of {rows}")


def medians(jobs: Mapping[Hashable, Job], repeats: int) -> dict[Hashable, float]:
    """Median seconds of each job over `repeats` rounds; compiling and one warm run come first."""
    start = time.perf_counter()
    for number, (key, job) in enumerate(jobs.items(), 1):
        seconds = job.seconds()
        say(f"ready {number} of {len(jobs)}: {' '.join(map(str, key))}, {seconds:.1f} s with compiling")
    say(f"all programs ready after {time.perf_counter() - start:.0f} s; timing {repeats} rounds")
    taken = {key: [] for key in jobs}
    for number in range(repeats):
        began = time.perf_counter()
        for key in list(jobs)[:: 1 if number % 2 == 0 else -1]:
            taken[key].append(jobs[key].seconds())
        say(f"round {number + 1} of {repeats}: {time.perf_counter() - began:.1f} s")
    return {key: statistics.median(times) for key, times in taken.items()}


def pass_jobs(target: Target, batch: int, slots: int, blocks: Sequence[int]) -> dict[int, Job]:
    """By block: the bare target pass over `block` tokens of each row on a cache of `slots` slots, which is read and
    not written; the result is each token's most likely successor."""

    def make():
        kv = cache.empty(target.config, batch, slots, target.dtype)
        tokens = rowwise(lambda length: length[:, None] + jnp.arange(max(blocks)))(kv.length)
        return kv.replace(length=kv.length + int(FILLED * slots)), tokens

    def run(block, leaves, kv, tokens):
        positions = kv.length[:, None] + jnp.arange(block)
        causal = jnp.tril(jnp.ones((1, block, block), bool))
        return jnp.argmax(target.module(leaves)(tokens[:, :block], positions, kv, causal).logits, axis=-1)

    def timed(block, _):
        with jax.set_mesh(target.mesh):
            return program(block, target.leaves, *inputs)

    program = jax.jit(run, static_argnums=0)
    with jax.set_mesh(target.mesh):
        inputs = jax.jit(make)()
    return {block: Job(partial(timed, block)) for block in blocks}


def draft_job(engine: Engine, batch: int, slots: int) -> Job:
    """The engine's drafter alone, on rows whose text fills the usual share of `slots`. The array that holds the text
    is as wide as in decoding: as wide as the engine's context allows."""
    state = engine.start([prompt(engine, slots)] * batch, [GREEDY] * batch, batch)

    program = jax.jit(propose)

    def timed(_):
        with jax.set_mesh(engine.target.mesh):
            return program(engine.drafter, state)

    return Job(timed)


def cycle_jobs(engine: Engine) -> dict[str, Job]:
    """Loops of LOOP_CYCLES cycles at batch 1 in the smallest cache bucket, and the passes they consist of.

    `lookup` here calls any earlier token a match, so that every cycle runs the full block.
    """
    drafter = Lookup(shortest=0)
    rows = engine.target.mesh.shape["data"]
    slots, block = engine.buckets[0], drafter.blocks[-1]
    eager, lookup = engine.with_method("eager"), engine.with_method((drafter, TargetFirst(drafter.depth)))
    passes = pass_jobs(engine.target, rows, slots, (1, block))
    return {
        "eager_loop": loop_job(eager, GREEDY),
        "lookup_loop": loop_job(lookup, GREEDY),
        "lookup_loop_sampled": loop_job(lookup, NUCLEUS),
        "pass_1": passes[1],
        "pass_block": passes[block],
        "draft": draft_job(lookup, rows, min(slots, engine.max_context)),
    }


def loop_job(engine: Engine, wish: Sampling) -> Job:
    """LOOP_CYCLES cycles of the served loop, always from the same prefilled state."""
    text = prompt(engine, min(engine.buckets[0], engine.max_context))
    filled = engine.prefill(engine.start([text], [wish], 1))
    return Job(lambda state: engine.decode(state, LOOP_CYCLES), lambda: jax.tree.map(jnp.copy, filled))


def cycle_figures(ms: Mapping[str, float]) -> dict[str, float]:
    """Medians of `cycle_jobs` -> milliseconds per cycle, and each loop over the passes that it cannot do without."""
    eager = ms["eager_loop"] / LOOP_CYCLES
    lookup, sampled = ms["lookup_loop"] / LOOP_CYCLES, ms["lookup_loop_sampled"] / LOOP_CYCLES
    needed = ms["pass_block"] + ms["draft"]
    return {
        "eager_ms_per_token": eager,
        "lookup_ms_per_cycle": lookup,
        "lookup_ms_per_cycle_sampled": sampled,
        "pass_1_ms": ms["pass_1"],
        "pass_block_ms": ms["pass_block"],
        "draft_ms": ms["draft"],
        "eager_over_pass": eager / ms["pass_1"],
        "lookup_over_pass_and_draft": lookup / needed,
        "lookup_over_pass_and_draft_sampled": sampled / needed,
    }


def read_jobs(target: Target) -> dict[str, Job]:
    """Ways to read an array of `read_bytes` once, on one device; the floor takes the fastest.

    Which is fastest depends on the backend: CPUs run a row reduction on all cores, but not always at full speed.
    """
    place = SingleDeviceSharding(target.mesh.devices.flat[0])
    columns = 4096
    rows = read_bytes(target) // (4 * columns)
    data = jax.jit(lambda: jnp.full((rows, columns), 0.5, jnp.float32), out_shardings=place)()
    vector = jax.device_put(np.ones(columns, np.float32), place)
    total, sums, product = jax.jit(jnp.sum), jax.jit(lambda x: x.sum(-1)), jax.jit(jnp.matmul)
    return {
        "sum": Job(lambda _: total(data)),
        "row_sums": Job(lambda _: sums(data)),
        "matvec": Job(lambda _: product(data, vector)),
    }


def read_bytes(target: Target) -> int:
    """Size of the array that bandwidth is measured with: as large as the weights, far larger than any processor
    cache, and bounded, because it has to fit beside them."""
    size = min(max(bytes_per_pass(target), 256 * MIB), 2048 * MIB)
    return size // (16 * 1024) * (16 * 1024)


def bytes_per_pass(target: Target) -> int:
    """Weight bytes that a device reads in one pass; an embedding that is not the head as well is only gathered from."""
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in target.leaves)
    if target.config.tied:
        return held
    embed = jax.tree.unflatten(target.tree, target.leaves)["embed"].get_value()
    return held - embed.addressable_shards[0].data.nbytes


def prompt(engine: Engine, slots: int) -> list[int]:
    """Token ids that fill the usual share of `slots`, without repetition where the vocabulary allows it."""
    vocab = engine.target.config.vocab_size
    step = next(n for n in range(vocab // 3 + 1, 2 * vocab) if math.gcd(n, vocab) == 1)
    return [step * i % vocab for i in range(int(FILLED * slots))]
