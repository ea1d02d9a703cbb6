"""EAGLE with prices: levels and blocks are those that the rule gives, worked out in numpy, and less really runs."""

import dataclasses
import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from eagle_test import COSTS, Reference, Variant, best, engine, paths, save, stored
from scripted import CHUNK, MESHES, outputs, plain, prompts, target, wishes

from specjax import Engine, methods
from specjax.decode.state import DecodeState
from specjax.decode.step import propose
from specjax.drafters.eagle import from_draft
from specjax.drafters.prices import from_table
from specjax.models.eagle import EagleLayer
from specjax.models.transformer import Transformer
from specjax.verify.target_first import TargetFirst

NODES, DEPTH, WIDTH = 9, 4, 3
BLOCKS = (1, 4, NODES)


def worth_of(state: DecodeState, level_ms: float, block_ms: list[float]) -> float:
    """Tokens that the running rows write in a millisecond, by what they have written and the table."""
    stats, total = jax.tree.map(np.asarray, state.stats), 0.0
    for row in np.flatnonzero(np.asarray(state.text.running)):
        spent = stats.levels[row] * level_ms + stats.passes[row] @ np.array(block_ms)
        total += max(1 / block_ms[0], (8 + stats.emitted[row]) / (8 * block_ms[0] + spent))
    return total


def decided(reference: Reference, state: DecodeState) -> tuple[int, int, dict[int, dict]]:
    """What the rule makes of a state: levels, block, and the guesses of that many levels of each running row."""
    tokens, count, running = (np.asarray(x) for x in (state.text.tokens, state.text.count, state.text.running))
    batch, slots = len(count), state.cache.slots
    level_ms = COSTS.draft_ms("eagle:depth2", batch, slots) / 2
    block_ms = [COSTS.target_ms(block, batch, slots) for block in BLOCKS]
    worth = worth_of(state, level_ms, block_ms)

    def gains(rows: list[list[float]]) -> list[float]:
        expected = [sum(np.exp(sorted(r)[::-1][: block - 1]).sum() for r in rows) for block in BLOCKS]
        return [tokens - worth * ms for tokens, ms in zip(expected, block_ms)]

    rows = np.flatnonzero(running)
    grown = [reference.levels(tokens[row, : count[row]].tolist(), WIDTH) for row in rows]
    reached = np.ones(len(rows))
    for level in itertools.count(1):
        every, frontiers = zip(*map(next, grown))
        now = np.array([np.exp(list(frontier.values())).sum() for frontier in frontiers])
        shares, reached = now / reached, now
        scores = [list(guesses.values()) for guesses in every]
        likewise = [[*s, *(np.log(x) + np.array(list(f.values())))] for s, f, x in zip(scores, frontiers, shares)]
        if level == DEPTH or max(gains(likewise)) - max(gains(scores)) <= worth * level_ms:
            return level, BLOCKS[int(np.argmax(gains(scores)))], dict(zip(rows, every))


@pytest.mark.parametrize("mesh", MESHES)
def test_levels_block_and_tree_are_those_that_the_rule_gives(mesh):
    method = engine("eagle3", MESHES[mesh], NODES, DEPTH, WIDTH, adaptive=True)
    reference, seen = Reference(Variant()), set()
    limits = [dict(zip(("max_new_tokens", "seed"), pair)) for pair in ((6, 11), (32, 12), (32, 13))]
    asked = [wish for limit in limits for wish in wishes(1, **limit)]  # the first row soon ends and counts no more
    state = method.prefill(method.start(prompts([1, 9, 33]), asked, 3))
    for _ in range(6):
        with jax.set_mesh(method.target.mesh):
            draft = jax.tree.map(np.asarray, jax.jit(propose)(method.drafter, state))
        levels, block, guesses = decided(reference, state)
        assert (draft.levels == levels).all() and (draft.size == block).all()
        for row, scores in guesses.items():
            nodes = int(draft.tree.valid[row].sum())
            assert draft.tree.valid[row, :nodes].all()
            found = paths(draft.tree.parent[row, :nodes], draft.tokens[row])
            assert list(found) == list(best(scores, block - 1))
            for drafted, numbers in found.items():
                sees = np.flatnonzero(draft.tree.mask[row, numbers[-1]])
                assert sorted((0, *numbers)) == sees.tolist() and draft.tree.depth[row, numbers[-1]] == len(drafted)
        seen.add((levels, block))
        state = method.decode(state, 2)
    assert len({levels for levels, _ in seen}) > 1 and len({block for _, block in seen}) > 1, seen


@pytest.mark.parametrize("mesh", MESHES)
def test_text_is_the_eager_text(mesh):
    method, asked = engine("eagle3", MESHES[mesh], NODES, DEPTH, WIDTH, adaptive=True), prompts([1, 9, 33])
    state = method.decode(method.prefill(method.start(asked, wishes(3), 3)))
    assert outputs(state, 3) == [plain(prompt, 32) for prompt in asked]


def test_levels_and_blocks_that_do_not_pay_are_not_computed(monkeypatch):
    """Counted on the device, as the passes run, for three tables in one compiled program."""
    ran = Counter()

    def count(module):
        run = module.__call__

        def counted(self, x, *args, **kwargs):
            jax.debug.callback(lambda: ran.update([(module, x.shape[1])]))
            return run(self, x, *args, **kwargs)

        monkeypatch.setattr(module, "__call__", counted)

    count(EagleLayer)
    count(Transformer)
    place = target()
    table = from_table(COSTS, "eagle:depth2", 2, BLOCKS)
    drafter = from_draft(stored("eagle3"), place, nodes=NODES, depth=DEPTH, width=WIDTH, prices=table)
    method = Engine(place, (drafter, TargetFirst(DEPTH)), chunk=CHUNK)
    found, texts = {}, []
    for name, level, rise in (("free", 0.0, 0.0), ("measured", 1.0, 1.0), ("dear", 50.0, 50.0)):
        one = table.block_ms[..., :1]
        dearer = table.replace(level_ms=level * table.level_ms, block_ms=one + rise * (table.block_ms - one))
        method.replace_drafter(drafter.replace(prices=dearer))
        state = method.prefill(method.start(prompts([9]), wishes(1), 1))
        jax.effects_barrier()
        ran.clear()
        state = method.decode(state)
        jax.effects_barrier()
        stats = jax.tree.map(lambda x: np.asarray(x)[0], state.stats)
        assert ran[EagleLayer, WIDTH] == stats.levels - stats.cycles  # the first comes without a pass
        assert [ran[Transformer, block] for block in BLOCKS] == stats.passes.tolist()
        assert stats.passes.sum() == stats.cycles
        found[name] = stats.levels / stats.cycles, stats.passes @ np.array(BLOCKS) / stats.cycles
        texts.append(outputs(state, 1))
    assert len(method.programs) == 2 and texts[0] == texts[1] == texts[2]
    assert found["dear"] == (1, 1) < found["measured"] < found["free"]
    assert found["measured"][1] < found["free"][1] == NODES


def test_a_name_and_a_table_say_what_is_adaptive(tmp_path, capsys):
    folder = str(save(tmp_path, Variant()))

    def built(name, costs):
        return methods.build(name, target(), folder, costs=costs)[0]

    assert built("eagle", COSTS).blocks == (1, 4, 8, 16)
    assert built("eagle:tree6", COSTS).blocks == (1, 4, 6)
    assert built("eagle:chain3", COSTS).blocks == (1, 3)
    for name, costs in (("eagle", None), ("eagle:fixed", COSTS)):
        assert built(name, costs).prices is None and built(name, costs).blocks == (16,)
    np.testing.assert_allclose(built("eagle", COSTS).prices.level_ms[0, 0], COSTS.draft_ms("eagle:depth2", 1, 128) / 2)
    capsys.readouterr()
    assert built("eagle", dataclasses.replace(COSTS, drafts={})).prices is None
    assert "no eagle draft, so its depth is fixed" in capsys.readouterr().err
