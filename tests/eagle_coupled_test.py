"""Coupled drafting: children by the noise of the target's own draw, kept as often as the laws' overlap allows."""

import dataclasses
import functools
import math
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from eagle_test import Reference, Variant, engine, ids_of, paths, save, stored
from sampling_test import P, processed
from scripted import CHUNK, FIELDS, MESHES, prompts, save_target, target, tensors, wishes

from specjax import Engine, Sampling, Target, load_target, methods
from specjax.decode.step import propose
from specjax.drafters.base import Stats
from specjax.drafters.eagle import from_draft
from specjax.verify.target_first import TargetFirst

LAWS = {"greedy": {}, "sampled": {"temperature": 1.0}, "nucleus": {"temperature": 0.8, "top_p": 0.9, "top_k": 8}}
Q = np.array([0.32, 0.15, 0.28, 0.10, 0.15])  # a draft's law, not far from the target's P
SETTINGS = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.5},
    "nucleus": {"temperature": 1.0, "top_p": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 4},
}
NEW, ROWS = 256, 16


def coupled_law(wish: Sampling):
    """A law of the draft's tokens -> log-probabilities of each to be drawn, given the noise of the target's draw."""

    def seen(law: np.ndarray, position: int) -> np.ndarray:
        if wish.temperature == 0:
            return law
        key = jax.random.wrap_key_data(np.array([0, wish.seed], np.uint32), impl="threefry2x32")
        noise = np.asarray(jax.random.gumbel(jax.random.fold_in(key, position), (97,), np.float32), np.float64)
        with np.errstate(divide="ignore"):
            scores = np.log(processed(np.exp(law), wish.temperature, wish.top_k, wish.top_p))
        scores = scores + noise[ids_of(Variant())]
        return scores - np.log(np.exp(scores).sum())

    return seen


@pytest.mark.parametrize("mesh", MESHES)
def test_children_come_first_with_the_noise_of_the_targets_draw(mesh):
    """In one batch with rows that do not sample, which keep the most probable tokens."""
    method, reference = engine("eagle3", MESHES[mesh], coupled=True), Reference(Variant())
    asked = [wish for law, seed in zip(LAWS.values(), (5, 6, 2**32 - 3)) for wish in wishes(1, seed=seed, **law)]
    prefilled = method.prefill(method.start(prompts([1, 9, 33]), asked, 3))
    for state in (prefilled, method.decode(jax.tree.map(jax.numpy.copy, prefilled), 3)):
        with jax.set_mesh(method.target.mesh):
            draft = jax.tree.map(np.asarray, jax.jit(propose)(method.drafter, state))
        tokens, count = np.asarray(state.text.tokens), np.asarray(state.text.count)
        for row, wish in enumerate(asked):
            want = reference.tree(tokens[row, : count[row]].tolist(), 7, 3, 3, coupled_law(wish))
            assert list(paths(draft.tree.parent[row], draft.tokens[row])) == list(want)


@functools.cache
def place() -> Target:
    """A target that draws every token from P, all embeddings being alike; its LM head also reads logits as such."""
    fields = FIELDS | {"vocab_size": 5, "max_position_embeddings": 512}
    table = tensors(fields)
    for name, value in table.items():
        if "o_proj" in name or "down_proj" in name:
            value[:] = 0
    table["model.embed_tokens.weight"] = np.tile(np.eye(1, 32, dtype=np.float32), (5, 1))
    table["model.norm.weight"] = np.ones(32, np.float32)
    head = np.zeros((5, 32), np.float32)
    head[:, 0], head[:, 1:6] = np.log(P) / np.sqrt(1 / (1 / 32 + 1e-5)), np.eye(5)
    with tempfile.TemporaryDirectory() as folder:
        return load_target(save_target(Path(folder), fields, table | {"lm_head.weight": head}))


def decoded(q: np.ndarray, depth: int, coupled: bool) -> dict[str, Stats]:
    """Counts of ROWS texts under each setting, drafted by a chain whose law is q everywhere."""
    draft = stored("eagle1")
    table = {name: np.zeros_like(x) for name, x in draft.tensors.items()}  # the output is what fc makes of a token
    table["fc.weight"][1:6, 0] = np.log(q)
    draft, sizes = dataclasses.replace(draft, tensors=table), {"nodes": depth + 1, "depth": depth, "width": 1}
    method = Engine(place(), (from_draft(draft, place(), coupled=coupled, **sizes), TargetFirst(depth)), chunk=CHUNK)
    asked = [wish for law in SETTINGS.values() for wish in wishes(ROWS, max_new_tokens=NEW, **law)]
    asked = [dataclasses.replace(wish, seed=seed) for seed, wish in enumerate(asked)]
    state = method.decode(method.prefill(method.start([[0]] * len(asked), asked, len(asked))))
    stats = jax.tree.map(lambda x: np.asarray(x).reshape(len(SETTINGS), ROWS, *x.shape[1:]), state.stats)
    return {name: jax.tree.map(lambda x, i=i: x[i], stats) for i, name in enumerate(SETTINGS)}


def test_a_draft_that_knows_the_targets_law_is_always_right():
    for stats in decoded(P, 3, coupled=True).values():
        assert (stats.cycles == math.ceil((NEW - 1) / 4)).all()  # the first token is prefill's


@pytest.mark.parametrize("coupled", [False, True])
def test_drafts_are_kept_as_often_as_the_two_laws_say(coupled):
    """Coupled: Daliri et al.'s share (arXiv 2408.07978); else the target's probability of the draft's best token."""
    for name, stats in decoded(Q, 1, coupled).items():
        p, q = (processed(law, **SETTINGS[name]) for law in (P, Q))
        share, plain = both_draw_the_same(p, q), p[np.argmax(q)]
        cycles, kept, want = stats.cycles.sum(), stats.accepted.sum(), share if coupled else plain
        assert abs(kept / cycles - want) < 4 * np.sqrt(want * (1 - want) / cycles), (name, kept / cycles, want)
        assert share > plain + 0.2


def both_draw_the_same(p: np.ndarray, q: np.ndarray) -> float:
    """How often arg-maxima of log p and log q with the same Gumbel noise agree."""
    ours = [i for i in range(len(p)) if p[i] and q[i]]
    return sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in ours)


def test_a_name_asks_for_coupling(tmp_path):
    folder = str(save(tmp_path, Variant()))
    assert methods.build("eagle:tree4:coupled", target(), folder)[0].coupled
    assert not methods.build("eagle:tree4", target(), folder)[0].coupled
