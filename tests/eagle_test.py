"""EAGLE: what the layer drafts equals numpy's over the whole text, in all variants and layouts of its files."""

import dataclasses
import functools
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scripted import CHUNK, FIELDS, MESHES, outputs, plain, prompts, rms_norm, states, target, tensors, wishes

from specjax import Engine, methods
from specjax.costs import CostTable
from specjax.decode.step import propose
from specjax.drafters.eagle import from_draft
from specjax.drafters.prices import from_table
from specjax.loading.eagle import EagleDraft, load_eagle, save_eagle
from specjax.verify.target_first import TargetFirst

WIDTH, VOCAB, LAYERS = FIELDS["hidden_size"], FIELDS["vocab_size"], FIELDS["num_hidden_layers"]
HEADS, KV, SIZE, MLP = 2, 1, 8, 48  # the layer's own, none of them the target's
VARIANTS = {
    "eagle3": {},
    "whole vocabulary": {"draft_vocab": None},
    "eagle3.1": {"state_norms": True, "norm_output": True},
    "normed residual": {"norm_before_residual": True},
    "narrow": {"width": 16},
    "eagle1": {"states": 0, "draft_vocab": None},
    "eagle1 with bias": {"states": 0, "draft_vocab": None, "fc_bias": True},
}
TAPS = (0, 1, 2)
COSTS = CostTable(  # rises with blocks, rows and slots, so that decisions differ
    {},
    {(b, c, n): (30 + c / 100) * (1 + 0.07 * n) for b in (1, 4) for c in (128, 512) for n in (1, 2, 4, 8)},
    {"eagle:depth2": {(b, c): (5 + c / 200) * (1 + 0.2 * b) for b in (1, 4) for c in (128, 512)}},
    weight_bytes=1,
    bandwidth=1.0,
)
Scores = dict[tuple[int, ...], float]  # guesses by the tokens drafted down to them -> cumulative log-probability


@dataclasses.dataclass
class Variant:
    """What a tiny draft is made of."""

    states: int = 3
    draft_vocab: int | None = 15
    width: int = WIDTH
    fc_bias: bool = False
    state_norms: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False


def weights(variant: Variant, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors in the midlayer layout, large enough for attention to matter."""
    rng, width = np.random.default_rng(seed), variant.width

    def matrix(*shape):
        return rng.normal(0, 1.5 * shape[1] ** -0.5, shape).astype(np.float32)

    def scale(size):
        return rng.normal(1, 0.2, size).astype(np.float32)

    joined = 2 * width if variant.states else width
    table = {
        "fc.weight": matrix(width, variant.states * WIDTH if variant.states else 2 * width),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * SIZE, joined),
        "midlayer.self_attn.k_proj.weight": matrix(KV * SIZE, joined),
        "midlayer.self_attn.v_proj.weight": matrix(KV * SIZE, joined),
        "midlayer.self_attn.o_proj.weight": matrix(width, HEADS * SIZE),
        "midlayer.mlp.gate_proj.weight": matrix(MLP, width),
        "midlayer.mlp.up_proj.weight": matrix(MLP, width),
        "midlayer.mlp.down_proj.weight": matrix(width, MLP),
        "midlayer.post_attention_layernorm.weight": scale(width),
    }
    if variant.states:
        for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
            table[f"{name}.weight"] = scale(width)
        table["lm_head.weight"] = matrix(variant.draft_vocab or VOCAB, width)
    if variant.fc_bias:
        table["fc.bias"] = matrix(1, width)[0]
    if variant.state_norms:
        table |= {f"fc_norm.{i}.weight": scale(WIDTH) for i in range(variant.states)}
    if width != WIDTH:
        table["embed_tokens.weight"] = matrix(VOCAB, width)
    return table


def ids_of(variant: Variant) -> np.ndarray:
    size = variant.draft_vocab or VOCAB
    return np.sort(np.random.default_rng(5).choice(VOCAB, size, replace=False))


def save(folder: Path, variant: Variant, seed: int = 0) -> Path:
    """A draft folder as SafeAILab's and SpecForge's trainers write it; EAGLE-1 in its own layout."""
    table = weights(variant, seed)
    if variant.draft_vocab:
        kept = np.isin(np.arange(VOCAB), ids_of(variant))
        table |= {"d2t": ids_of(variant) - np.arange(variant.draft_vocab), "t2d": kept}
    if not variant.states:
        table = {name.replace("midlayer.", "layers.0."): value for name, value in table.items()}
        table["embed_tokens.weight"] = tensors(FIELDS)["model.embed_tokens.weight"]
    fields = {
        "architectures": ["LlamaForCausalLMEagle3" if variant.states else "LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": variant.width,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": SIZE,
        "max_position_embeddings": 192,
        "rms_norm_eps": FIELDS["rms_norm_eps"],
        "rope_theta": 5000.0,
        "vocab_size": VOCAB,
        "draft_vocab_size": variant.draft_vocab or VOCAB,
        "norm_output": variant.norm_output,
        "norm_before_residual": variant.norm_before_residual,
    }
    if variant.width != WIDTH:
        fields["target_hidden_size"] = WIDTH
    if variant.states:
        fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(table, folder / "model.safetensors")
    return folder


class Reference:
    """The layer in numpy, in float64, over all pairs of a text again for every token: no cache, no tree.

    `table`: its tensors; `shape`: its query and kv heads and their size; `theta`: of its rotary positions.
    """

    def __init__(self, variant: Variant, table=None, shape=(HEADS, KV, SIZE), theta: float = 5000.0):
        self.variant, self.target, self.shape, self.theta = variant, tensors(FIELDS), shape, theta
        self.table = {name: value.astype(np.float64) for name, value in (table or weights(variant)).items()}
        self.embed = self.table.get("embed_tokens.weight", self.target["model.embed_tokens.weight"].astype(np.float64))

    def norm(self, x, name):
        return rms_norm(x, self.table[f"{name}.weight"], FIELDS)

    def hidden(self, text: list[int]) -> np.ndarray:
        """What the target's states of a text make of each place [T, W]."""
        found = states(FIELDS, self.target, text)
        if not self.variant.states:
            return rms_norm(found[-1], self.target["model.norm.weight"], FIELDS)
        fused = [found[tap] for tap in TAPS]
        if self.variant.state_norms:
            fused = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(fused)]
        return np.concatenate(fused, axis=-1) @ self.table["fc.weight"].T

    def outputs(self, following: list[int], hidden: np.ndarray) -> np.ndarray:
        """The layer over pairs: following [T] tokens, hidden [T, W] -> [T, W]."""
        t, length, embedded = self.table, len(following), self.embed[following]
        query_heads, kv_heads, size = self.shape
        if self.variant.states:
            normed = self.norm(hidden, "midlayer.hidden_norm")
            x = np.concatenate([self.norm(embedded, "midlayer.input_layernorm"), normed], axis=-1)
            residual = normed if self.variant.norm_before_residual else hidden
        else:
            x = np.concatenate([embedded, hidden], axis=-1) @ t["fc.weight"].T + t.get("fc.bias", 0)
            residual = x
        angles = np.arange(length)[:, None] * self.theta ** -(np.arange(0, size, 2) / size)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

        def heads(name, count):
            y = (x @ t[f"midlayer.self_attn.{name}_proj.weight"].T).reshape(length, count, size)
            a, b = np.split(y, 2, axis=-1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1) if name != "v" else y

        q, k, v = heads("q", query_heads), heads("k", kv_heads), heads("v", kv_heads)
        scores = np.einsum("qnh,knh->nqk", q, np.repeat(k, query_heads // kv_heads, axis=1)) * size**-0.5
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        y = np.einsum("nqk,knh->qnh", shares, np.repeat(v, query_heads // kv_heads, axis=1)).reshape(length, -1)
        y = residual + y @ t["midlayer.self_attn.o_proj.weight"].T
        h = self.norm(y, "midlayer.post_attention_layernorm")
        gate, up = (h @ t[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return y + (gate / (1 + np.exp(-gate)) * up) @ t["midlayer.mlp.down_proj.weight"].T

    def log_law(self, output: np.ndarray) -> np.ndarray:
        """Log-probabilities over the draft's tokens by the output [W] of a pair."""
        if self.variant.states:
            z = self.norm(output, "norm") @ self.table["lm_head.weight"].T
        else:
            z = output @ self.target["lm_head.weight"].T
        return z - np.log(np.exp(z - z.max()).sum()) - z.max()

    def after(self, text: list[int], drafted: tuple[int, ...]) -> np.ndarray:
        """The law of the token after text and drafted tokens, drafted features standing in for the target's."""
        hidden, following = self.hidden(text[:-1]), text[1:]
        for token in drafted:
            output = self.outputs(following, hidden)[-1]
            fed_back = self.norm(output, "norm") if self.variant.norm_output else output
            hidden, following = np.concatenate([hidden, fed_back[None]]), [*following, token]
        return self.log_law(self.outputs(following, hidden)[-1])

    def levels(self, text: list[int], width: int, seen=lambda law, position: law) -> Iterator[tuple[Scores, Scores]]:
        """EAGLE-2's tree level by level, without end: all guesses so far, and those of them that are gone on with.

        `seen(law, position)`: what takes the place of a law of the token at that text position."""
        ids, every, frontier = ids_of(self.variant), {}, {(): 0.0}
        while True:
            level = {}
            for path, score in frontier.items():
                law = seen(self.after(text, path), len(text) + len(path))
                for place in np.argsort(-law, kind="stable")[:width]:
                    level[*path, int(ids[place])] = score + law[place]
            every, frontier = every | level, best(level, width)
            yield every, frontier

    def tree(self, text: list[int], nodes: int, depth: int, width: int, *seen) -> Scores:
        every, _ = next(itertools.islice(self.levels(text, width, *seen), depth - 1, None))
        return best(every, nodes - 1)


def best(guesses: Scores, count: int) -> Scores:
    return dict(sorted(guesses.items(), key=lambda item: -item[1])[:count])


def paths(parent: np.ndarray, tokens: np.ndarray) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Drafted tokens from the root down -> the nodes that carry them."""
    found = {0: ((), ())}
    for node in range(1, len(parent)):
        above, numbers = found[parent[node]]
        found[node] = ((*above, int(tokens[node])), (*numbers, node))
    return {drafted: numbers for drafted, numbers in found.values() if drafted}


@functools.cache
def stored(name: str) -> EagleDraft:
    """A variant, through its file."""
    with tempfile.TemporaryDirectory() as folder:
        return load_eagle(save(Path(folder), Variant(**VARIANTS[name])))


@functools.cache
def engine(
    name: str, mesh: str = "", nodes: int = 7, depth: int = 3, width: int = 3, dtype="float32", **options: bool
) -> Engine:
    """Of an `adaptive` or a `coupled` draft, if asked for."""
    place = target(mesh, dtype)
    if options.pop("adaptive", False):
        options["prices"] = from_table(COSTS, "eagle:depth2", 2, (1, 4, nodes))
    drafter = from_draft(stored(name), place, nodes=nodes, depth=depth, width=width, **options)
    return Engine(place, (drafter, TargetFirst(drafter.depth)), chunk=CHUNK)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    where = tmp_path_factory.mktemp("eagle")
    return {name: save(where / str(i), Variant(**flags)) for i, (name, flags) in enumerate(VARIANTS.items())}


@pytest.mark.parametrize(
    ("name", "mesh"), [*((name, "one") for name in VARIANTS), ("eagle3", "eight"), ("eagle1", "eight")]
)
def test_trees_are_those_that_numpy_grows_from_whole_texts(name, mesh):
    method, reference = engine(name, MESHES[mesh]), Reference(Variant(**VARIANTS[name]))
    prefilled = method.prefill(method.start(prompts([1, 9, 33]), wishes(3), 3))
    for state in (prefilled, method.decode(jax.tree.map(jnp.copy, prefilled), 3)):
        with jax.set_mesh(method.target.mesh):
            draft = jax.tree.map(np.asarray, jax.jit(propose)(method.drafter, state))
        tokens, count = np.asarray(state.text.tokens), np.asarray(state.text.count)
        for row in range(3):
            text = tokens[row, : count[row]].tolist()
            want = reference.tree(text, nodes=7, depth=3, width=3)
            got = paths(draft.tree.parent[row], draft.tokens[row])
            assert draft.tokens[row, 0] == text[-1]
            assert list(got) == list(want)  # the best first
            assert draft.size[row] == 7 and draft.levels[row] == 3
            for drafted, numbers in got.items():
                sees = np.flatnonzero(draft.tree.mask[row, numbers[-1]])
                assert sorted((0, *numbers)) == sees.tolist() and draft.tree.depth[row, numbers[-1]] == len(drafted)


@pytest.mark.parametrize("mesh", ["one", "eight"])
@pytest.mark.parametrize(("nodes", "depth", "width"), [(7, 3, 3), (5, 4, 1)])
def test_text_is_the_eager_text(mesh, nodes, depth, width):
    method = engine("eagle3.1", MESHES[mesh], nodes, depth, width)
    asked = prompts([1, 9, 33])
    state = method.decode(method.prefill(method.start(asked, wishes(3), 3)))
    assert outputs(state, 3) == [plain(prompt, 32) for prompt in asked]


def test_a_conversation_that_goes_on_is_drafted_like_a_new_one():
    """Cut back within what was accepted, grown to a larger bucket, then the same proposals as from the start."""
    place = target(max_position_embeddings=2048)
    drafter = from_draft(stored("eagle3"), place, nodes=7, depth=3, width=3)
    method = Engine(place, (drafter, TargetFirst(drafter.depth)), chunk=64)
    first, *_ = prompts([40])
    state = method.decode(method.prefill(method.start([first], wishes(1), 1)))
    text = first + outputs(state, 1)[0]
    longer = text[:55] + [3, 1, 4] + prompts([500])[0]
    drafts = []
    for begun in (method.restart(state, longer, wishes(1)[0]), method.start([longer], wishes(1), 1)):
        ready = method.prefill(begun)
        with jax.set_mesh(method.target.mesh):
            drafts.append(jax.tree.map(np.asarray, jax.jit(propose)(method.drafter, ready)))
    assert ready.cache.slots == ready.drafter.cache.slots > 512
    jax.tree.map(np.testing.assert_array_equal, *drafts)


def test_a_name_builds_the_tree_that_it_asks_for(folders):
    def built(name):
        drafter, verifier = methods.build(name, target(), str(folders["eagle3"]))
        assert verifier.depth == drafter.depth
        return drafter.nodes, drafter.depth, drafter.width

    assert built("eagle") == (16, 5, 4)
    assert built("eagle:tree4") == (4, 3, 3)
    assert built("eagle:tree9:depth2:width3") == (9, 2, 3)
    assert built("eagle:chain5:fixed") == (5, 4, 1)
    with pytest.raises(ValueError, match="a tree of 20 nodes does not fit 12 guesses, 3 wide and 2 deep"):
        built("eagle:tree20:depth2:width3")
    for name in ("eagle:chain4:depth2", "eagle:tree4:tree5", "eagle:chain4:tree4"):
        with pytest.raises(ValueError, match="names a tree or an option twice"):
            built(name)
    with pytest.raises(ValueError, match="no option 'typical'; it takes treeN, chainN, depthN, widthN, fixed, coupled"):
        built("eagle:typical")


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_saved_is_read_back(folders, name, tmp_path):
    draft = load_eagle(folders[name])
    save_eagle(tmp_path, draft)
    again = load_eagle(tmp_path)
    assert again.config == draft.config and again.taps == draft.taps
    assert set(again.tensors) == set(draft.tensors)
    for key, value in draft.tensors.items():
        np.testing.assert_array_equal(again.tensors[key], value)
    for mine, theirs in ((again.token_ids, draft.token_ids), (again.embedding, draft.embedding)):
        assert (mine is None) == (theirs is None)
        np.testing.assert_array_equal(mine, theirs) if mine is not None else None


def test_speculators_layout_is_the_same_draft(folders, tmp_path):
    """Nested layer config, layers.0 names, and layer ids that say what enters a layer."""
    fields = json.loads((folders["eagle3"] / "config.json").read_text())
    del fields["eagle_config"]
    layer = {key: fields.pop(key) for key in list(fields) if key not in ("draft_vocab_size", "norm_before_residual")}
    nested = {"transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": list(TAPS), **fields}
    (tmp_path / "config.json").write_text(json.dumps(nested | {"speculators_model_type": "eagle3"}))
    stored = load_file(folders["eagle3"] / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in stored.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    want, got = load_eagle(folders["eagle3"]), load_eagle(tmp_path)
    assert got.config == want.config and got.taps == want.taps == TAPS
    assert set(got.tensors) == set(want.tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": -2 * np.arange(15)}, "d2t does not give 15 ascending ids"),
        ({"d2t": None}, "lacks tensor d2t"),
        ({"t2d": np.zeros(VOCAB, bool)}, "t2d and d2t name different tokens"),
        ({"norm.weight": None}, "lacks tensor norm.weight"),
        ({"norm.weight": np.ones(3, np.float32)}, r"norm.weight has shape \[3\] where \[32\]"),
        ({"extra": np.ones(3, np.float32)}, "surplus tensors \\(extra\\)"),
        ({"input_norm.weight": np.ones(96, np.float32)}, "norm_before_fc"),
        ({"fc.weight": np.ones((32, 64), np.float32)}, "names 3 target states, but fc fuses 2"),
    ],
)
def test_damaged_and_foreign_files_are_refused_by_name(folders, tmp_path, change, message):
    stored = load_file(folders["eagle3"] / "model.safetensors") | change
    save_file({name: value for name, value in stored.items() if value is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["eagle3"] / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        load_eagle(tmp_path)
