"""What the decoding tests share: a tiny target, a numpy reference of it, and a drafter that proposes what it is told.

One scripted drafter plays oracle, anti-oracle, mixed and random: its script is data, so all of them are one program.
"""

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import struct
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers

from specjax import Engine, Sampling, Target, load_target, trees
from specjax.decode.state import DecodeState
from specjax.loading.drafts import MedusaDraft
from specjax.sharding import row_spec, rowwise
from specjax.trees import Draft
from specjax.verify.target_first import TargetFirst

MESHES = {"one": "", "eight": "data=2,model=4"}
CHAIN = tuple(trees.branches(5).tolist())
TREE = (-1, 0, 0, 1, 1, 3, 2, 5)  # lopsided: slots, depths and paths all differ
LENGTHS = (1, 5, 9, 33, 60)
CHUNK = 16

FIELDS = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
CHAT = "{% for m in messages %}{{ (m['role'][0] + ' ' + m['content'] + ' ') }}{% endfor %}{{ 'a ' }}"


def tensors(fields: Mapping, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights by their Hugging Face names, large enough for attention to matter."""
    rng = np.random.default_rng(seed)
    width, hidden, size = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]

    def weight(*shape):
        return rng.normal(0, 1.5 * shape[1] ** -0.5, shape).astype(np.float32)

    table = {"model.embed_tokens.weight": weight(fields["vocab_size"], width)}
    for i in range(fields["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        table |= {
            layer + "input_layernorm.weight": rng.normal(1, 0.1, width).astype(np.float32),
            layer + "post_attention_layernorm.weight": rng.normal(1, 0.1, width).astype(np.float32),
            layer + "self_attn.q_proj.weight": weight(heads * size, width),
            layer + "self_attn.k_proj.weight": weight(kv_heads * size, width),
            layer + "self_attn.v_proj.weight": weight(kv_heads * size, width),
            layer + "self_attn.o_proj.weight": weight(width, heads * size),
            layer + "mlp.gate_proj.weight": weight(hidden, width),
            layer + "mlp.up_proj.weight": weight(hidden, width),
            layer + "mlp.down_proj.weight": weight(width, hidden),
        }
    table["model.norm.weight"] = rng.normal(1, 0.1, width).astype(np.float32)
    table["lm_head.weight"] = 2 * weight(fields["vocab_size"], width)
    return table


def states(fields: Mapping, table: Mapping[str, np.ndarray], tokens: Sequence[int]) -> list[np.ndarray]:
    """The reference: a Llama forward pass over a whole text in numpy, in float64 and without any cache.

    What enters each layer, and what leaves the last one before the final norm: L + 1 arrays [T, D].
    """
    heads, kv_heads, size = fields["num_attention_heads"], fields["num_key_value_heads"], fields["head_dim"]
    length = len(tokens)
    angles = np.arange(length)[:, None] * fields["rope_theta"] ** -(np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    causal = np.where(np.tril(np.ones((length, length), bool)), 0, -np.inf)

    def norm(x, name):
        return rms_norm(x, table[name], fields)

    def rotated(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = table["model.embed_tokens.weight"].astype(np.float64)[list(tokens)]
    found = [x]
    for i in range(fields["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = norm(x, layer + "input_layernorm.weight")
        q, k, v = (
            (h @ table[f"{layer}self_attn.{name}_proj.weight"].T).reshape(length, n, size)
            for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        k, v = (np.repeat(y, heads // kv_heads, axis=1) for y in (rotated(k), v))
        scores = np.einsum("qnh,knh->nqk", rotated(q), k) * size**-0.5 + causal
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("nqk,knh->qnh", weights, v).reshape(length, heads * size)
        x = x + y @ table[layer + "self_attn.o_proj.weight"].T
        h = norm(x, layer + "post_attention_layernorm.weight")
        gate, up = (h @ table[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ table[layer + "mlp.down_proj.weight"].T
        found.append(x)
    return found


def rms_norm(x: np.ndarray, scale: np.ndarray, fields: Mapping) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + fields["rms_norm_eps"]) * scale


def logits(fields: Mapping, table: Mapping[str, np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """The reference's logits over a whole text [T, V]."""
    return rms_norm(states(fields, table, tokens)[-1], table["model.norm.weight"], fields) @ table["lm_head.weight"].T


def plain(prompt: Sequence[int], count: int, fields: Mapping = FIELDS) -> list[int]:
    """Reference greedy decoding: the whole text again for every token, no cache, the lowest index wins."""
    table, text = tensors(fields), list(prompt)
    for _ in range(count):
        text.append(int(np.argmax(logits(fields, table, text)[-1])))
    return text[len(prompt) :]


def save_target(folder: Path, fields: Mapping = {}, table: Mapping[str, np.ndarray] | None = None) -> Path:
    """A checkpoint folder of the tiny target: config, weights and a tokenizer whose words are a, b and t2, t3, ..."""
    fields = FIELDS | dict(fields)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors(fields) if table is None else dict(table), folder / "model.safetensors")
    words = ["a", "u", *(f"t{i}" for i in range(2, fields["vocab_size"]))]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    return folder


@functools.cache
def target(mesh: str = "", dtype: str = "float32", **fields) -> Target:
    """The tiny target on a mesh, with the same weights on every one; `fields` of its config differ from FIELDS."""
    with tempfile.TemporaryDirectory() as folder:
        return load_target(save_target(Path(folder), fields), mesh=mesh, dtype=dtype)


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """[T, T]: which nodes lie on the path from the root to each node, the node itself included."""
    seen = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        seen[node] |= seen[parents[node]]
    return seen


@struct.dataclass
class Script:
    """Per row, by absolute text position [B, M]: the token the draft proposes, and what it puts beside it."""

    tokens: jax.Array
    others: jax.Array


@struct.dataclass
class Scripted:
    """Drafts a tree whose nodes carry the script's tokens; its state is the script.

    In each cycle one leaf, another every time, has the scripted tokens on its path; all other nodes carry the
    `others`. With several `blocks` the cycles take turns in how many nodes they propose.
    """

    parents: tuple[int, ...] = struct.field(pytree_node=False, default=CHAIN)
    blocks: tuple[int, ...] = struct.field(pytree_node=False, default=(len(CHAIN),))
    width: int = struct.field(pytree_node=False, default=1024)

    taps = ()

    @property
    def depth(self) -> int:
        return trees.max_depth(np.array(self.parents))

    def init(self, batch, slots):
        zero = jnp.zeros((batch, self.width), jnp.int32, out_sharding=row_spec(2))
        return Script(zero, zero)

    def draft(self, state, tokens, count, sampling, running, stats):
        return rowwise(self._scripted)(state, tokens, count)

    def extend(self, state, tokens, features, count, after):
        return state

    def grow(self, state, slots):
        return state

    def cut(self, state, length):
        return state

    def _scripted(self, state, tokens, count):
        nodes, paths = np.arange(len(self.parents)), ancestors(self.parents)
        leaves = np.setdiff1d(nodes, self.parents)
        on_path = jnp.array(paths[leaves])[count % len(leaves)]
        spots = jnp.minimum(count[:, None] + paths.sum(1) - 2, self.width - 1)
        scripted = jnp.take_along_axis(state.tokens, spots, axis=1)
        proposed = jnp.where(on_path, scripted, jnp.take_along_axis(state.others, spots, axis=1))
        last = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)
        size = jnp.array(self.blocks)[count % len(self.blocks)]
        return Draft(
            trees.static(np.array(self.parents), nodes < size[:, None]), jnp.where(nodes == 0, last, proposed), size
        )


def scripted(target: Target, parents: Sequence[int] = CHAIN, blocks: Sequence[int] = (), **options) -> Engine:
    """An engine whose drafts are scripted."""
    drafter = Scripted(tuple(parents), tuple(blocks) or (len(parents),))
    return Engine(target, (drafter, TargetFirst(drafter.depth)), **{"chunk": CHUNK} | options)


def medusa_draft(draft_vocab: int | None = None, layers: int = 1, heads: int = 3, seed: int = 0) -> MedusaDraft:
    """Random Medusa heads for the tiny target, with the target's LM head or one over some scattered tokens."""
    rng, width, vocab = np.random.default_rng(seed), FIELDS["hidden_size"], FIELDS["vocab_size"]

    def noise(*shape):
        return rng.normal(0, width**-0.5, shape).astype(np.float32)

    own = draft_vocab is not None
    return MedusaDraft(
        weight=3 * noise(heads, layers, width, width),
        bias=noise(heads, layers, width),
        lm_head=noise(draft_vocab, width) if own else None,
        token_ids=np.sort(rng.choice(vocab, draft_vocab, replace=False)).astype(np.int32) if own else None,
        accuracy=np.array([[0.5, 0.2, 0.1]] * heads),
        paths=trees.chain(heads),
        frequency=0.5 ** np.arange(1.0, heads + 1),
        nodes=heads + 1,
        target={},
        template_args={},
        training={},
    )


def oracle(texts: Sequence[Sequence[int]], rows: int, kind: str = "oracle", vocab: int = 97) -> tuple:
    """The script (tokens, others) that is right about whole texts, always wrong, right at even positions, or random."""
    truth = np.zeros((rows, Scripted.width), np.int32)
    for row, text in enumerate(texts):
        truth[row, : len(text)] = text
    if kind == "random":
        noise = np.random.default_rng(7).integers(0, vocab, (2, *truth.shape), dtype=np.int32)
        return noise[0], noise[1]
    right = {"oracle": 1, "anti": 0, "mixed": np.arange(truth.shape[1]) % 2 == 0}[kind]
    return np.where(right, truth, (truth + 1) % vocab), (truth + 2) % vocab


def script(state: DecodeState, tokens: np.ndarray, others: np.ndarray) -> DecodeState:
    """The state with its script set: what the draft will propose."""
    put = functools.partial(jax.device_put, device=state.drafter.tokens.sharding)
    return state.replace(drafter=Script(put(tokens.astype(np.int32)), put(others.astype(np.int32))))


def prompts(lengths: Sequence[int] = LENGTHS, vocab: int = 97) -> list[list[int]]:
    """Random prompts; each repeats itself, so that lookup has something to copy."""
    rng = np.random.default_rng(3)
    return [np.resize(rng.integers(0, vocab, max(1, n // 2)), n).tolist() for n in lengths]


def wishes(count: int, **fields) -> list[Sampling]:
    """One Sampling for each row, with its own seed; end tokens are ignored unless asked for."""
    return [Sampling(**{"max_new_tokens": 32, "seed": 11 + row, "ignore_end": True} | fields) for row in range(count)]


def decode(engine: Engine, state: DecodeState, loop: str = "whole") -> DecodeState:
    """Run a prefilled state to its end by one of the three loops."""
    if loop == "host":
        return engine.decode_on_host(state)
    if loop == "whole":
        return engine.decode(state)
    while np.asarray(state.text.running).any():
        state = engine.decode(state, 3)
    return state


def outputs(state: DecodeState, rows: int) -> list[list[int]]:
    """The new tokens of the first rows."""
    tokens, start, end = (np.asarray(x) for x in (state.text.tokens, state.text.prompt, state.text.count))
    return [tokens[row, start[row] : end[row]].tolist() for row in range(rows)]
