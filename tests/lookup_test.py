"""Lookup proposes what a brute-force n-gram search finds: the longest match, then the latest, several as a tree."""

import jax
import numpy as np
import pytest

from specjax.drafters.lookup import Lookup
from specjax.trees import branches, max_depth

SLOTS = 48


def brute_force(text: list[int], drafter: Lookup) -> list[list[int]]:
    """For each branch its tokens, found by comparing every place of the text with its end."""
    matches = []
    for end in range(len(text) - 1):
        same = 0
        while same < drafter.longest and same <= end and text[end - same] == text[-1 - same]:
            same += 1
        if same >= drafter.shortest:
            matches.append((same, end))
    matches.sort(reverse=True)
    found = []
    for length in drafter.branches:
        if not matches:
            found.append([])
            continue
        best = matches[0][1]
        found.append(text[best + 1 : best + 1 + length])
        matches = [match for match in matches if text[match[1] + 1] != text[best + 1]]
    return found


def proposed(drafter: Lookup, texts: list[list[int]]):
    tokens = np.full((len(texts), SLOTS), 99)  # what lies behind the text must not matter
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return jax.jit(lambda t, n: drafter.draft((), t, n, None, None, None))(
        tokens, np.array([len(text) for text in texts])
    )


@pytest.mark.parametrize(
    "drafter",
    [
        Lookup(),
        Lookup(branches=(5, 2)),
        Lookup(branches=(4, 2, 1), longest=3, shortest=1),
        Lookup(branches=(3, 3), longest=6, shortest=3),
    ],
    ids=["default", "two", "three", "long"],
)
@pytest.mark.parametrize("vocab", [2, 4, 9])
def test_proposals_equal_a_brute_force_search(drafter, vocab):
    rng = np.random.default_rng(vocab)
    texts = [rng.integers(0, vocab, n).tolist() for n in (1, 2, 3, 4, 6, 9, 15, 22, 30, 41, 47, 48)]
    draft = proposed(drafter, texts)
    parents = branches(*drafter.branches)
    drafted = 0
    for row, text in enumerate(texts):
        tokens, valid = np.asarray(draft.tokens[row]), np.asarray(draft.tree.valid[row])
        assert tokens[0] == text[-1] and valid[0]
        first = 1
        for length, want in zip(drafter.branches, brute_force(text, drafter), strict=True):
            nodes = slice(first, first + length)
            assert tokens[nodes][valid[nodes]].tolist() == want
            assert valid[nodes].tolist() == [i < len(want) for i in range(length)]
            first += length
            drafted += len(want)
        assert int(draft.size[row]) == (len(parents) if valid[1:].any() else 1)
        np.testing.assert_array_equal(draft.tree.parent[row], parents)
    assert drafted > 0 or vocab == 9
    assert drafter.blocks == (1, len(parents)) and drafter.depth == max_depth(parents)


def test_the_latest_of_equally_long_matches_comes_first():
    draft = proposed(Lookup(branches=(2, 1)), [[1, 2, 5, 0, 1, 2, 6, 0, 1, 2]])
    assert draft.tokens[0].tolist() == [2, 6, 0, 5]


def test_a_longer_match_beats_a_later_one():
    draft = proposed(Lookup(branches=(1,)), [[7, 1, 2, 5, 0, 1, 2, 6, 7, 1, 2]])
    assert draft.tokens[0].tolist() == [2, 5]


def test_a_match_may_overlap_the_end_and_stops_at_it():
    draft = proposed(Lookup(branches=(5,)), [[4, 4, 4]])
    assert np.asarray(draft.tree.valid[0]).tolist() == [True, True, False, False, False, False]
    assert int(draft.tokens[0, 1]) == 4
