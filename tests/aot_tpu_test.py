"""Decode cycles compiled for eight TPU chips, without a TPU: in place, no weight copied, no further loop."""

import dataclasses
import functools
import importlib.util
import itertools
import os
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.topologies import get_topology_desc
from programs_test import SMOLLM2, abstract_target

from specjax import Engine, Target, trees
from specjax.drafters import eagle as eagles
from specjax.drafters.eagle import Eagle
from specjax.drafters.medusa import Medusa, declare
from specjax.drafters.prices import Prices
from specjax.models.config import ModelConfig
from specjax.models.eagle import EagleConfig
from specjax.models.rope import Rope
from specjax.sharding import make_mesh, spec
from specjax.verify.target_first import TargetFirst

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed: pip install libtpu"),
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache"),  # it cannot hold TPU programs here
]

LLAMA_8B = ModelConfig(
    "llama", 128256, 4096, 4, 32, 8, 128, 14336, 8192, 1e-5, Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192), (None,) * 4
)
SHAPES = {"llama-8b": LLAMA_8B, "smollm2": SMOLLM2}
CASES = list(itertools.product(SHAPES, ("eager", "lookup", "medusa", "eagle")))
TRAINED = ("medusa", "eagle")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]\{?([\d,]*)")


@dataclass(frozen=True)
class Cycle:
    """A compiled loop: its memory, its instructions outside fusions as (is it before or after the loop, text of the
    result, opcode, whole line), the shapes of weights and cache on one chip, and the cache's bytes on one chip."""

    memory: object
    instructions: tuple[tuple[bool, str, str, str], ...]
    weights: tuple[tuple[int, ...], ...]
    cache: tuple[int, ...]
    cache_bytes: int


@functools.cache
def compiled(shape: str, method: str) -> Cycle:
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it only compiles here, so other processes may as well
    mesh = make_mesh("data=2,model=4", get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
    target = abstract_target(SHAPES[shape], mesh, jnp.bfloat16)
    engine = Engine(target, {"medusa": medusa, "eagle": eagle}[method](target) if method in TRAINED else method)
    state = engine.abstract(8, 1024)
    program = engine.programs.compiled("loop", state)
    local = [x.sharding.shard_shape(x.shape) for x in state.cache.k + state.cache.v]
    held = [*target.leaves, *jax.tree.leaves(engine.drafter)]
    weights = tuple(x.sharding.shard_shape(x.shape) for x in held if len(x.shape) > 1)
    return Cycle(
        program.memory_analysis(),
        tuple(instructions(program.as_text())),
        weights,
        local[0],
        2 * sum(int(np.prod(x)) for x in local),
    )


def medusa(target: Target) -> tuple[Medusa, TargetFirst]:
    """Four heads of shapes alone that share the target's LM head, and a tree of 8 nodes."""
    parents, ranks = trees.layout(((0,), (0, 0), (0, 0, 0), (1,), (0, 0, 0, 0), (0, 1), (1, 0)))
    graph, heads = declare(target.config.width, trees.max_depth(np.array(parents)), 1, target.mesh, target.dtype)
    drafter = Medusa(
        heads,
        target.norm,
        target.lm_head,
        None,
        graph=graph,
        parents=parents,
        ranks=ranks,
        vocab_size=target.config.vocab_size,
        eps=target.config.norm_eps,
        tap=target.config.layers,
    )
    return drafter, TargetFirst(drafter.depth)


def eagle(target: Target) -> tuple[Eagle, TargetFirst]:
    """An EAGLE-3 layer of shapes alone, as wide as the target, over its whole vocabulary; trees of up to 8 nodes."""
    layer = dataclasses.replace(target.config, layers=1, windows=(None,))
    config = EagleConfig(layer, target.config.width, states=3, draft_vocab=target.config.vocab_size)
    graph, state = eagles.declare(config, target.mesh, target.dtype)
    sizes = {"nodes": 8, "depth": 3, "width": 3}
    fixed = {"graph": graph, "config": config, "taps": (0, 1, 2), "vocab_size": target.config.vocab_size}
    drafter = Eagle(state, target.embed, target.norm, None, None, prices(target, (1, 4, 8)), **fixed, **sizes)
    return drafter, TargetFirst(drafter.depth)


def prices(target: Target, blocks: tuple[int, ...]) -> Prices:
    """Prices of shapes alone."""

    def ms(*shape: int) -> jax.ShapeDtypeStruct:
        whole = jax.NamedSharding(target.mesh, spec(*[None] * len(shape)))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole)

    return Prices(ms(2, 3), ms(2, 3, len(blocks)), blocks, batches=(1, 8), contexts=(512, 2048, 8192))


def instructions(hlo: str):
    """Those that a chip runs one by one: what is inside a fusion never reaches memory."""
    fused = set(re.findall(r"fusion\(.*?calls=(%[\w.\-]+)", hlo))
    inside, outside = None, False
    for line in hlo.splitlines():
        if line.endswith("{") and line.startswith(("%", "ENTRY ")):
            inside, outside = line.removeprefix("ENTRY ").split()[0], line.startswith("ENTRY")
        elif inside not in fused and (found := INSTRUCTION.match(line)):
            yield outside, found[1], found[2], line


def shapes(result: str) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in dims.split(",") if n) for _, dims, _ in ARRAY.findall(result)]


@pytest.mark.parametrize("shape, method", CASES)
def test_the_state_is_updated_in_place(shape, method):
    cycle = compiled(shape, method)
    assert cycle.memory.alias_size_in_bytes >= 0.99 * cycle.cache_bytes


def moves(cycle: Cycle, outside: bool) -> list[tuple[int, str]]:
    """(bytes, line) of each copy or transpose of something as large as a weight or a cache.

    Copies into a chip's vector memory (space 1) are prefetches and do not count in the loop.
    """
    sizes = {int(np.prod(s)) for s in (*cycle.weights, cycle.cache)}
    return [
        (2 * int(np.prod(shapes(result)[0])), line.strip()[:200])
        for where, result, opcode, line in cycle.instructions
        if where == outside
        and opcode in ("copy", "transpose")
        and result.startswith("bf16")
        and (outside or "S(1)" not in result)
        and int(np.prod(shapes(result)[0])) in sizes
    ]


@pytest.mark.parametrize("shape, method", CASES)
def test_no_cycle_copies_or_transposes_a_weight_or_the_cache(shape, method):
    moved = [line for _, line in moves(compiled(shape, method), outside=False)]
    assert not moved, "\n".join(moved)


@pytest.mark.parametrize("shape, method", CASES)
def test_a_dispatch_lays_out_few_weights_anew(shape, method):
    """Once before all cycles: none of a large model; of SmolLM2, whose sizes fill no tiles, embedding, output, head."""
    cycle = compiled(shape, method)
    weights = 2 * sum(int(np.prod(s)) for s in cycle.weights)
    moved = moves(cycle, outside=True)
    assert sum(size for size, _ in moved) <= (0.35 * weights if shape == "smollm2" else 0), moved


@pytest.mark.parametrize("shape, method", CASES)
def test_there_is_no_loop_but_the_cycle_the_sampled_walk_and_the_draft_levels(shape, method):
    """The cycle; EAGLE's draft levels, which read the layer's own keys and values; the walk down the tree when
    sampling; in it the searches of top-k and top-p."""
    cycle = compiled(shape, method)
    loops = [result for _, result, opcode, _ in cycle.instructions if opcode == "while"]
    own = 2 if method == "eagle" else 0
    carrying = [result for result in loops if shapes(result).count(cycle.cache) > own]
    assert len(carrying) == 1
    assert len(loops) <= 4 + (method == "eagle")


@pytest.mark.parametrize("shape, method", CASES)
def test_temporary_memory_is_small(shape, method):
    """The block's logits on a chip, some copies of them, and the weights that were laid out anew."""
    cycle, config = compiled(shape, method), SHAPES[shape]
    logits = 4 * 4 * 8 * config.vocab_size
    anew = sum(size for size, _ in moves(cycle, outside=True))
    assert cycle.memory.temp_size_in_bytes <= 4 * logits + anew + cycle.cache_bytes / 4
