"""Rejection without replacement keeps the target's law: exactly at a node, through trees, from cycle to cycle."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_test import MARKOV, chi_square, processed, rows
from verify_test import SHAPES

from specjax import trees
from specjax.models.attention import MASKED
from specjax.sampling import ACCEPTING, SamplingState, draw, draw_distinct, gumbel, uniform
from specjax.trees import Draft, Law
from specjax.verify.rejection import Rejection, try_in_order
from specjax.verify.target_first import TargetFirst

GRID = 2**23  # of the uniform numbers in float32
IDS = np.array([0, 2, 3])  # a draft vocabulary


def softmax(weights: np.ndarray) -> np.ndarray:
    """Log-weights, MASKED where there is no weight -> probabilities in float64."""
    law = np.exp(np.asarray(weights, np.float64) - weights.max())
    return np.where(weights > MASKED, law / law.sum(), 0)


def without(weights: np.ndarray, tokens) -> np.ndarray:
    return np.where(np.isin(np.arange(len(weights)), tokens), MASKED, weights)


def ordered(weights: np.ndarray, count: int) -> dict[tuple[int, ...], float]:
    """The law of `count` draws without replacement, in order."""
    if not count:
        return {(): 1.0}
    found = {}
    for before, share in ordered(weights, count - 1).items():
        left = without(weights, before)
        law = softmax(left)
        found |= {(*before, int(token)): share * law[token] for token in np.flatnonzero(left > MASKED)}
    return found


def tries(p: np.ndarray, weights: np.ndarray, children: tuple[int, ...]) -> tuple[list[float], np.ndarray]:
    """The rule in float64: how probably each child is accepted once those before it are refused, and the residual."""
    chances = []
    for i, token in enumerate(children):
        q = softmax(without(weights, children[:i]))
        chances.append(min(1.0, p[token] / q[token]) if q[token] else 0.0)
        rest = np.maximum(p - q, 0)
        p = rest / rest.sum() if rest.sum() > 0 else p
    return chances, p


# One node


def node_cases() -> dict[str, tuple[np.ndarray, np.ndarray, int]]:
    """Log-weights of target and draft, and how many children are drawn."""
    rng = np.random.default_rng(0)
    p, q, none = rng.normal(size=5), rng.normal(size=5), MASKED
    far = np.array([2.0, 1.0, 0.0, -1.0, -3.0])
    cases = {f"{count} children": (2 * p, 2 * q, count) for count in (1, 2, 3, 5)}
    for temperature in (1e-4, 0.05, 0.5, 5.0):
        cases[f"temperature {temperature:g}"] = (p / temperature, q / temperature, 3)
        cases[f"target alone at {temperature:g}"] = (p / temperature, q, 2)
        cases[f"draft alone at {temperature:g}"] = (p, q / temperature, 2)
    return cases | {
        "equal": (p, p, 3),
        "nearly equal": (p, p + 1e-6 * q, 3),
        "both uniform": (0 * p, 0 * p, 5),
        "against each other": (far, far[::-1], 3),
        "disjoint": (np.array([1, 2, none, none, none]), np.array([none, none, 0, 1, 2]), 3),
        "no probability for what is guessed": (np.array([1, none, 2, none, 0]), q, 4),
        "one sure target token": (np.array([none, none, none, 0, none]), q, 3),
        "one sure guess": (p, np.array([none, 0, none, none, none]), 1),
        "the draft cannot say all": (p, np.array([0, none, 1, none, none]), 2),
    }


NODES = node_cases()


@functools.cache
def jitted():
    return jax.jit(try_in_order)


def run_node(p, weights, drawn: np.ndarray, number: int, noise: np.ndarray):
    """The compiled rule over rows that differ in their children, drawn [rows, K], and noise [rows, K]."""
    count = len(drawn)
    laws = (np.broadcast_to(x.astype(np.float32), (count, len(x))) for x in (p, weights))
    return (np.asarray(x) for x in jitted()(*laws, drawn, np.full(count, number, np.int32), noise.astype(np.float32)))


def chances_of_the_compiled_rule(p, weights, drawn: np.ndarray) -> np.ndarray:
    """How probably each child [rows, K] is accepted once those before it are refused: the noise from which on it is
    refused, by bisection of all floats that the noise can be."""
    chances = np.zeros(drawn.shape)
    for trial in range(drawn.shape[1]):
        low, high = np.zeros(len(drawn), int), np.full(len(drawn), GRID)  # refused at `high`, or never
        while (low < high).any():
            middle = (low + high) // 2
            chances[:, trial] = middle / GRID
            passes = next(run_node(p, weights, drawn, trial + 1, chances)) == trial
            low, high = np.where(passes, np.minimum(middle + 1, high), low), np.where(passes, high, middle)
        chances[:, trial] = high / GRID
    return chances


@pytest.mark.parametrize("case", NODES)
def test_a_node_emits_the_targets_law_exactly(case):
    """Over all ordered draws, with the acceptance probabilities and residuals of the compiled code itself."""
    target, draft, count = (np.asarray(x, np.float32) for x in NODES[case])
    p, shares = softmax(target), ordered(draft, int(count))
    drawn = np.array(list(shares))
    chances = chances_of_the_compiled_rule(p, draft, drawn)
    _, residual = run_node(p, draft, drawn, int(count), np.where(chances == 1, 1 - 1 / GRID, chances))
    emitted = np.zeros(len(p))
    for share, children, chance, rest in zip(shares.values(), drawn, chances, residual.astype(np.float64)):
        for token, accepted in zip(children, chance):
            emitted[token] += share * accepted
            share *= 1 - accepted
        emitted += share * rest
    assert 0.5 * np.abs(emitted - p).sum() < 1e-6


@pytest.mark.parametrize("case", NODES)
def test_a_node_accepts_as_probably_as_the_rule_says(case):
    """With one child it is Leviathan's and Chen's, and emits it with probability 1 - TV(p, q)."""
    target, draft, count = (np.asarray(x, np.float32) for x in NODES[case])
    p, q = softmax(target), softmax(draft)
    shares = {children: share for children, share in ordered(draft, int(count)).items() if share > 1e-12}
    drawn = np.array(list(shares))
    want = [tries(p, draft, children)[0] for children in shares]
    got = chances_of_the_compiled_rule(p, draft, drawn)
    reached = np.cumprod(1 - np.array(want), axis=1) > 1e-5  # else what is left is rounding
    reached = np.concatenate([np.ones((len(drawn), 1), bool), reached[:, :-1]], axis=1)
    np.testing.assert_allclose(got[reached], np.array(want)[reached], atol=2e-5)
    if count == 1:
        accepted = sum(share * chance for share, (chance,) in zip(shares.values(), want))
        np.testing.assert_allclose(accepted, 1 - 0.5 * np.abs(p - q).sum(), atol=1e-9)


def test_as_many_children_as_the_target_has_tokens_always_hold_its_token():
    target, draft = np.array([1.0, 0.0, -1.0, 2.0]), np.array([0.0, 2.0, 1.0, -1.0])
    drawn = np.array(list(ordered(draft, 4)))
    noise = np.random.default_rng(0).random(drawn.shape)
    accepted, _ = run_node(softmax(target), draft, drawn, 4, noise)
    assert (accepted < 4).all()


# Trees


def random_draft(parents: np.ndarray, law: dict, size: int = 64, vocab: int = 6):
    """Children drawn without replacement by numpy, some nodes invalid; half of the rows can go deep."""
    nodes = len(parents)
    rng = np.random.default_rng(nodes)
    target = 2 * rng.normal(size=(size, nodes, vocab)).astype(np.float32)
    guess = (target + rng.normal(size=target.shape) * (np.arange(size) % 2)[:, None, None]).astype(np.float32)
    tokens, valid = rng.integers(0, vocab, (size, nodes)), rng.random((size, nodes)) < 0.85
    valid[:, 0] = True
    for row, node in itertools.product(range(size), sorted(set(parents[1:].tolist()))):
        below, q = np.flatnonzero(parents == node), processed(softmax(guess[row, node]), **law)
        drawn = rng.choice(vocab, min(len(below), np.count_nonzero(q)), replace=False, p=q)
        tokens[row, below[: len(drawn)]], valid[row, below[len(drawn) :]] = drawn, False
    for node in range(1, nodes):
        valid[:, node] &= valid[:, parents[node]]
    of = np.broadcast_to(np.arange(nodes), tokens.shape)
    return Draft(trees.static(parents, valid), tokens, np.full(size, nodes), law=Law(guess, of, None)), target


def walk(parents, draft: Draft, logits, law_of, row: int, noise, target_noise) -> tuple[list[int], int]:
    """(path, next token) in plain Python, in float64."""
    node, path = 0, [0]
    while True:
        valid = np.asarray(draft.tree.valid[row])
        below = [i for i in range(1, len(parents)) if parents[i] == node and valid[i]]
        p, q = law_of(logits[row, node]), law_of(draft.law.logits[row, node])
        with np.errstate(divide="ignore"):
            weights = np.maximum(np.log(q), MASKED)
        chances, rest = tries(p, weights, tuple(draft.tokens[row, below]))
        passed = [i for i, (chance, u) in enumerate(zip(chances, noise[len(path) - 1][row])) if u < chance]
        if not passed:
            with np.errstate(divide="ignore"):
                return path, int(np.argmax(np.log(rest) + target_noise[len(path) - 1][row]))
        node = below[passed[0]]
        path.append(node)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("law", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.95}], ids=["plain", "cut"])
def test_verdict_equals_a_plain_walk(shape, law):
    parents = SHAPES[shape]
    draft, logits = random_draft(parents, law)
    sampling, position = rows(len(logits), **law), 10 + np.arange(len(logits))
    verifier = Rejection(trees.max_depth(parents))
    verdict = jax.jit(verifier.verify)(draft, logits, sampling, position)
    steps = range(verifier.depth + 1)
    noise = [np.asarray(uniform(sampling.key, position + step, len(parents), ACCEPTING)) for step in steps]
    target_noise = [np.asarray(gumbel(sampling.key, position + step, np.arange(logits.shape[-1]))) for step in steps]
    lengths = set()
    for row in range(len(logits)):
        path, token = walk(parents, draft, logits, lambda x: processed(softmax(x), **law), row, noise, target_noise)
        assert int(verdict.count[row]) == len(path) - 1
        assert np.asarray(verdict.path[row]).tolist()[: len(path)] == path
        assert int(verdict.next_token[row]) == token
        lengths.add(len(path))
    assert lengths >= {1, verifier.depth + 1}  # nothing and everything was accepted somewhere


@pytest.mark.parametrize("mixed", [False, True])
def test_greedy_rows_follow_the_greedy_walk_whatever_their_neighbours_do(mixed):
    draft, logits = random_draft(SHAPES["bush"], {})
    sampling = rows(len(logits), top_k=2)
    sampling = sampling.replace(temperature=(mixed * np.arange(len(logits)) % 2).astype(np.float32))
    position = np.arange(len(logits))
    depth = trees.max_depth(SHAPES["bush"])
    got, want = (jax.jit(rule(depth).verify)(draft, logits, sampling, position) for rule in (Rejection, TargetFirst))
    greedy = sampling.temperature == 0
    for row in np.flatnonzero(greedy):
        assert int(got.count[row]) == int(want.count[row]) and int(got.next_token[row]) == int(want.next_token[row])
        kept = int(want.count[row]) + 1
        np.testing.assert_array_equal(got.path[row, :kept], want.path[row, :kept])
    assert set(np.asarray(want.count)[greedy].tolist()) >= {0, 1, 2}


def test_rows_without_numbers_end_safely_and_disturb_no_other():
    """NaN logits of the draft: the target's own token; of the target: some token; no row waits for them."""
    draft, logits = random_draft(SHAPES["bush"], {})
    sampling, position = rows(len(logits)), np.arange(len(logits))
    verify = jax.jit(Rejection(trees.max_depth(SHAPES["bush"])).verify)
    want = verify(draft, logits, sampling, position)
    law, broken = draft.law.logits.copy(), logits.copy()
    law[::4] = np.nan
    broken[1::4], broken[3::4, :, 2] = np.nan, np.nan
    got = verify(draft.replace(law=draft.law.replace(logits=law)), broken, sampling, position)
    for name in ("path", "count", "next_token"):
        np.testing.assert_array_equal(getattr(got, name)[2::4], getattr(want, name)[2::4])
    assert not np.asarray(got.count)[0::4].any() and not np.asarray(got.count)[1::2].any()
    np.testing.assert_array_equal(got.next_token[::4], jax.jit(draw)(logits[:, 0], sampling, position)[::4])
    assert ((np.asarray(got.next_token) >= 0) & (np.asarray(got.next_token) < logits.shape[-1])).all()


def test_a_draft_without_a_law_is_refused():
    draft, logits = random_draft(SHAPES["chain"], {})
    with pytest.raises(ValueError, match="this drafter does not tell one; draft by eagle:rejection"):
        Rejection(4).verify(draft.replace(law=None), logits, rows(len(logits)), np.arange(len(logits)))


# Texts

GUESSES = np.random.default_rng(4).dirichlet(np.full(len(IDS), 2.0), 5)  # after each token, over IDS
PARENTS = np.array([-1, 0, 0, 1, 1, 2])


@jax.jit
def cycle(root: jax.Array, sampling: SamplingState, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One cycle from the token `root` [B]: (the tokens it emits [B, 3], how many). Target and draft are Markov tables,
    their vocabularies padded; the draft says only IDS, two guesses after the root, two after the first, one after the
    other of them."""
    pad = functools.partial(np.pad, constant_values=MASKED)
    target = jnp.array(pad(np.log(MARKOV).astype(np.float32), [(0, 0), (0, 3)]))
    guesses = jnp.array(pad(np.log(GUESSES).astype(np.float32), [(0, 0), (0, 2)]))
    ids = jnp.array(IDS)
    places, first = draw_distinct(guesses[root][:, None], sampling, position, 2)
    above = ids[places[:, 0]]
    below, second = draw_distinct(guesses[above], sampling, position + 1, 2)
    tokens = jnp.concatenate([root[:, None], above, ids[below[:, 0]], ids[below[:, 1, :1]]], axis=1)
    valid = jnp.concatenate([jnp.ones_like(first[:, 0, :1]), first[:, 0], second[:, 0], second[:, 1, :1]], axis=1)
    valid &= valid[:, np.maximum(PARENTS, 0)]
    law = Law(guesses[tokens[:, :3]], jnp.broadcast_to(np.array([0, 1, 2, 0, 0, 0]), tokens.shape), ids)
    draft = Draft(trees.static(PARENTS, valid), tokens, jnp.full_like(root, len(PARENTS)), law=law)
    verdict = Rejection(2).verify(draft, target[tokens], sampling, position)
    after = jnp.roll(jnp.take_along_axis(tokens, verdict.path, axis=1), -1, axis=1)
    return jnp.where(jnp.arange(3) < verdict.count[:, None], after, verdict.next_token[:, None]), verdict.count + 1


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 1.0},
        {"temperature": 5.0},
        {"temperature": 0.5, "top_k": 3},
        {"temperature": 1.5, "top_k": 4, "top_p": 0.7},
        {"temperature": 1e-4},
    ],
    ids=str,
)
def test_three_tokens_have_the_targets_joint_law(setting):
    """100,000 texts by cycles of one to three tokens each: total variations from 0.012 on are seen (0.1 % level)."""
    count, sampling = 100_000, rows(100_000, **setting)
    cuts = {name: value for name, value in setting.items() if name != "temperature"}
    text = np.zeros((count, 6), int)
    length = np.ones(count, int)
    for _ in range(3):
        tokens, emitted = (np.asarray(x) for x in cycle(text[np.arange(count), length - 1], sampling, length + 7))
        for step in range(3):
            here = np.flatnonzero((step < emitted) & (length + step < 6))
            text[here, length[here] + step] = tokens[here, step]
        length = np.minimum(length + emitted, 6)
    law = np.array([processed(softmax(np.log(row) / setting["temperature"]), **cuts) for row in MARKOV])
    joint = law[0][:, None, None] * law[:, :, None] * law[None]
    counts = np.bincount(text[:, 1] * 25 + text[:, 2] * 5 + text[:, 3], minlength=125)
    rare = (joint.ravel() * count < 5) & (joint.ravel() > 0)
    merged = [np.append(x[~rare], x[rare].sum()) for x in (counts, joint.ravel())]
    chi_square(*merged)
    if setting["temperature"] == 1:
        assert (length > 4).mean() > 0.5  # drafts were accepted
