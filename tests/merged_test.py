"""Lookup merged into a learned tree equals a merge of sets of paths; drafting is left out where copies fill the tree;
the text stays eager's."""

import dataclasses
import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot_tpu_test import eagle as abstract_eagle
from eagle_test import Variant, save
from flax import struct
from programs_test import SMALL, abstract_target
from scripted import (
    CHUNK,
    FIELDS,
    MESHES,
    ancestors,
    medusa_draft,
    outputs,
    prompts,
    save_target,
    target,
    tensors,
    wishes,
)

from launch.common import parse_methods
from specjax import Engine, load_target, methods, trees
from specjax.decode.state import no_stats
from specjax.drafters.lookup import Lookup
from specjax.drafters.medusa import from_draft
from specjax.drafters.merged import Merged, with_lookup
from specjax.loading.drafts import save_draft
from specjax.sharding import make_mesh
from specjax.trees import Draft
from specjax.verify.target_first import TargetFirst

SLOTS, COPIED, RING = 48, 15, 24
TREE = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 3), (0, 0, 2))
ASKED = []


@struct.dataclass
class Asked:
    """A learned drafter that notes when it drafts; what it drafts where it is not None."""

    learned: Any = None
    drafted: Draft | None = None
    blocks: tuple[int, ...] = struct.field(pytree_node=False, default=())
    depth: int = struct.field(pytree_node=False, default=0)
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def init(self, batch, slots):
        return self.learned.init(batch, slots)

    def draft(self, *arguments):
        jax.debug.callback(lambda: ASKED.append(1))
        return self.learned.draft(*arguments) if self.drafted is None else self.drafted

    def extend(self, *arguments):
        return self.learned.extend(*arguments)


def asked() -> int:
    """How many drafts were asked for since the last call."""
    jax.effects_barrier()
    count = len(ASKED)
    ASKED.clear()
    return count


# The merge


def longest_match(text: list[int], lookup: Lookup) -> tuple[int, list[int]]:
    """(length of the longest earlier match of the text's end, what followed it the last time)."""
    for length in range(lookup.longest, lookup.shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return length, text[end:]
    return 0, []


def merged_paths(paths: list[tuple], size: int, chain: list[tuple], blocks: tuple[int, ...]) -> list[tuple]:
    """The longest beginning of a tree's paths, and the paths of the chain that are not in it, in the smallest block
    that holds either tree alone."""
    room = next(block for block in blocks if block >= max(size, 1 + len(chain)))
    for kept in range(size, 0, -1):
        both = paths[:kept] + [path for path in chain if path not in paths[:kept]]
        if len(both) <= room:
            return both
    raise AssertionError("there is always room for the chain")


def random_tree(rng, nodes: int) -> tuple[list[int], list[tuple]]:
    """Parents, and the tokens on the path to each node from the root, which no other node has."""
    parents, paths, vocab = [-1], [()], int(rng.choice([2, 3, 5]))
    while len(paths) < nodes:
        parent, token = int(rng.integers(len(paths))), int(rng.integers(vocab))
        if (*paths[parent], token) not in paths:
            parents.append(parent)
            paths.append((*paths[parent], token))
    return parents, paths


def as_draft(rows: list[tuple[list[int], list[tuple]]], roots: list[int], size: np.ndarray) -> Draft:
    parent = np.array([parents for parents, _ in rows])
    depth = np.array([[len(path) for path in paths] for _, paths in rows])
    tokens = np.array([[root, *(path[-1] for path in paths[1:])] for root, (_, paths) in zip(roots, rows)])
    return Draft(trees.grown(parent, depth, jnp.ones(depth.shape, bool), int(depth.max())), tokens, size)


def check_row(draft: Draft, row: int, root: int, want: list[tuple]) -> None:
    """That row is a tree of just these paths in this order, and its mask and depth follow from the parents."""
    tree, tokens = jax.tree.map(lambda x: np.asarray(x)[row], (draft.tree, draft.tokens))
    size = len(want)
    assert int(draft.size[row]) == size and tree.valid.tolist() == [node < size for node in range(len(tokens))]
    assert tokens[0] == root and (tree.parent[1:size] < np.arange(1, size)).all()
    got = [()]
    for node in range(1, size):
        got.append((*got[tree.parent[node]], int(tokens[node])))
    assert got == want and len(set(got)) == size
    assert tree.depth[:size].tolist() == [len(path) for path in want]
    expected = np.eye(len(tokens), dtype=bool)
    expected[:size, :size] = ancestors(tree.parent[:size])
    np.testing.assert_array_equal(tree.mask, expected)


def trial_texts(rng, copying: bool) -> list[list[int]]:
    """Random texts of few tokens, which match early, late, or only in their last few places; or all copy at length."""
    if copying:
        return [np.resize(np.arange(n), length).tolist() for n, length in ((17, 34), (19, 42), (23, 48))] * 3
    vocab = int(rng.choice([2, 3, 5]))
    texts = [rng.integers(0, vocab, n).tolist() for n in (1, 2, 5, 12, 30)]
    return texts + [np.resize(rng.integers(0, vocab, n), 4 * n).tolist() for n in (2, 3, 5, 9)]


@pytest.mark.parametrize(("blocks", "longest"), [((4,), 3), ((8,), 8), ((16,), 8), ((4, 8, 16), 5)])
def test_merged_trees_equal_a_merge_of_sets_of_paths(blocks, longest):
    """Rows with shared beginnings, without a match, with a match that ends with the text, or that have stopped."""
    rng, nodes, shared, skipped = np.random.default_rng(6), blocks[-1], 0, 0
    lookup = Lookup(branches=(COPIED,), longest=longest)
    draw = jax.jit(
        lambda drafter, text, count, running: drafter.draft(
            (), text, count, None, running, no_stats(len(count), drafter)
        )
    )
    for trial in range(40):
        texts = trial_texts(rng, copying=trial % 4 == 0)
        rows = [random_tree(rng, nodes) for _ in texts]
        size, running = rng.choice(blocks, len(texts)), rng.random(len(texts)) < 0.8
        learned = Asked(drafted=as_draft(rows, [text[-1] for text in texts], size), blocks=blocks)
        tokens = np.array([text + [99] * (SLOTS - len(text)) for text in texts])  # what lies behind must not matter
        draft = draw(Merged(learned, lookup), tokens, np.array([len(text) for text in texts]), running)
        chains = []
        for text in texts:
            length, following = longest_match(text, lookup)
            following = following[: COPIED if length == longest else min(2 * length, nodes - 1)]
            chains.append([tuple(following[:depth]) for depth in range(1, 1 + len(following))])
        skip = all(len(chain) >= nodes - 1 for chain, runs in zip(chains, running) if runs)
        assert asked() == (not skip)
        skipped += skip
        for row, (chain, (_, paths)) in enumerate(zip(chains, rows)):
            want = [(), *chain] if skip else merged_paths(paths, size[row], chain[: nodes - 1], blocks)
            check_row(draft, row, texts[row][-1], want)
            shared += 0 if skip else len(set(chain) & set(paths))
    assert 0 < skipped < 40 and shared > 40


def test_the_block_sizes_and_the_depth_leave_room_for_a_long_copy():
    def sizes(*blocks):
        merged = with_lookup(Asked(blocks=blocks, depth=3, taps=(7,)))
        return merged.blocks, merged.depth, merged.taps

    assert sizes(4) == ((4, 16), 15, (7,))
    assert sizes(4, 8, 16) == ((4, 8, 16), 15, (7,))
    assert sizes(32) == ((32,), 31, (7,))


# In the decode loop


@functools.cache
def ring(mesh: str = ""):
    """A target that writes token n + 1 after token n in a ring, now and then another one at temperature 1."""
    fields = FIELDS | {"vocab_size": RING}
    table = tensors(fields)
    for name, value in table.items():
        if "o_proj" in name or "down_proj" in name:
            value[:] = 0  # the residual stream is the token's embedding alone
    width = fields["hidden_size"]
    table["model.embed_tokens.weight"] = np.eye(RING, width, dtype=np.float32)
    table["model.norm.weight"] = np.ones(width, np.float32)
    table["lm_head.weight"] = np.eye(RING, width, dtype=np.float32)[np.arange(RING) - 1]
    with tempfile.TemporaryDirectory() as folder:
        return load_target(save_target(Path(folder), fields, table), mesh=mesh)


def copying(mesh: str = "", **asks) -> Engine:
    """An engine on the ring: random Medusa heads, which are never right for long, with lookup merged in."""
    learned = from_draft(medusa_draft(), TREE, ring(mesh))
    learned = Asked(learned, blocks=learned.blocks, depth=learned.depth, taps=learned.taps) if asks else learned
    drafter = with_lookup(learned)
    return Engine(ring(mesh), (drafter, TargetFirst(drafter.depth)), chunk=CHUNK)


def around(count: int, start: int = 0) -> list[int]:
    return [(start + i) % RING for i in range(count)]


def test_where_all_running_rows_copy_nothing_is_drafted():
    """A row that copies emits whole blocks of 16; beside one that does not, drafts are made until that one ends."""
    method = copying(asks=True)
    alone = method.decode(method.prefill(method.start([around(40)], wishes(1, max_new_tokens=65), 1)))
    assert outputs(alone, 1) == [around(65, 40)]
    assert np.asarray(alone.stats.cycles).tolist() == [4] and asked() == 0
    state = method.start([around(40), [5]], wishes(1, max_new_tokens=129) + wishes(1, max_new_tokens=9), 2)
    state = method.decode(method.prefill(state))
    assert outputs(state, 2) == [around(129, 40), around(9, 6)]
    first, second = np.asarray(state.stats.cycles).tolist()
    assert 0 < asked() == second < first


@pytest.mark.parametrize("mesh", MESHES)
def test_copied_text_is_the_eager_text_at_every_temperature(mesh):
    eager, method = Engine(ring(), chunk=CHUNK), copying(MESHES[mesh])
    asks = [around(40), around(33, 7), [3], around(60, 2)]
    wanted = [wishes(4, max_new_tokens=60, temperature=heat)[row] for row, heat in enumerate((0.0, 1.0, 1.0, 0.5))]
    want = outputs(eager.decode(eager.prefill(eager.start(asks, wanted, 4))), 4)
    state = method.decode(method.prefill(method.start(asks, wanted, 4)))
    assert outputs(state, 4) == want and want[1] != around(60, 40)
    assert np.asarray(state.stats.accepted_at)[:4, 3:].sum() > 10  # deeper than any Medusa head


def test_a_draft_that_may_be_left_out_copies_no_cache():
    place = abstract_target(SMALL, make_mesh())
    drafter = with_lookup(abstract_eagle(place)[0])
    method = Engine(place, (drafter, TargetFirst(drafter.depth)), chunk=CHUNK)
    state = method.abstract(8, 1024)
    program = method.programs.compiled("loop", state)
    caches = [x for kv in (state.cache, state.drafter.cache) for x in kv.k + kv.v]
    assert program.memory_analysis().alias_size_in_bytes >= 0.99 * sum(x.size * x.dtype.itemsize for x in caches)
    assert {x.shape for x in caches} == {caches[0].shape}
    shape = ",".join(map(str, caches[0].shape))
    written = re.findall(rf"= f32\[{shape}\]\S* ([a-z-]+)\(", program.as_text())
    assert "fusion" in written and "copy" not in written


# Methods by name


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    where, place = tmp_path_factory.mktemp("merged"), target()
    about = {
        "name": place.name,
        "fingerprint": place.fingerprint,
        "width": place.config.width,
        "vocab_size": place.config.vocab_size,
        "tokenizer": place.tokenizer.fingerprint,
    }
    save_draft(where / "medusa", dataclasses.replace(medusa_draft(15), target=about))
    save(where / "eagle", Variant())
    return {name: str(where / name) for name in ("medusa", "eagle")}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["medusa+lookup:chain4", "eagle+lookup:tree8:depth3"])
def test_methods_by_name_write_the_eager_text(folders, mesh, name):
    rows, asks = 3, prompts([9, 33, 60])
    methods_used = Engine(target(), chunk=CHUNK), Engine(target(MESHES[mesh]), name, folders[name.split("+")[0]])
    for law in ({}, {"temperature": 1.0}):
        texts = []
        for method in methods_used:
            state = method.prefill(method.start(asks, wishes(rows, max_new_tokens=40, **law), rows))
            texts.append(outputs(method.decode(state), rows))
        assert texts[0] == texts[1]


def test_a_name_merges_lookup_into_the_tree_that_it_asks_for(folders):
    def built(name):
        drafter, verifier = methods.build(name, target(), folders[name.split("+")[0]])
        assert type(verifier) is TargetFirst and verifier.depth == drafter.depth
        return drafter.learned.blocks, drafter.learned.depth, drafter.blocks, drafter.depth

    assert built("eagle+lookup") == ((16,), 5, (16,), 15)
    assert built("eagle+lookup:tree8:depth2:width3") == ((8,), 2, (8, 16), 15)
    assert built("medusa+lookup:chain3") == ((3,), 2, (3, 16), 15)
    assert parse_methods("eager,medusa+lookup:chain3=a/b") == [("eager", None), ("medusa+lookup:chain3", "a/b")]


@pytest.mark.parametrize(
    ("name", "draft", "told"),
    [
        ("medusa+lookup:typical", "DIR", "copied tokens, which need target-first verification; leave out"),
        ("medusa+lookup:tree8:typical", "DIR", "leave out 'typical' or '\\+lookup'"),
        ("eagle+lookup:typical", "DIR", "need target-first verification"),
        ("eagle+lokup", "DIR", "method 'eagle\\+lokup' is unknown; did you mean 'eagle\\+lookup'"),
        ("medusa+lookup:bush4", "DIR", "has no option 'bush4'; it takes treeN, chainN$"),
        ("eager+lookup", None, "method 'eager\\+lookup' is unknown"),
    ],
)
def test_what_lookup_cannot_be_merged_into_is_refused_in_one_sentence(name, draft, told):
    with pytest.raises(ValueError, match=told):
        methods.check(name, draft)
