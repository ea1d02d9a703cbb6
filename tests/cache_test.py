"""The cache holds the accepted tokens and nothing else: after every cycle, bucket and request."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from scripted import CHUNK, MESHES, TREE, oracle, outputs, plain, prompts, script, scripted, target, wishes

from specjax import Engine, Sampling, cache, trees
from specjax.drafters.lookup import Lookup
from specjax.models.transformer import BlockKV
from specjax.sharding import make_mesh, row_spec
from specjax.verify.target_first import TargetFirst

CHAINS = {4: tuple(trees.branches(4).tolist()), 1: tuple(trees.branches(1).tolist())}


def cached(state) -> list[np.ndarray]:
    """Keys and values of every layer."""
    return [np.asarray(x) for x in state.cache.k + state.cache.v]


def assert_equals_fresh_prefill(state, fresh, rows: int) -> None:
    """Below each row's length, keys and values are those of a prefill; the length is the text's less one."""
    length, count = np.asarray(state.cache.length), np.asarray(state.text.count)
    for row in range(rows):
        assert length[row] == count[row] - 1
        for kept, new in zip(cached(state), cached(fresh), strict=True):
            np.testing.assert_allclose(kept[row, :, : length[row]], new[row, :, : length[row]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block, right", [(4, 0), (4, 1), (4, 2), (4, 3), (4, 4), (1, 0), (1, 1)])
def test_after_every_cycle_the_cache_is_that_of_a_fresh_prefill(block, right):
    """Drafts that are right for `right` tokens and then wrong, the last or only one too."""
    prompt = prompts([17])[0]
    text = prompt + plain(prompt, 20)
    method = scripted(target(), CHAINS[block])
    fresh = method.prefill(method.start([text], wishes(1), 1))
    state = method.prefill(method.start([prompt], wishes(1, max_new_tokens=20), 1))
    tokens, others = oracle([text], 1)
    if right < block:
        tokens[:, len(prompt) + 1 + right :: right + 1] = others[:, len(prompt) + 1 + right :: right + 1]
    state = script(state, tokens, others)
    assert_equals_fresh_prefill(state, fresh, 1)
    cycles = 0
    while np.asarray(state.text.running).any():
        before = int(state.text.count[0])
        state = method.decode(state, 1)
        cycles += 1
        assert int(state.text.count[0]) == min(before + right + 1, len(text))
        assert_equals_fresh_prefill(state, fresh, 1)
    assert outputs(state, 1)[0] == text[len(prompt) :]
    assert int(state.stats.cycles[0]) == cycles == -(-19 // (right + 1))


def test_after_every_cycle_of_a_ragged_batch_with_a_tree_too():
    asked = prompts([1, 5, 33])
    texts = [prompt + plain(prompt, 24) for prompt in asked]
    method = scripted(target(), TREE)
    fresh = method.prefill(method.start(texts, wishes(3), 3))
    state = method.prefill(method.start(asked, wishes(3, max_new_tokens=24), 3))
    state = script(state, *oracle(texts, 3, "mixed"))
    while np.asarray(state.text.running).any():
        state = method.decode(state, 1)
        assert_equals_fresh_prefill(state, fresh, 3)


@struct.dataclass
class Seen:
    """What a drafter was told per row: tokens [B, M], the token after each call's last one [B, M], all their features
    [B, M, D], how many [B]."""

    tokens: jax.Array
    following: jax.Array
    features: jax.Array
    length: jax.Array


@struct.dataclass
class Recording(Lookup):
    """Lookup that writes down what `extend` tells it."""

    taps = (2,)

    def init(self, batch, slots):
        def zeros(shape, dtype):
            return jnp.zeros(shape, dtype, out_sharding=row_spec(len(shape)))

        tokens = zeros((batch, 256), int)
        return Seen(tokens, tokens, zeros((batch, 256, 32), float), zeros((batch,), int))

    def extend(self, state, tokens, features, count, after):
        def write(state, tokens, feature, count, after):
            spots = jnp.where(jnp.arange(tokens.shape[1]) < count[:, None], state.length[:, None], 256)
            spots = spots + jnp.arange(tokens.shape[1])
            rows = jnp.arange(tokens.shape[0])[:, None]
            last = jnp.where(count > 0, state.length + count - 1, 256)[:, None]
            return Seen(
                state.tokens.at[rows, spots].set(tokens, mode="drop"),
                state.following.at[rows, last].set(after[:, None], mode="drop"),
                state.features.at[rows, spots].set(feature, mode="drop"),
                state.length + count,
            )

        spread = jax.sharding.auto_axes(write, out_sharding=Seen(row_spec(2), row_spec(2), row_spec(3), row_spec(1)))
        return spread(state, tokens, features[0], count, after)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_drafter_is_told_the_cached_tokens_and_their_features_once_each(mesh):
    drafter = Recording(branches=(3, 2), shortest=1)
    asked = prompts([1, 9, 33])
    method = Engine(target(MESHES[mesh]), (drafter, TargetFirst(drafter.depth)), chunk=CHUNK)
    state = method.decode(method.prefill(method.start(asked, wishes(3, max_new_tokens=40), 3)))
    assert np.asarray(state.stats.accepted)[:3].sum() > 10
    texts = [prompt + output for prompt, output in zip(asked, outputs(state, 3))]
    fresh = method.prefill(method.start(texts, wishes(3), 3))
    for row, text in enumerate(texts):
        length = np.asarray(state.cache.length)[row]
        assert np.asarray(state.drafter.length)[row] == length == len(text) - 1
        assert np.asarray(state.drafter.tokens)[row, :length].tolist() == text[:-1]
        following = np.asarray(state.drafter.following)[row, : length - 1]  # where the row ended it may be any
        told = np.flatnonzero(following)
        assert len(told) >= np.asarray(state.stats.cycles)[row] - 2
        assert following[told].tolist() == [text[1 + spot] for spot in told]
        kept, new = (np.asarray(s.drafter.features)[row, :length] for s in (state, fresh))
        np.testing.assert_allclose(kept, new, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES.values())
def test_append_writes_the_accepted_path_behind_each_length(mesh):
    rng = np.random.default_rng(0)
    layers, rows, heads, slots, size, nodes = 2, 2, 4, 24, 8, 6
    old = rng.normal(size=(2, layers, rows, heads, slots, size)).astype(np.float32)
    new = rng.normal(size=(2, layers, rows, nodes, heads, size)).astype(np.float32)
    length, count = np.array([3, 20]), np.array([2, 0])
    path = np.array([[0, 4, 5, 1], [0, 2, 2, 2]])
    grid = make_mesh(mesh)
    with jax.set_mesh(grid):
        empty = cache.empty(target(mesh).config, rows, slots, jnp.float32)
        split = jax.NamedSharding(grid, empty.k[0].sharding.spec)
        block = jax.NamedSharding(grid, jax.P(split.spec[0], None, split.spec[1], None))
        by_row = jax.NamedSharding(grid, row_spec(1))
        held = (tuple(jax.device_put(x, split) for x in part) for part in old)
        kv = cache.KVCache(*held, jax.device_put(length, by_row))
        entries = BlockKV(*(tuple(jax.device_put(x, block) for x in part) for part in new))
        path_on_mesh = jax.device_put(path, jax.NamedSharding(grid, row_spec(2)))
        append = jax.jit(cache.append)
        got = append(kv, entries, path_on_mesh, jax.device_put(count, by_row), after=jax.device_put(count, by_row))
    assert np.asarray(got.length).tolist() == [5, 20]
    for layer in range(layers):
        for part, result in enumerate((got.k, got.v)):
            result = np.asarray(result[layer])
            for row in range(rows):
                behind = length[row] + path.shape[1]
                np.testing.assert_array_equal(result[row, :, : length[row]], old[part, layer, row, :, : length[row]])
                np.testing.assert_array_equal(result[row, :, behind:], old[part, layer, row, :, behind:])
                for i in range(count[row]):
                    np.testing.assert_array_equal(result[row, :, length[row] + i], new[part, layer, row, path[row, i]])


def test_growing_keeps_the_contents():
    method = Engine(target(), chunk=CHUNK)
    state = method.prefill(method.start(prompts([20]), wishes(1), 1))
    grown = jax.jit(cache.grow, static_argnums=1)(state.cache, 512)
    assert grown.slots == 512 and int(grown.length[0]) == 20
    for kept, old in zip(grown.k + grown.v, state.cache.k + state.cache.v, strict=True):
        np.testing.assert_array_equal(np.asarray(kept)[:, :, :256], np.asarray(old))


def test_hundreds_of_requests_leave_nothing_behind():
    """Five kinds, errors and early stops among them: arrays and programs stop growing, answers stay the same."""
    methods = [Engine(target(), "eager", chunk=CHUNK), Engine(target(), "lookup", chunk=CHUNK)]
    asked = prompts([5, 9, 20])

    def request(i: int):
        method, seed = methods[i % 2], i
        match i % 5:
            case 0:
                return method.generate([asked[0]], Sampling(max_new_tokens=8))[0]
            case 1:
                return method.generate([asked[1]], Sampling(max_new_tokens=8, temperature=1.0, seed=seed))[0]
            case 2:
                return method.generate([asked[2]], Sampling(max_new_tokens=20, stop=("t8",)))[0]
            case 3:
                with pytest.raises(ValueError, match="is empty"):
                    method.generate([[]])
            case 4:  # abandoned after its prefill and one slice
                method.decode(method.prefill(method.start([asked[0]], [Sampling(max_new_tokens=50)], 1)), 2)

    def alive():
        gc.collect()
        arrays = jax.live_arrays()
        return len(arrays), sum(x.nbytes for x in arrays), [len(method.programs) for method in methods]

    first = [request(i) for i in range(20)]
    before = alive()
    last = [request(i % 20) for i in range(280, 300)]
    for i in range(20, 280):
        request(i)
    assert alive() == before
    assert [request(i) for i in range(20)] == first == last
