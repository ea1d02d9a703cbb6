"""Compiled programs: made once for a shape whatever is asked for, updating the cache in place without copying it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import CHUNK, outputs, prompts, target, wishes

from specjax import Engine, Sampling
from specjax.decode.programs import bucket_ladder
from specjax.decode.target import Target, declare, from_state
from specjax.models.config import ModelConfig
from specjax.models.rope import Rope
from specjax.sharding import make_mesh

SMALL = ModelConfig("llama", 512, 64, 6, 4, 2, 32, 128, 2048, 1e-5, Rope(10000.0), (None,) * 6)
SMOLLM2 = ModelConfig("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, 1e-5, Rope(100000.0), (None,) * 30, tied=True)


def abstract_target(config: ModelConfig, mesh, dtype=jnp.float32) -> Target:
    """A target of shapes alone, for compiling."""
    graph, state = declare(config, mesh, dtype)
    return from_state("abstract", config, graph, state, None, mesh, dtype, "")


@pytest.fixture
def compiles():
    """Counts what XLA compiles, fetched from the persistent cache or not, while it is in use."""
    names = []

    def listen(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("mesh", ["", "data=2,model=4"])
@pytest.mark.parametrize("method", ["eager", "lookup"])
def test_nothing_is_compiled_again_for_another_request(method, mesh, compiles):
    engine = Engine(target(mesh), method, chunk=CHUNK)
    engine.generate([[5, 6, 7]], Sampling(max_new_tokens=8))
    made, seen = len(engine.programs), len(compiles)
    assert seen >= made == 2
    for i, prompt in enumerate(prompts([1, 9, 60, 100])):
        engine.generate([prompt], Sampling(max_new_tokens=5 + 9 * i, temperature=0.3 * i, seed=i))
        engine.generate([prompt], Sampling(temperature=1.0, top_k=i, top_p=1 - 0.1 * i, max_new_tokens=3, stop=("t5",)))
    assert (len(engine.programs), len(compiles)) == (made, seen)


def test_a_compile_is_announced_with_what_which_of_how_many_and_seconds(capsys):
    engine = Engine(target(), "lookup", chunk=CHUNK)
    engine.generate([[5]], Sampling(max_new_tokens=3))
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[0].startswith("compiled lookup prefill for batch 1, 256 slots: 1 of at most 1 such programs, ")
    assert lines[1].startswith("compiled lookup loop for batch 1, 256 slots: 1 of at most 1 such programs, ")
    assert engine.programs.compile_seconds > 0


@pytest.mark.parametrize("method", ["eager", "lookup"])
def test_the_state_is_donated_and_parameters_are_not(method, recwarn):
    """Old caches are gone after a program; a second generation with the same parameters still works."""
    engine = Engine(target(), method, chunk=CHUNK)
    texts = []
    for _ in range(2):
        start = engine.start(prompts([9]), wishes(1, max_new_tokens=10), 1)
        filled = engine.prefill(start)
        ended = engine.decode(filled)
        for old in (start, filled):
            assert all(x.is_deleted() for x in old.cache.k + old.cache.v)
        assert not any(x.is_deleted() for x in engine.target.leaves)
        texts.append(outputs(ended, 1))
    assert texts[0] == texts[1]
    assert not [warning for warning in recwarn if "donated" in str(warning.message)]


def temporary_share(config: ModelConfig, method: str, kind: str, chunk: int) -> float:
    """Temporary memory of a compiled program over the cache's bytes, batch 8 and 1,024 slots."""
    engine = Engine(abstract_target(config, make_mesh()), method, chunk=chunk)
    state = engine.abstract(8, 1024)
    memory = engine.programs.compiled(kind, state).memory_analysis()
    cache = sum(np.prod(x.shape) * x.dtype.itemsize for x in state.cache.k + state.cache.v)
    assert memory.alias_size_in_bytes >= 0.99 * cache
    return memory.temp_size_in_bytes / cache


@pytest.mark.parametrize("method", ["eager", "lookup"])
def test_a_cycle_copies_no_cache(method):
    assert temporary_share(SMALL, method, "loop", CHUNK) <= 0.15


def test_a_prefill_chunk_copies_no_cache():
    assert temporary_share(SMALL, "eager", "prefill", CHUNK) <= 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, kind, most", [("eager", "loop", 0.15), ("lookup", "loop", 0.15), ("eager", "prefill", 0.5)]
)
def test_smollm2_copies_no_cache(method, kind, most, capsys):
    share = temporary_share(SMOLLM2, method, kind, 128)
    with capsys.disabled():
        print(f"\n{method} {kind}: temporary memory is {share:.3f} of the cache")
    assert share <= most


def test_buckets_grow_fourfold_and_the_last_holds_the_context():
    assert bucket_ladder(8192, 128) == [512, 2048, 8320]
    assert bucket_ladder(192, 16) == [256]
    for context in (1, 100, 511, 512, 1000, 1024, 5000, 40_000):
        sizes = bucket_ladder(context, 128)
        assert sizes == sorted(sizes) and sizes[-1] >= context + 128
        assert all(4 * a == b for a, b in zip(sizes[:-2], sizes[1:-1]))
