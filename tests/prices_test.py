"""Prices: those of the cost table at any batch and context; what pays is what a brute-force count says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from costs_test import table

from specjax.drafters.base import Stats
from specjax.drafters.prices import Terms, from_table

BLOCKS = (1, 4, 6, 8)


def counts(emitted, levels, passes) -> Stats:
    emitted, levels, passes = (np.array(x, np.int32) for x in (emitted, levels, passes))
    return Stats(emitted, emitted, emitted, emitted, levels, passes, passes, passes)


@pytest.mark.parametrize(("batch", "context"), [(1, 512), (2, 1280), (1, 64), (7, 512), (3, 4096), (9, 9000)])
def test_terms_are_the_tables_prices_in_tokens(batch, context):
    prices, costs = from_table(table(), "lookup", 2, BLOCKS), table()
    level = costs.draft_ms("lookup", batch, context) / 2
    blocks = np.array([costs.target_ms(block, batch, context) for block in BLOCKS])
    running = np.arange(batch) % 3 != 1
    emitted, passes = 5 * np.arange(batch), np.arange(batch)[:, None] * np.array([0, 1, 0, 1])
    stats = counts(emitted, 3 * np.arange(batch), passes)
    terms = jax.jit(prices.terms, static_argnums=(0, 1))(batch, context, running, stats)
    spent = 8 * blocks[0] + stats.levels * level + passes @ blocks
    worth = np.maximum(1 / blocks[0], (8 + emitted) / spent)[running].sum()
    np.testing.assert_allclose(terms.level, worth * level, rtol=1e-5)
    np.testing.assert_allclose(terms.block, worth * blocks, rtol=1e-5)


def test_a_row_that_writes_slower_than_eager_is_worth_what_eager_writes():
    prices = from_table(table(), "lookup", 1, BLOCKS)
    terms = prices.terms(1, 512, np.array([True]), counts([10], [100], [[0, 0, 0, 10]]))
    np.testing.assert_allclose(terms.block[0], 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_what_pays_is_what_counting_says(seed):
    """Over all trees that a block holds, the guesses being free of parents, which never score less."""
    rng = np.random.default_rng(seed)
    scores, foreseen = np.log(rng.uniform(0, 0.6, (3, 9))), np.log(rng.uniform(0, 0.6, (3, 4)))
    scores[1, 5:] = -np.inf  # not guessed yet
    running = np.array([True, True, seed % 2 == 0])
    block = np.array([0, 2, 2.5, 3], np.float32) * rng.uniform(0.5, 1)

    def gains(rows):
        best = -np.sort(-np.exp(rows[running]), axis=1)
        return [best[:, : size - 1].sum() - cost for size, cost in zip(BLOCKS, block)]

    more = max(gains(np.concatenate([scores, foreseen], axis=1))) - max(gains(scores))
    for level, pays in ((more - 1e-3, True), (more + 1e-3, False)):
        terms = Terms(jnp.float32(level), block, running, BLOCKS)
        assert bool(jax.jit(terms.go_on)(scores, foreseen)) == pays
        assert jax.jit(terms.best_block)(scores) == BLOCKS[int(np.argmax(gains(scores)))]


def test_of_equally_good_blocks_the_smallest_is_run_and_finished_rows_bring_nothing():
    scores = np.log(np.full((2, 9), 0.5, np.float32))
    none = Terms(jnp.float32(0), np.zeros(4, np.float32), np.array([False, False]), BLOCKS)
    assert none.best_block(scores) == 1 and not none.go_on(scores, scores)
