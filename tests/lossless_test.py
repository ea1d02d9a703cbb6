"""Every method writes the tokens that eager decoding writes: for any draft, tree, batch, loop, mesh and temperature."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_test import engine as eagle_engine
from flax import struct
from scripted import (
    CHAIN,
    CHUNK,
    FIELDS,
    LENGTHS,
    MESHES,
    TREE,
    decode,
    logits,
    medusa_draft,
    oracle,
    outputs,
    plain,
    prompts,
    script,
    scripted,
    target,
    tensors,
    wishes,
)

from specjax import Engine, trees
from specjax.drafters.lookup import Lookup
from specjax.drafters.medusa import from_draft
from specjax.drafters.merged import with_lookup
from specjax.sharding import rowwise, spec
from specjax.trees import Draft
from specjax.verify.target_first import TargetFirst

NEW = 32
AXES = {
    "draft": (
        "lookup",
        "medusa",
        "eagle",
        "adaptive",
        "medusa+lookup",
        "eagle+lookup",
        "oracle",
        "anti",
        "mixed",
        "random",
    ),  # fmt: skip
    "shape": ("chain", "tree"),
    "rows": (1, len(LENGTHS)),
    "loop": ("whole", "sliced", "host"),
    "mesh": tuple(MESHES),
    "law": ("greedy", "sampled", "nucleus"),
}
LAWS = {"greedy": {}, "sampled": {"temperature": 1.0}, "nucleus": {"temperature": 1.0, "top_p": 0.9}}
LOOKUPS = {"chain": Lookup(branches=(7,), shortest=1), "tree": Lookup(branches=(4, 2, 1), shortest=1)}
MEDUSAS = {  # LM head and tree: the target's and a chain, one over 15 tokens and a tree in which all ranks differ
    "chain": (None, trees.chain(3)),
    "tree": (15, ((0,), (1,), (0, 0), (2,), (0, 1), (1, 3), (0, 0, 2))),
}
EAGLES = {  # of fixed depth and block; and as deep and wide as pays, guessing by the noise of the target's draw
    ("eagle", "chain"): ("eagle1", (4, 3, 1)),
    ("eagle", "tree"): ("eagle3.1", (7, 3, 3)),
    ("adaptive", "chain"): ("narrow", (6, 5, 1)),
    ("adaptive", "tree"): ("eagle3", (9, 4, 3)),
}


def pairs(case: tuple) -> set:
    """Every pair of settings that a case tries together."""
    return set(itertools.combinations(zip(AXES, case), 2))


def pairwise_cover() -> list[tuple]:
    """Few cases in which every pair of settings of two axes meets: the one that adds most pairs, again and again."""
    every = list(itertools.product(*AXES.values()))
    missing, chosen = set().union(*map(pairs, every)), []
    while missing:
        chosen.append(max(every, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


PAIRWISE = pairwise_cover()


@functools.cache
def engine(draft: str, shape: str = "chain", mesh: str = "one", dtype: str = "float32") -> Engine:
    place = target(MESHES[mesh], dtype)
    if draft == "eager":
        return Engine(place, "eager", chunk=CHUNK)
    if draft == "lookup":
        drafter = LOOKUPS[shape]
        return Engine(place, (drafter, TargetFirst(drafter.depth)), chunk=CHUNK)
    if draft == "medusa":
        draft_vocab, paths = MEDUSAS[shape]
        drafter = from_draft(medusa_draft(draft_vocab), paths, place)
        return Engine(place, (drafter, TargetFirst(drafter.depth)), chunk=CHUNK)
    if (draft, shape) in EAGLES:
        variant, sizes = EAGLES[draft, shape]
        options = {"adaptive": True, "coupled": True} if draft == "adaptive" else {}
        return eagle_engine(variant, MESHES[mesh], *sizes, dtype=dtype, **options)
    if draft.endswith("+lookup"):
        drafter = with_lookup(engine(draft.removesuffix("+lookup"), shape, mesh, dtype).drafter)
        return Engine(place, (drafter, TargetFirst(drafter.depth)), chunk=CHUNK)
    return scripted(place, CHAIN if shape == "chain" else TREE)


@functools.cache
def eager(law: str) -> list[list[int]]:
    """What eager decoding on one device writes behind every prompt."""
    rows, method = len(LENGTHS), engine("eager")
    state = method.prefill(method.start(prompts(), wishes(rows, max_new_tokens=NEW, **LAWS[law]), rows))
    return outputs(method.decode(state), rows)


def generate(draft: str, shape: str, rows: int, loop: str, mesh: str, law: str):
    """(new tokens, the final state) of the last `rows` prompts."""
    method, chosen = engine(draft, shape, mesh), slice(len(LENGTHS) - rows, None)
    asked, wanted = prompts()[chosen], wishes(len(LENGTHS), max_new_tokens=NEW, **LAWS[law])[chosen]
    state = method.prefill(method.start(asked, wanted, rows))
    if draft in ("oracle", "anti", "mixed", "random"):
        texts = [prompt + output for prompt, output in zip(asked, eager(law)[chosen])]
        state = script(state, *oracle(texts, state.text.count.shape[0], draft))
    state = decode(method, state, loop)
    return outputs(state, rows), state


def check(case: tuple) -> None:
    draft, shape, rows, loop, mesh, law = case
    tokens, state = generate(*case)
    assert tokens == eager(law)[-rows:]
    cycles = np.asarray(state.stats.cycles)[:rows]
    if draft == "oracle":
        assert (cycles <= NEW / 2.5).all()
    if draft == "anti":
        assert (cycles == NEW - 1).all()  # the first token is prefill's
    if draft == "mixed":
        assert (cycles < NEW - 1).all()
    length, count = np.asarray(state.cache.length)[:rows], np.asarray(state.text.count)[:rows]
    assert (length == count - 1).all()


def test_default_cases_pair_every_setting_with_every_other():
    every = set().union(*map(pairs, itertools.product(*AXES.values())))
    assert set().union(*map(pairs, PAIRWISE)) == every
    assert len(PAIRWISE) <= 30


@pytest.mark.parametrize("case", PAIRWISE, ids=lambda case: "-".join(map(str, case)))
def test_tokens_equal_eager(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", AXES["mesh"])
@pytest.mark.parametrize("draft", AXES["draft"])
def test_tokens_equal_eager_in_every_combination(draft, mesh):
    for case in itertools.product(*AXES.values()):
        if case[0] == draft and case[4] == mesh:
            check(case)


def test_eager_equals_decoding_without_a_cache():
    for prompt, output in zip(prompts(), eager("greedy"), strict=True):
        assert output == plain(prompt, NEW)


def test_eager_is_the_same_for_every_batch_loop_and_mesh():
    for law in LAWS:
        for rows, loop, mesh in [(1, "sliced", "one"), (5, "host", "one"), (5, "whole", "eight")]:
            assert generate("eager", "chain", rows, loop, mesh, law)[0] == eager(law)[-rows:]


def test_laws_differ():
    texts = [eager(law) for law in LAWS]
    assert texts[0] != texts[1] != texts[2]


def test_equal_prompts_and_seeds_make_equal_rows():
    method = engine("lookup", "tree")
    state = method.start([prompts()[2]] * 5, wishes(1, temperature=1.0) * 5, 5)
    rows = outputs(method.decode(method.prefill(state)), 5)
    assert all(row == rows[0] for row in rows)


def test_a_plan_of_several_block_sizes_changes_nothing():
    method = scripted(target(), TREE, blocks=(1, 4, len(TREE)))
    state = method.prefill(method.start(prompts(), wishes(5, max_new_tokens=NEW), 5))
    texts = [prompt + output for prompt, output in zip(prompts(), eager("greedy"))]
    state = method.decode(script(state, *oracle(texts, 5)))
    assert outputs(state, 5) == eager("greedy")
    assert (np.asarray(state.stats.cycles) < NEW - 1).all()


@struct.dataclass
class Successors:
    """Proposes a chain by a table of its own, token -> next token [V], split over the vocabulary as a draft head's rows
    are; with a `size` that covers less than the nodes it calls valid."""

    table: jax.Array
    blocks, depth, taps = (2, 4), 3, ()

    def init(self, batch, slots):
        return ()

    def draft(self, state, tokens, count, sampling, running, stats):
        # The table is an argument, not closed over: `rowwise` has to see the drafter's parameters.
        return rowwise(self._chain)(self.table, tokens, count)

    def extend(self, state, tokens, features, count, after):
        return state

    def grow(self, state, slots):
        return state

    def cut(self, state, length):
        return state

    def _chain(self, table, tokens, count):
        chain = [jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)]
        for _ in range(self.depth):
            chain.append(table[chain[-1]])
        tree = trees.static(trees.branches(self.depth), jnp.ones((len(count), self.depth + 1), bool))
        return Draft(tree, jnp.concatenate(chain, axis=1), jnp.where(count % 2 == 0, 2, 4))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_drafter_with_parameters_of_its_own_and_surplus_nodes_changes_nothing(mesh):
    place = target(MESHES[mesh])
    follows = np.zeros(place.leaves[0].shape[0], np.int32)
    for prompt, output in zip(prompts(), eager("greedy"), strict=True):
        for token, after in itertools.pairwise([prompt[-1], *output]):
            follows[token] = after
    table = jax.device_put(follows, jax.NamedSharding(place.mesh, spec("vocab")))
    method = Engine(place, (Successors(table), TargetFirst(Successors.depth)), chunk=CHUNK)
    state = method.decode(method.prefill(method.start(prompts(), wishes(5, max_new_tokens=NEW), 5)))
    assert outputs(state, 5) == eager("greedy")
    assert np.asarray(state.stats.accepted)[:5].sum() > 10


@pytest.mark.parametrize(("draft", "mesh"), [("eager", "one"), ("lookup", "one"), ("lookup", "eight")])
def test_a_text_that_outgrows_its_cache_bucket_goes_on_in_the_next(draft, mesh, monkeypatch):
    """500 tokens of prompt and 40 of output: from 512 slots to 1,408, and the same in 1,408 from the start."""
    place = target(MESHES[mesh], max_position_embeddings=1280)
    prompt = prompts([500])
    drafter = LOOKUPS["tree"]
    method = "eager" if draft == "eager" else (drafter, TargetFirst(drafter.depth))

    def decoded():
        moving = Engine(place, method)
        state = moving.prefill(moving.start(prompt, wishes(1, max_new_tokens=40, temperature=1.0), 1))
        before = state.cache.slots
        state = moving.decode(state)
        return before, state.cache.slots, outputs(state, 1)

    before, after, tokens = decoded()
    monkeypatch.setattr("specjax.decode.programs.FIRST_BUCKET", 4096)
    assert (before, after) == (512, 1408)
    assert decoded() == (1408, 1408, tokens)


def test_greedy_in_a_larger_bucket_equals_decoding_without_a_cache():
    fields = FIELDS | {"max_position_embeddings": 1280}
    method = Engine(target(max_position_embeddings=1280), (LOOKUPS["tree"], TargetFirst(LOOKUPS["tree"].depth)))
    prompt = prompts([500])[0]
    state = method.decode(method.prefill(method.start([prompt], wishes(1, max_new_tokens=40), 1)))
    (output,) = outputs(state, 1)
    scores = logits(fields, tensors(fields), prompt + output)[len(prompt) - 1 : -1]
    assert output == np.argmax(scores, axis=-1).tolist()


def test_in_bfloat16_tokens_differ_from_eager_only_at_ties():
    """Blocks of different width round differently: a first difference has to lie where eager's two best are close."""
    rows, base = len(LENGTHS), engine("eager", dtype="bfloat16")

    def prefilled(method):
        return method.prefill(method.start(prompts(), wishes(rows, max_new_tokens=NEW), rows))

    want = outputs(base.decode(prefilled(base)), rows)
    exact = [
        logits(FIELDS, tensors(FIELDS), prompt + output)[len(prompt) - 1 : -1]
        for prompt, output in zip(prompts(), want)
    ]
    for shape in ("chain", "tree"):
        method = engine("oracle", shape, dtype="bfloat16")
        texts = [prompt + output for prompt, output in zip(prompts(), want)]
        state = method.decode(script(prefilled(method), *oracle(texts, rows)))
        assert (np.asarray(state.stats.cycles) < NEW - 1).all()
        for row, output in enumerate(outputs(state, rows)):
            differs = [i for i in range(NEW) if output[i] != want[row][i]]
            if differs:
                best, second = np.sort(exact[row][differs[0]])[::-1][:2]
                assert best - second < 0.05 * exact[row].std(), (shape, row, differs[0])
