"""What is sampled: the processed law, by noise that depends on seed and position alone; ties go to the lowest id."""

import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2
from scripted import CHUNK, FIELDS, MESHES, TREE, outputs, save_target, scripted, tensors, wishes

from specjax import Engine, load_target
from specjax.drafters.lookup import Lookup
from specjax.models.attention import MASKED
from specjax.sampling import (
    ACCEPTING,
    GUESSING,
    SamplingState,
    draw,
    draw_distinct,
    greedy,
    gumbel,
    likeliest,
    likeliest_one_by_one,
    process,
    threshold,
    uniform,
)
from specjax.verify.target_first import TargetFirst

P = np.array([0.40, 0.10, 0.25, 0.05, 0.20])
SETTINGS = [
    {"temperature": temperature} | cut
    for temperature in (0.5, 1.0, 1.5)
    for cut in ({}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 4, "top_p": 0.7})
]


MIXED = [SETTINGS[i] for i in (4, 1, 6, 11)]  # plain, top-k at 0.5, top-p at 1, both at 1.5


def processed(p: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """The law by its definition: sort, keep, renormalise. Tokens that tie with the last kept one stay."""
    p = p ** (1 / temperature)
    p = p / p.sum()
    if top_k:
        p = np.where(p >= np.sort(p)[::-1][top_k - 1], p, 0)
        p = p / p.sum()
    if top_p < 1:
        falling = np.sort(p)[::-1]
        last = falling[np.searchsorted(np.cumsum(falling), top_p - 1e-7)]
        p = np.where(p >= last, p, 0)
        p = p / p.sum()
    return p


def chi_square(counts: np.ndarray, law: np.ndarray) -> None:
    """Counts fit the law at the 0.1 % level; what has no probability never occurs."""
    assert counts[law == 0].sum() == 0
    kept = law > 0
    expected = max(counts.sum(), 1e-9) * law[kept]
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    assert statistic < chi2.isf(0.001, max(kept.sum() - 1, 1)), (statistic, counts, law)


def rows(count: int, temperature=1.0, top_k=0, top_p=1.0, seed=0) -> SamplingState:
    keys = np.stack([np.zeros(count), seed + np.arange(count)], axis=1).astype(np.uint32)
    heat, mass = (np.full(count, x, np.float32) for x in (temperature, top_p))
    return SamplingState(heat, np.full(count, top_k), mass, keys)


@pytest.mark.parametrize("tied", [False, True])
def test_threshold_equals_sorting(tied):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(64, 301)).astype(np.float32)
    if tied:
        values = np.round(values * 2) / 2
    counts = rng.integers(1, 302, 64)
    got = jax.jit(threshold)(values, np.ones_like(values), counts.astype(np.float32))
    falling = np.sort(values, axis=-1)[:, ::-1]
    np.testing.assert_array_equal(got, np.take_along_axis(falling, counts[:, None] - 1, axis=1)[:, 0])


def test_threshold_with_signed_zeros_infinities_and_one_value():
    values = np.array([[0.0, -0.0, -np.inf, np.inf], [3.0] * 4, [-1e30] * 3 + [0.0]], np.float32)
    got = jax.jit(threshold)(values, np.ones_like(values), np.array([1, 4, 2], np.float32))
    np.testing.assert_array_equal(got, np.array([np.inf, 3.0, -1e30], np.float32))


@pytest.mark.parametrize("tied", [False, True])
def test_processed_law_equals_its_definition(tied):
    rng = np.random.default_rng(1)
    logits = 2 * rng.normal(size=(40, 211)).astype(np.float32)
    if tied:
        logits = np.round(logits)
    temperature = rng.uniform(0.3, 2, 40).astype(np.float32)
    top_k = rng.integers(0, 60, 40)
    top_p = rng.uniform(0.2, 1, 40).astype(np.float32)
    top_k[::3], top_p[::4] = 0, 1
    state = SamplingState(temperature, top_k, top_p, np.zeros((40, 2), np.uint32))
    weights = np.exp(np.asarray(jax.jit(process)(logits, state), np.float64))
    got = weights / weights.sum(-1, keepdims=True)
    for row in range(40):
        p = np.exp(logits[row].astype(np.float64))
        np.testing.assert_allclose(got[row], processed(p, temperature[row], top_k[row], top_p[row]), atol=1e-6)


def test_top_k_beyond_the_vocabulary_and_top_k_of_one():
    logits = np.log(P)[None].repeat(2, 0).astype(np.float32)
    state = rows(2).replace(top_k=np.array([99, 1]))
    got = np.exp(np.asarray(jax.jit(process)(logits, state)))
    np.testing.assert_allclose(got[0] / got[0].sum(), P, atol=1e-6)
    np.testing.assert_array_equal(got[1], [1, 0, 0, 0, 0])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_first_token_law(setting):
    """50,000 draws: by seed at one position, then by position with one seed."""
    count = 50_000
    logits = np.broadcast_to(np.log(P).astype(np.float32), (count, 5))
    law = processed(P, **setting)
    drawn = jax.jit(draw)
    by_seed = drawn(logits, rows(count, **setting), np.full(count, 7))
    one_key = rows(count, **setting).replace(key=np.broadcast_to(np.array([0, 3], np.uint32), (count, 2)))
    by_position = drawn(logits, one_key, np.arange(count))
    for tokens in (by_seed, by_position):
        chi_square(np.bincount(np.asarray(tokens), minlength=5), law)


@pytest.mark.parametrize("law", [dict(temperature=1e-38), dict(temperature=1.0, top_p=1e-45), dict(temperature=1e-4)])
def test_extreme_settings_leave_the_likeliest_token(law):
    logits = jnp.array([[0.5, 3.0, 2.9, -1.0]])
    law = {"temperature": 1.0, "top_p": 1.0} | law
    state = SamplingState(
        jnp.array([law["temperature"]], jnp.float32),
        jnp.zeros(1, jnp.int32),
        jnp.array([law["top_p"]], jnp.float32),
        jnp.zeros((1, 2), jnp.uint32),
    )
    drawn = [int(jax.jit(draw)(logits, state, jnp.array([n]))[0]) for n in range(20)]
    assert drawn == [1] * 20


def test_noise_depends_on_seed_position_and_token_alone():
    keys = np.array([[0, 1], [0, 1], [0, 2]], np.uint32)
    noise, position, some = jax.jit(gumbel), np.array([4, 5, 4]), np.array([3, 96, 50])
    small, large = (np.asarray(noise(keys, position, np.arange(size))) for size in (97, 128))
    np.testing.assert_array_equal(small, large[:, :97])
    np.testing.assert_array_equal(small[:, some], noise(keys, position, some))
    assert len({row.tobytes() for row in small}) == 3
    np.testing.assert_array_equal(small[1], noise(keys[:1], np.array([5]), np.arange(97))[0])


def test_noise_is_that_of_jax_random():
    key = jax.random.fold_in(jax.random.wrap_key_data(np.array([7, 2**32 - 5], np.uint32), impl="threefry2x32"), 11)
    want = jax.random.gumbel(key, (5000,), jnp.float32)
    got = jax.jit(gumbel)(np.array([[7, 2**32 - 5]], np.uint32), np.array([11]), np.arange(5000))
    np.testing.assert_array_equal(got[0], jax.jit(lambda x: x)(want))


def test_padding_of_the_vocabulary_is_never_drawn():
    logits = np.full((4096, 8), MASKED, np.float32)
    logits[:, :3] = [[-50.0, -50.0, -50.0]]
    for setting in ({"temperature": 1.0}, {"temperature": 100.0, "top_p": 0.99}, {"temperature": 1.0, "top_k": 7}):
        tokens = np.asarray(jax.jit(draw)(logits, rows(4096, **setting), np.zeros(4096, int)))
        assert set(tokens.tolist()) == {0, 1, 2}


def test_greedy_takes_the_lowest_of_equal_maxima():
    logits = np.zeros((2, 97), np.float32)
    logits[0, [3, 7, 50]] = 1
    assert np.asarray(jax.jit(greedy)(logits)).tolist() == [3, 0]
    assert np.asarray(jax.jit(draw)(logits, rows(2, 0.0), np.zeros(2, int))).tolist() == [3, 0]


@pytest.mark.parametrize("way", [likeliest, likeliest_one_by_one])
def test_the_likeliest_are_those_of_a_stable_sort(way):
    logits = np.round(2 * np.random.default_rng(6).normal(size=(3, 4, 60))).astype(np.float32)  # full of ties
    logits += 0.0  # a top-k has -0 below 0
    logits[..., 40:] = MASKED
    values, tokens = jax.jit(way, static_argnums=1)(logits, 45)
    want = np.argsort(-logits, axis=-1, kind="stable")[..., :45]
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, want, axis=-1))


def in_order(law: np.ndarray, count: int) -> np.ndarray:
    """The law of `count` draws without replacement, in order: [len(law)] * count, by its definition."""
    if count == 1:
        return law
    found = np.zeros([len(law)] * count)
    for token in np.flatnonzero(law):
        left = np.where(np.arange(len(law)) == token, 0, law)
        found[token] = law[token] * in_order(left / left.sum(), count - 1)
    return found


distinct = jax.jit(draw_distinct, static_argnums=3)


@pytest.mark.parametrize("setting", [SETTINGS[i] for i in (0, 4, 10)], ids=str)
def test_distinct_draws_have_the_law_of_drawing_without_replacement_in_order(setting):
    """100,000 triples; beside each, independent of it: the target's own draw there, and whether a draft is accepted."""
    count, law, sampling = 100_000, processed(P, **setting), rows(100_000, **setting)
    logits = np.broadcast_to(np.log(P).astype(np.float32), (count, 1, 5))
    position = np.arange(count) % 5
    places, possible = distinct(logits, sampling, position, 3)
    drawn = np.asarray(places)[:, 0]
    assert np.asarray(possible)[:, 0].all(0).tolist() == [True, True, np.count_nonzero(law) > 2]
    pairs = np.bincount(drawn[:, 0] * 5 + drawn[:, 1], minlength=25)
    chi_square(pairs, in_order(law, 2).ravel())
    if possible.all():
        chi_square(np.bincount(drawn @ [25, 5, 1], minlength=125), in_order(law, 3).ravel())
    own = np.asarray(jax.jit(draw)(logits[:, 0], sampling, position))
    chi_square(np.bincount(drawn[:, 0] * 5 + own, minlength=25), np.outer(law, law).ravel())
    noise = np.asarray(uniform(sampling.key, position, 2, ACCEPTING)[:, 0] * 4).astype(int)
    for tokens in (own, drawn[:, 0]):
        chi_square(np.bincount(tokens * 4 + noise, minlength=20), np.outer(law, np.full(4, 0.25)).ravel())


def test_distinct_draws_run_out_with_the_law_and_are_the_best_at_temperature_0():
    logits = np.array([[[0.0, 3.0, 3.0, 1.0, MASKED, MASKED], [2.0, MASKED, 0.0, MASKED, MASKED, MASKED]]], np.float32)
    for temperature in (0.0, 1e-4, 1.0, 100.0):
        places, possible = distinct(logits, rows(1, temperature), np.zeros(1, int), 6)
        assert np.asarray(possible).tolist() == [[[True] * 4 + [False] * 2, [True] * 2 + [False] * 4]]
        assert set(np.asarray(places)[0, 0, :4].tolist()) == {0, 1, 2, 3}
        assert np.asarray(places)[0, 1, :2].tolist() == [0, 2] or temperature >= 1
    best, _ = distinct(logits, rows(1, 0.0), np.zeros(1, int), 4)
    assert np.asarray(best)[0, 0].tolist() == [1, 2, 3, 0]
    _, possible = distinct(logits, rows(1, 1.0, top_k=1), np.zeros(1, int), 3)
    assert np.asarray(possible).tolist() == [[[True, True, False], [True, False, False]]]  # two are tied


def test_distinct_draws_depend_on_seed_position_and_law_alone():
    logits = np.random.default_rng(0).normal(size=(3, 4, 40)).astype(np.float32)
    sampling, position = rows(3), np.array([4, 4, 9])
    places, _ = distinct(logits, sampling, position, 6)
    padded = np.pad(logits[1:2, 2:3], [(0, 0), (0, 0), (0, 9)], constant_values=MASKED)
    alone, _ = distinct(padded, rows(1, seed=1), position[1:2], 3)
    np.testing.assert_array_equal(alone[0, 0], places[1, 2, :3])
    noise = [np.asarray(gumbel(sampling.key, position, np.arange(40), use)) for use in (None, GUESSING, ACCEPTING)]
    assert len({row.tobytes() for table in noise for row in table}) == 9


@functools.cache
def opened(kind: str, mesh: str = ""):
    """A target whose logits are a fixed law, the log of a Markov table, or a tie of tokens 3, 7 and 50."""
    if kind == "ties":
        fields, table = FIELDS, tensors(FIELDS)
        table["lm_head.weight"] *= 0.01
        table["lm_head.weight"][[3, 7, 50]] = 0
        table["lm_head.weight"][[i for i in range(97) if i not in (3, 7, 50)], 0] = -5  # three rows of zeros tie on top
        table["model.norm.weight"] = np.eye(32, dtype=np.float32)[0]
        table["model.embed_tokens.weight"][:, 0] = 50
    else:
        fields = FIELDS | {"vocab_size": 5, "max_position_embeddings": 512}
        table = tensors(fields)
        for name, value in table.items():
            if "o_proj" in name or "down_proj" in name:
                value[:] = 0  # the residual stream is the token's embedding alone
        table["model.embed_tokens.weight"] = np.eye(5, 32, dtype=np.float32)
        table["model.norm.weight"] = np.ones(32, np.float32)
        law = np.tile(P, (5, 1)) if kind == "table" else MARKOV
        table["lm_head.weight"] = np.zeros((5, 32), np.float32)
        table["lm_head.weight"][:, :5] = np.log(law).T / np.sqrt(1 / (1 / 32 + 1e-5))
    with tempfile.TemporaryDirectory() as folder:
        return load_target(save_target(Path(folder), fields, table), mesh=mesh)


MARKOV = np.random.default_rng(2).dirichlet(np.full(5, 2.0), 5)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("method", ["eager", "lookup", "chain", "scripted"])
def test_equal_maxima_give_the_lowest_token_in_every_path(method, mesh):
    place = opened("ties", MESHES[mesh])
    if method == "scripted":
        engine = scripted(place, TREE)
    else:
        drafter = Lookup(branches=(5,), shortest=1)
        engine = Engine(place, (drafter, TargetFirst(5)) if method == "chain" else method, chunk=CHUNK)
    state = engine.decode(engine.prefill(engine.start([[1, 2], [9], [3] * 8], wishes(3, max_new_tokens=12), 3)))
    assert outputs(state, 3) == [[3] * 12] * 3


@functools.cache
def sampled(kind: str, method: str, seed: int = 0, count: int = 16) -> np.ndarray:
    """256 tokens of equal prompts, for each setting of MIXED `count` rows: [settings, count, 256]."""
    drafter = Lookup(branches=(3, 2), shortest=1)
    engine = Engine(opened(kind), (drafter, TargetFirst(drafter.depth)) if method == "lookup" else method, chunk=CHUNK)
    asked = [wish for setting in MIXED for wish in wishes(count, max_new_tokens=256, **setting)]
    asked = [type(wish)(**{**wish.__dict__, "seed": seed + i}) for i, wish in enumerate(asked)]
    state = engine.decode(engine.prefill(engine.start([[0]] * len(asked), asked, len(asked))))
    if method == "lookup":
        assert np.asarray(state.stats.accepted).sum() > 0.2 * len(asked) * 256
    return np.array(outputs(state, len(asked))).reshape(len(MIXED), count, 256)


@pytest.mark.parametrize("method", ["eager", "lookup"])
def test_law_of_the_next_token_given_the_last(method):
    """A Markov table for a model, so that the two-token law is a row of the table, processed."""
    for setting, tokens in zip(MIXED, sampled("markov", method)):
        before = np.concatenate([np.zeros((len(tokens), 1), int), tokens[:, :-1]], axis=1)
        for last in range(5):
            chi_square(np.bincount(tokens[before == last], minlength=5), processed(MARKOV[last], **setting))


@pytest.mark.parametrize("method", ["eager", "lookup"])
def test_neighbouring_tokens_are_independent_and_rows_differ(method):
    """The same law at every position: pairs fit p x p; noise that is used twice would show."""
    for setting, tokens in zip(MIXED, sampled("table", method)):
        assert len({row.tobytes() for row in tokens}) == len(tokens)
        law = processed(P, **setting)
        pairs = tokens.reshape(-1, 2)
        chi_square(np.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25), np.outer(law, law).ravel())


def test_a_draft_changes_no_sampled_token():
    for kind in ("markov", "table"):
        np.testing.assert_array_equal(sampled(kind, "eager"), sampled(kind, "lookup"))


def test_another_seed_gives_another_text():
    assert (sampled("table", "lookup") != sampled("table", "lookup", seed=10_000)).any(-1).all()


def test_a_large_seed_is_not_cut_off():
    keys = np.array([[0, 2**32 - 1], [0, 2**31 - 1]], np.uint32)
    noise = np.asarray(jax.jit(gumbel)(jnp.array(keys), np.zeros(2, int), np.arange(8)))
    assert (noise[0] != noise[1]).all()
