"""Meshes: the same tokens on every one, sizes that do not divide, parameters really split, errors in one sentence."""

import functools

import jax
import numpy as np
import pytest
from scripted import CHUNK, FIELDS, LENGTHS, TREE, oracle, outputs, plain, prompts, script, scripted, target, wishes

from specjax import Engine, Sampling
from specjax.drafters.lookup import Lookup
from specjax.sharding import make_mesh, parse_mesh
from specjax.verify.target_first import TargetFirst

ODD = {"intermediate_size": 66, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}
LAWS = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}]


@functools.cache
def looked_up(mesh: str, odd: bool = False, rows: int = 3):
    """(tokens, accepted, cycles) of lookup with one law for each row."""
    drafter = Lookup(branches=(4, 2), shortest=1)
    place = target(mesh, **(ODD if odd else {}))
    engine = Engine(place, (drafter, TargetFirst(drafter.depth)), chunk=CHUNK)
    asked = prompts(LENGTHS[-rows:])
    wanted = [wishes(rows, max_new_tokens=32, **law)[row] for row, law in enumerate(LAWS[:rows])]
    state = engine.decode(engine.prefill(engine.start(asked, wanted, rows)))
    for counts in jax.tree.leaves(state.stats):
        assert counts.sharding.spec[0] == "data" and counts.is_fully_addressable
    counts = [np.asarray(x)[:rows].tolist() for x in (state.stats.accepted, state.stats.cycles)]
    return outputs(state, rows), *counts


@pytest.mark.parametrize("mesh", ["data=1,model=8", "data=8,model=1", "data=2,model=4"])
def test_tokens_and_counts_equal_one_device(mesh):
    assert looked_up(mesh) == looked_up("")
    assert sum(looked_up("")[1]) > 0


@pytest.mark.parametrize("mesh", ["data=2,model=4", "data=1,model=2"])
def test_sizes_that_do_not_divide_the_mesh_change_nothing(mesh):
    """97 tokens, 66 MLP units, 3 kv heads with 9 query heads, batch 3."""
    assert looked_up(mesh, odd=True) == looked_up("", odd=True)
    assert looked_up("", odd=True)[0][0] == plain(prompts(LENGTHS[-3:])[0], 32, FIELDS | ODD)


def test_a_padded_vocabulary_is_never_emitted():
    place = target("data=2,model=4")
    assert place.leaves[0].shape[0] > 97 or max(x.shape[0] for x in place.leaves) > 97
    engine = scripted(place, TREE)
    state = engine.prefill(engine.start(prompts([5, 9]), wishes(2, max_new_tokens=60, temperature=50.0), 2))
    state = engine.decode(script(state, *oracle([[], []], 2, "random")))
    assert max(map(max, outputs(state, 2))) < 97


def test_parameters_are_split_and_what_is_not_is_small_and_known():
    place = target("data=2,model=4")
    total = per_device = replicated = 0
    names = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(place.tree, place.leaves))[0]
    for path, leaf in names:
        name = jax.tree_util.keystr(path)
        held = leaf.addressable_shards[0].data.nbytes
        total, per_device = total + leaf.nbytes, per_device + held
        if leaf.is_fully_replicated:
            replicated += leaf.nbytes
            assert "norm" in name, f"{name} {leaf.shape} is on every device"
        else:
            assert held * 4 == leaf.nbytes, name
    assert per_device <= total / 4 + replicated


def test_a_mesh_of_some_devices_uses_only_those():
    place = target("data=1,model=4")
    engine = Engine(place, chunk=CHUNK)
    state = engine.decode(engine.prefill(engine.start([[5]], wishes(1, max_new_tokens=4), 1)))
    used = {device for x in jax.tree.leaves((place.leaves, state)) for device in x.sharding.device_set}
    assert used == set(jax.devices()[:4])


def test_everything_a_user_calls_works_on_a_mesh():
    """Results, stop strings, streaming and a second call with the same parameters."""
    alone, spread = (Engine(target(mesh), "lookup", chunk=CHUNK) for mesh in ("", "data=2,model=4"))
    sampling = Sampling(max_new_tokens=12, temperature=1.0, stop=("t8",))
    asked = prompts([5, 9, 12])
    pieces = []
    for _ in range(2):
        want = alone.generate(asked, sampling, batch_size=2)
        assert spread.generate(asked, sampling, batch_size=2, stream=lambda row, text: pieces.append(row)) == want
    assert set(pieces) == {0, 1, 2}


def test_mesh_text_becomes_sizes():
    assert parse_mesh("model=4") == {"data": 1, "model": 4}
    assert parse_mesh("data=2, model=4") == {"data": 2, "model": 4}
    assert make_mesh("data=2,model=4").shape == {"data": 2, "model": 4}
    assert make_mesh().devices.size == 1


@pytest.mark.parametrize("text", ["rows=2", "data=0", "data=x", "data", "model=-1", "data=2;model=4"])
def test_a_mesh_that_cannot_be_read_is_named(text):
    with pytest.raises(ValueError, match="^mesh part '[^\n]*' is not AXIS=SIZE[^\n]*$"):
        make_mesh(text)


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(ValueError, match="^mesh 'data=4,model=4' needs 16 devices and 8 are here[^\n]*$"):
        make_mesh("data=4,model=4")
