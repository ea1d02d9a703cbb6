"""EAGLE with drawn guesses: numpy's tree of the same noise, and texts that keep the target's law through the loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_test import VARIANTS, Reference, Variant, ids_of, save, stored, weights
from sampling_test import MARKOV, MIXED, opened, processed
from scipy.stats import chi2
from scripted import CHUNK, MESHES, decode, outputs, plain, prompts, target, wishes

from specjax import Engine, methods, trees
from specjax.decode.step import propose
from specjax.drafters.eagle_drawn import DrawnEagle, from_draft
from specjax.sampling import GUESSING, gumbel
from specjax.verify.rejection import Rejection
from specjax.verify.target_first import TargetFirst

LENGTHS = [1, 9, 33]
SETTINGS = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}]


@functools.cache
def engine(name: str, mesh: str = "one", nodes: int = 9, depth: int = 3, width: int = 3) -> Engine:
    place = target(MESHES[mesh])
    drafter = from_draft(stored(name), place, nodes=nodes, depth=depth, width=width)
    return Engine(place, (drafter, Rejection(drafter.depth)), chunk=CHUNK)


def asked() -> list:
    """A greedy, a sampled and a cut row."""
    return [wish for i, setting in enumerate(SETTINGS) for wish in wishes(3, **setting)[i : i + 1]]


def children(law: np.ndarray, setting: dict, key, position: int, count: int) -> list[int]:
    """Places of `count` guesses by log-probabilities [V']: the best, or drawn with the noise of the position."""
    if not setting["temperature"]:
        return np.argsort(-law, kind="stable")[:count].tolist()
    with np.errstate(divide="ignore"):
        drawn = np.log(processed(np.exp(law), **setting))
    noise = np.asarray(gumbel(key[None], np.array([position]), np.arange(len(law)), GUESSING))[0]
    return [place for place in np.argsort(-(drawn + noise))[:count].tolist() if np.isfinite(drawn[place])]


@pytest.mark.parametrize(("name", "mesh"), [("eagle3", "one"), ("eagle3", "eight"), ("eagle1", "one")])
def test_guesses_are_those_that_numpy_draws_from_whole_texts(name, mesh):
    method, reference = engine(name, mesh), Reference(Variant(**VARIANTS[name]))
    ids, parents = ids_of(reference.variant), np.array(method.drafter.parents)
    assert trees.max_depth(parents) == 3 and np.bincount(parents[1:]).max() == 3
    prefilled = method.prefill(method.start(prompts(LENGTHS), asked(), 3))
    for state in (prefilled, method.decode(jax.tree.map(jnp.copy, prefilled), 3)):
        with jax.set_mesh(method.target.mesh):
            draft = jax.tree.map(np.asarray, jax.jit(propose)(method.drafter, state))
        tokens, count, keys = (np.asarray(x) for x in (state.text.tokens, state.text.count, state.sampling.key))
        assert draft.law.token_ids is None or draft.law.token_ids.tolist() == ids.tolist()
        for row, setting in enumerate(SETTINGS):
            text = tokens[row, : count[row]].tolist()
            drafted = {0: ()}
            for node in range(len(parents)):
                below = np.flatnonzero(parents == node)
                if not len(below) or node not in drafted:
                    assert not draft.tree.valid[row, below].any()
                    continue
                law = reference.after(text, drafted[node])
                logits = draft.law.logits[row, draft.law.of[row, node], : len(ids)].astype(np.float64)
                np.testing.assert_allclose(logits - np.logaddexp.reduce(logits), law, rtol=1e-4, atol=1e-3)
                want = children(law, setting, keys[row], count[row] + len(drafted[node]), len(below))
                assert draft.tree.valid[row, below].sum() == len(want)
                assert draft.tokens[row, below[: len(want)]].tolist() == ids[want].tolist()
                drafted |= {int(at): (*drafted[node], int(ids[place])) for at, place in zip(below, want)}


def test_rows_keep_their_texts_in_any_company_loop_and_mesh():
    """The greedy row's is the eager text; a sampled row's depends on its own seed alone."""
    texts = []
    for mesh, loop in (("one", "whole"), ("one", "host"), ("eight", "whole")):
        method = engine("eagle3", mesh)
        state = decode(method, method.prefill(method.start(prompts(LENGTHS), asked(), 3)), loop)
        texts.append(outputs(state, 3))
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] == plain(prompts(LENGTHS)[0], 32)
    method = engine("eagle3")
    for row in range(3):
        state = method.prefill(method.start(prompts(LENGTHS)[row : row + 1], asked()[row : row + 1], 3))
        assert outputs(method.decode(state), 1)[0] == texts[0][row]


def test_greedy_text_of_a_chain_is_the_eager_text():
    method = engine("eagle1", "one", 4, 3, 1)
    assert method.drafter.parents == (-1, 0, 1, 2)
    state = method.decode(method.prefill(method.start(prompts(LENGTHS), wishes(3), 3)))
    assert outputs(state, 3) == [plain(prompt, 32) for prompt in prompts(LENGTHS)]


@pytest.mark.parametrize("nodes", [8, 2])
def test_text_has_the_targets_law_through_the_loop(nodes):
    """A Markov table for a model, a random layer over four of its five tokens for a draft: 65,536 tokens, 16,384 for
    each setting. The law of a token given the two before it fits the table (0.1 % level): noise that is used twice, or
    a total variation of 0.04 from the table, would show."""
    variant, ids = Variant(draft_vocab=4), np.array([0, 1, 3, 4], np.int32)
    config = dataclasses.replace(stored("eagle3").config, draft_vocab=4)
    draft = dataclasses.replace(stored("eagle3"), config=config, tensors=weights(variant), token_ids=ids)
    drafter = from_draft(draft, opened("markov"), nodes=nodes, depth=min(3, nodes - 1), width=min(3, nodes - 1))
    method = Engine(opened("markov"), (drafter, Rejection(drafter.depth)), chunk=CHUNK)
    count, length = 64, 256
    asked = [wish for setting in MIXED for wish in wishes(count, max_new_tokens=length, **setting)]
    asked = [dataclasses.replace(wish, seed=i) for i, wish in enumerate(asked)]
    state = method.decode(method.prefill(method.start([[0]] * len(asked), asked, len(asked))))
    assert np.asarray(state.stats.accepted).sum() > 0.2 * len(asked) * length
    texts = np.array(outputs(state, len(asked))).reshape(len(MIXED), count, length)
    for setting, text in zip(MIXED, texts):
        seen = np.zeros((5, 5, 5))
        np.add.at(seen, (text[:, :-2], text[:, 1:-1], text[:, 2:]), 1)
        law = np.array([processed(row, **setting) for row in MARKOV])
        expected = seen.sum(-1, keepdims=True) * law
        possible = expected > 0
        assert not seen[~possible].any()
        statistic = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
        assert statistic < chi2.isf(0.001, possible.sum() - (expected.sum(-1) > 0).sum())


def test_a_name_builds_tree_and_verifier_and_nothing_that_would_break_the_law(tmp_path):
    folder = str(save(tmp_path / "draft", Variant()))

    def built(name):
        drafter, verifier = methods.build(name, target(), folder)
        return drafter, verifier

    drafter, verifier = built("eagle:rejection")
    assert isinstance(drafter, DrawnEagle) and isinstance(verifier, Rejection) and verifier.depth == drafter.depth
    assert len(drafter.parents) == 16 and max(drafter.ranks) == 3
    drafter, _ = built("eagle:tree9:rejection:depth2:width3")
    assert (len(drafter.parents), drafter.depth, max(drafter.ranks)) == (9, 2, 2)
    assert built("eagle:rejection:chain5")[0].parents == (-1, 0, 1, 2, 3)
    assert isinstance(built("eagle:chain5")[1], TargetFirst)
    for name in ("lookup:rejection", "medusa:rejection", "medusa:typical:rejection", "eager:rejection"):
        with pytest.raises(ValueError, match="would not keep the target's law: .* use eagle:rejection"):
            methods.check(name, folder)
    with pytest.raises(ValueError, match="names a tree or an option twice"):
        methods.check("eagle:rejection:rejection", folder)
    for name in ("eagle:fixed:rejection", "eagle:rejection:coupled"):
        with pytest.raises(ValueError, match="draws a tree whose shape is fixed; leave out"):
            methods.check(name, folder)
    with pytest.raises(ValueError, match="does not go with copied tokens"):
        methods.check("eagle+lookup:rejection", folder)
