"""Medusa: heads and proposals equal numpy's, the fastest tree is chosen, typical acceptance follows its rule."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs_test import abstract_target
from scripted import CHUNK, FIELDS, MESHES, logits, medusa_draft, outputs, prompts, target, tensors, wishes

from launch.common import parse_methods
from specjax import Engine, methods, trees
from specjax.costs import CostTable
from specjax.decode.step import propose
from specjax.drafters.medusa import from_draft
from specjax.loading.drafts import MedusaDraft, save_draft
from specjax.models.medusa import MedusaHeads
from specjax.sampling import SamplingState, process
from specjax.sharding import make_mesh, row_spec
from specjax.trees import Draft
from specjax.verify.target_first import TargetFirst
from specjax.verify.typical import Typical

WIDTH, VOCAB = FIELDS["hidden_size"], FIELDS["vocab_size"]
TREE = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 3), (0, 0, 2))  # not all ranks in use, nor in order
ROWS = 3


def reference_heads(draft: MedusaDraft, x: np.ndarray) -> np.ndarray:
    """Normed hidden states x [T, D] -> logits [T, heads, V] over the target's or the draft's vocabulary."""
    hidden = np.repeat(x[:, None], len(draft.weight), axis=1)
    for layer in range(draft.weight.shape[1]):
        z = np.einsum("hoi,thi->tho", draft.weight[:, layer], hidden) + draft.bias[:, layer]
        hidden = hidden + z / (1 + np.exp(-z))
    return hidden @ (tensors(FIELDS)["lm_head.weight"] if draft.lm_head is None else draft.lm_head).T


def normed_states(text: list[int]) -> np.ndarray:
    """The target's last hidden states after its final norm [T, D], got back from the reference's logits."""
    table = tensors(FIELDS)
    return logits(FIELDS, table, text) @ np.linalg.pinv(table["lm_head.weight"].astype(np.float64).T)


# The heads


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("draft_vocab", [None, 15])
def test_heads_equal_numpy_and_padded_vocabulary_is_masked(layers, draft_vocab):
    draft, mesh = medusa_draft(draft_vocab, layers), make_mesh("data=2,model=4")
    size = draft_vocab or VOCAB
    x = np.random.default_rng(1).normal(size=(4, 6, WIDTH)).astype(np.float32)
    head = tensors(FIELDS)["lm_head.weight"] if draft_vocab is None else draft.lm_head

    @jax.jit
    def run(x, weight, bias, head):
        heads = MedusaHeads(WIDTH, heads=3, layers=layers, draft_vocab=draft_vocab, rngs=nnx.Rngs(0), dtype=x.dtype)
        assert draft_vocab is None or heads.lm_head.shape == (16, WIDTH)
        heads.weight[...], heads.bias[...] = weight, bias
        return heads.logits(heads(x), head, size)

    with jax.set_mesh(mesh):
        whole = jax.device_put(np.pad(head, [(0, -size % 4), (0, 0)]), jax.NamedSharding(mesh, jax.P("model")))
        rows = jax.device_put(x, jax.NamedSharding(mesh, row_spec(3)))
        got = np.asarray(run(rows, draft.weight, draft.bias, whole))
    assert got.dtype == np.float32 and got.shape == (4, 6, 3, size + -size % 4)
    want = reference_heads(draft, x.reshape(-1, WIDTH).astype(np.float64)).reshape(4, 6, 3, size)
    np.testing.assert_allclose(got[..., :size], want, atol=2e-4)
    assert (got[..., size:] < -1e20).all()


def test_fresh_heads_learn_by_gradients_of_all_their_parameters():
    with jax.set_mesh(make_mesh()):
        heads = MedusaHeads(8, heads=2, layers=2, draft_vocab=5, rngs=nnx.Rngs(0), dtype=jnp.float32)
    graph, state = nnx.split(heads)
    x = np.random.default_rng(0).normal(size=(2, 7, 8)).astype(np.float32)

    @jax.jit
    @jax.grad
    def slope(state):
        heads = nnx.merge(graph, state)
        law = jax.nn.log_softmax(heads.logits(heads(x), heads.lm_head[...], 5))
        return -jnp.where(jnp.arange(5) == 3, law, 0).mean()

    with jax.set_mesh(make_mesh()):
        for name, found in slope(state).items():
            assert np.isfinite(found[...]).all() and np.abs(found[...]).max() > 0, name


# What is proposed


@functools.cache
def engine(mesh: str, draft_vocab: int | None, layers: int = 1) -> Engine:
    place = target(MESHES[mesh])
    drafter = from_draft(medusa_draft(draft_vocab, layers), TREE, place)
    return Engine(place, (drafter, TargetFirst(drafter.depth)), chunk=CHUNK)


def proposals(method: Engine, state) -> np.ndarray:
    with jax.set_mesh(method.target.mesh):
        return np.asarray(jax.jit(propose)(method.drafter, state).tokens)


@pytest.mark.parametrize(("mesh", "draft_vocab", "layers"), [("one", None, 2), ("eight", 15, 1)])
def test_proposals_are_the_heads_best_guesses_at_the_last_cached_token(mesh, draft_vocab, layers):
    method, draft = engine(mesh, draft_vocab, layers), medusa_draft(draft_vocab, layers)
    prefilled = method.prefill(method.start(prompts([1, 9, 33]), wishes(ROWS), ROWS))
    for state in (prefilled, method.decode(jax.tree.map(jnp.copy, prefilled), 3)):
        tokens, count = np.asarray(state.text.tokens), np.asarray(state.text.count)
        got = proposals(method, state)
        for row in range(ROWS):
            text = tokens[row, : count[row]].tolist()
            guesses = np.argsort(-reference_heads(draft, normed_states(text[:-1])[-1:])[0], axis=-1)
            want = [guesses[len(path) - 1, path[-1]] for path in TREE]
            assert got[row, 0] == text[-1]
            assert got[row, 1:].tolist() == (want if draft_vocab is None else draft.token_ids[want].tolist())


def test_a_fresh_head_proposes_the_targets_own_next_token_at_every_depth():
    place, draft = target(), medusa_draft()
    fresh = dataclasses.replace(draft, weight=0 * draft.weight, bias=0 * draft.bias)
    drafter = from_draft(fresh, trees.chain(3), place)
    assert drafter.lm_head is place.lm_head and drafter.norm is place.norm
    method = Engine(place, (drafter, TargetFirst(3)), chunk=CHUNK)
    state = method.prefill(method.start(prompts([5, 9, 33]), wishes(ROWS), ROWS))
    got = proposals(method, state)
    assert (got == got[:, :1]).all()


def test_a_tied_target_lends_its_embedding_and_a_draft_vocabulary_stays_its_own():
    tied = abstract_target(dataclasses.replace(target().config, tied=True), target().mesh)
    assert from_draft(medusa_draft(), trees.chain(2), tied).lm_head is tied.leaves[0]
    own = from_draft(medusa_draft(15), trees.chain(2), tied)
    assert own.lm_head.shape == (15, WIDTH) and own.vocab_size == 15
    assert own.heads["weight"].shape == (2, 1, WIDTH, WIDTH)  # the third head is not needed


def fitted_draft(texts: list[list[int]]) -> MedusaDraft:
    """Heads whose LM head was fitted to what follows after one token, so that the first head is often right."""
    draft = medusa_draft(15)
    x = np.concatenate([normed_states(text)[:-2] for text in texts])
    follows = np.concatenate([text[2:] for text in texts])
    once = dataclasses.replace(draft, lm_head=np.eye(WIDTH))
    hidden = reference_heads(once, x)[:, 0]
    head = np.linalg.lstsq(hidden, np.eye(VOCAB)[follows], rcond=None)[0].T
    return dataclasses.replace(draft, lm_head=head.astype(np.float32), token_ids=np.arange(VOCAB, dtype=np.int32))


def test_tokens_equal_eager_when_many_drafts_are_right_and_typical_keeps_no_fewer():
    place, asked = target(), prompts([5, 9, 33])
    eager = Engine(place, "eager", chunk=CHUNK)
    want = outputs(eager.decode(eager.prefill(eager.start(asked, wishes(ROWS), ROWS))), ROWS)
    drafter = from_draft(fitted_draft([p + o for p, o in zip(asked, want)]), TREE, place)
    for verifier in (TargetFirst(3), Typical(3)):
        method = Engine(place, (drafter, verifier), chunk=CHUNK)
        state = method.decode(method.prefill(method.start(asked, wishes(ROWS), ROWS)))
        assert outputs(state, ROWS) == want
        assert np.asarray(state.stats.accepted)[:ROWS].sum() > 20
    warm = wishes(ROWS, temperature=1.0, max_new_tokens=20)
    state = method.decode(method.prefill(method.start(asked, warm, ROWS)))
    assert [len(tokens) for tokens in outputs(state, ROWS)] == [20] * ROWS


def test_other_arrays_serve_without_compiling_again():
    place, asked = target(MESHES["eight"]), prompts([5, 9, 33])
    method = Engine(place, (from_draft(medusa_draft(VOCAB), TREE, place), TargetFirst(3)), chunk=CHUNK)

    def decoded():
        state = method.decode(method.prefill(method.start(asked, wishes(ROWS), ROWS)))
        return outputs(state, ROWS), int(np.asarray(state.stats.accepted)[:ROWS].sum())

    (want, few), made = decoded(), len(method.programs)
    fitted = from_draft(fitted_draft([p + o for p, o in zip(asked, want)]), TREE, place)
    method.replace_drafter(jax.tree.map(np.asarray, fitted))  # from the host; they go where the old ones were
    got, many = decoded()
    assert got == want and many > few + 10
    assert len(method.programs) == made


# The size of the tree


def prices(**passes: float) -> CostTable:
    grid = itertools.product((512, 2048), passes.items())
    table = {(1, context, int(block[1:])): ms + context / 100 for context, (block, ms) in grid}
    drafts = {"medusa:chain2": {(1, 512): 2.0, (1, 2048): 9.0}}
    return CostTable({}, table, drafts, weight_bytes=1, bandwidth=1.0)


def test_the_fastest_tree_weighs_tokens_against_milliseconds(capsys):
    frequency = np.array([0.6, 0.36, 0.216, 0.2, 0.13, 0.12, 0.12, 0.1, 0.08, 0.07, 0.07, 0.07, 0.06, 0.05, 0.04])
    flat, steep = prices(b1=20, b4=21, b8=22, b16=23, b32=24), prices(b1=20, b4=21, b8=40, b16=80, b32=160)
    assert methods.fastest_tree(frequency, flat) == 16  # 15 paths make no tree of 32
    assert methods.fastest_tree(frequency, steep) == 4
    assert "pays" not in capsys.readouterr().err
    assert methods.fastest_tree(frequency, prices(b1=20, b4=90, b8=400)) == 4
    assert "no medusa tree pays here; the best has 4 nodes" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no block that a draft tree fits"):
        methods.fastest_tree(frequency, prices(b1=20))


# Typical acceptance


def plain_typical(draft: Draft, weights: np.ndarray, row: int) -> tuple[int, set[int]]:
    """(accepted tokens, nodes at which a longest likeliest path ends) from processed log-weights [B, T, V]."""
    law = np.exp(weights[row] - weights[row].max(-1, keepdims=True)).astype(np.float64)
    law /= law.sum(-1, keepdims=True)
    accepted, likelihood = {0: 0}, {0: 0.0}
    for node in range(1, draft.tokens.shape[1]):
        parent = int(draft.tree.parent[row, node])
        if not draft.tree.valid[row, node] or parent not in accepted:
            continue
        p = law[parent]
        entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
        if p[draft.tokens[row, node]] > min(0.09, 0.3 * np.exp(-entropy)):
            accepted[node] = accepted[parent] + 1
            likelihood[node] = likelihood[parent] + np.log(p[draft.tokens[row, node]])
    deepest = max(accepted.values())
    most = max(likelihood[n] for n in accepted if accepted[n] == deepest)
    return deepest, {n for n in accepted if accepted[n] == deepest and likelihood[n] > most - 1e-5}


def test_typical_acceptance_follows_its_rule_and_is_greedy_at_temperature_0():
    rng, rows, vocab, parents = np.random.default_rng(2), 64, 12, np.array([-1, 0, 0, 1, 1, 3, 2, 6, 2])
    tokens = rng.integers(0, vocab, (rows, len(parents)))
    scores = (3 * rng.normal(size=(rows, len(parents), vocab))).astype(np.float32)
    valid = rng.random(tokens.shape) < 0.9
    valid[:, 0] = True
    for node in range(1, len(parents)):
        valid[:, node] &= valid[:, parents[node]]
        scores[np.arange(rows), parents[node], tokens[:, node]] += 3
    draft = Draft(trees.static(parents, valid), tokens, np.full(rows, len(parents)))
    heat = (np.arange(rows) % 2).astype(np.float32)
    keys = np.stack([np.zeros(rows), np.arange(rows)], axis=1).astype(np.uint32)
    sampling = SamplingState(heat, np.full(rows, 6), np.full(rows, 0.9, np.float32), keys)
    verdict = jax.jit(Typical(3).verify)(draft, scores, sampling, 10 + np.arange(rows))
    greedy = jax.jit(TargetFirst(3).verify)(draft, scores, sampling, 10 + np.arange(rows))
    weights = np.stack([jax.jit(process)(scores[:, node], sampling) for node in range(len(parents))], axis=1)
    assert not Typical(3).lossless and TargetFirst(3).lossless
    for row in range(rows):
        count, path = int(verdict.count[row]), np.asarray(verdict.path[row])
        if row % 2 == 0:
            assert count == greedy.count[row] and verdict.next_token[row] == greedy.next_token[row]
            assert path[: count + 1].tolist() == np.asarray(greedy.path[row])[: count + 1].tolist()
            continue
        want, ends = plain_typical(draft, weights, row)
        assert count == want and path[count] in ends and path[0] == 0
        assert all(parents[path[step]] == path[step - 1] for step in range(1, count + 1))
        assert weights[row, path[count], int(verdict.next_token[row])] > -1e20
    assert set(np.asarray(verdict.count)[1::2]) == {0, 1, 2, 3}


# Methods by name


@pytest.mark.parametrize(
    ("name", "draft", "told"),
    [
        ("medsa", None, "method 'medsa' is unknown; did you mean 'medusa'"),
        ("medusa:bush4", "DIR", "has no option 'bush4'; it takes treeN, chainN, typical"),
        ("medusa:tree", "DIR", "has no option 'tree'"),
        ("medusa:tree1", "DIR", "leaves no node for a draft token"),
        ("medusa:tree8:chain4", "DIR", "names a tree or an option twice"),
        ("medusa:typical:typical", "DIR", "names a tree or an option twice"),
        ("lookup:tree8", None, "method 'lookup' has no option 'tree8'; it takes none"),
        ("eager", "DIR", "method 'eager' needs no trained draft, but 'DIR' was given; leave it out"),
    ],
)
def test_a_method_that_cannot_be_is_refused_in_one_sentence(name, draft, told):
    with pytest.raises(ValueError, match=told):
        methods.check(name, draft)


def test_methods_are_listed_with_their_options_and_drafts():
    assert parse_methods("eager, medusa:tree8=a/b,medusa:chain4:typical=c:d") == [
        ("eager", None),
        ("medusa:tree8", "a/b"),
        ("medusa:chain4:typical", "c:d"),
    ]
    with pytest.raises(ValueError, match="'medusa' is named twice"):
        parse_methods("medusa=a,medusa=b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved draft that was calibrated to the paths of TREE."""
    place, where = target(), tmp_path_factory.mktemp("draft")
    about = {
        "name": place.name,
        "fingerprint": place.fingerprint,
        "width": WIDTH,
        "vocab_size": VOCAB,
        "tokenizer": place.tokenizer.fingerprint,
    }
    save_draft(
        where,
        dataclasses.replace(medusa_draft(15), target=about, paths=TREE, frequency=np.linspace(0.6, 0.1, 7), nodes=6),
    )
    return str(where)


def test_a_name_builds_the_tree_and_the_verifier_that_it_asks_for(folder):
    def built(name, **options):
        drafter, verifier = methods.build(name, target(), folder, **options)
        return drafter.parents, drafter.ranks, type(verifier), verifier.depth == drafter.depth

    own, best = trees.layout(TREE[:5]), trees.layout(TREE)
    assert built("medusa") == (*own, TargetFirst, True)
    assert built("medusa:tree8") == (*best, TargetFirst, True)
    assert built("medusa:typical:chain3") == (*trees.layout(trees.chain(2)), Typical, True)
    assert built("medusa", costs=prices(b1=20, b4=40, b8=21)) == (*best, TargetFirst, True)
    with pytest.raises(ValueError, match="a tree of depth 4 .* 3 heads"):
        built("medusa:chain5")
    with pytest.raises(ValueError, match="'tree9' is too large, the draft's paths make 8 nodes; give tree8 or less"):
        built("medusa:tree9")


def test_a_drafter_that_needs_other_programs_is_not_put_in_place():
    place = target()
    method = Engine(place, (from_draft(medusa_draft(15), TREE, place), TargetFirst(3)), chunk=CHUNK)
    own = method.drafter
    with pytest.raises(ValueError, match="not built like the engine's Medusa; make an engine for it by with_method"):
        method.replace_drafter(from_draft(medusa_draft(15), trees.chain(3), place))
    wide = own.replace(lm_head=jnp.zeros((16, WIDTH)))
    with pytest.raises(ValueError, match=r"has float32\[16, 32\] where the engine's has float32\[15, 32\]"):
        method.replace_drafter(wide)
    with pytest.raises(ValueError, match="has bfloat16"):
        method.replace_drafter(own.replace(norm=own.norm.astype(jnp.bfloat16)))
    assert method.drafter is own and method.programs.drafter is own


def test_an_engine_passes_draft_template_arguments_and_costs_on(folder, capsys):
    costs = prices(b1=20, b4=40, b8=21)
    eager = Engine(target(), chunk=CHUNK, costs=costs, template_args={"thinking": False})
    method = eager.with_method("medusa", folder)
    assert method.method == "medusa" and method.costs is costs
    assert len(method.drafter.parents) == 8
    assert "template arguments" in capsys.readouterr().err


def test_a_draft_of_another_target_is_refused(folder):
    with pytest.raises(ValueError, match="width 32, but .* 64|train a draft for"):
        methods.build("medusa", target(hidden_size=64), folder)
