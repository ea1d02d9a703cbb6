"""Drafts on disk, in the field's own layouts: config.json and safetensors. Medusa heads so far."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specjax.loading import draft_files
from specjax.loading.draft_files import CONFIG, SCHEMA_VERSION, check_float, locate, read_tensors
from specjax.loading.huggingface import read_json
from specjax.telemetry import say

LM_HEAD, TOKEN_MAP = "lm_heads.0.weight", "token_map"
_DEFAULT_RANKS = 10


@dataclass(frozen=True)
class MedusaDraft:
    """Medusa heads and all that decoding has to know of them.

    weight: [heads, layers, D, D]; bias: [heads, layers, D]: a layer maps x to x + silu(weight x + bias).
    lm_head: [V_d, D] and token_ids: int32 [V_d], ascending target ids, of a draft vocabulary; both None without one.
    accuracy: [heads, ranks], how often a head's guess of that rank is right.
    paths: tree nodes by the ranks of their guesses, root left out (Medusa's convention), the most valuable first;
    frequency: [len(paths)], how often each is right, non-increasing. Every beginning of `paths` is a tree (see
    `trees.ranked`); nodes: the size, root included, of the one to use by default.
    target: name, fingerprint, width, vocab_size, tokenizer (its fingerprint); what is unknown is left out.
    template_args: those of the chat template in training. training: free JSON.
    """

    weight: np.ndarray
    bias: np.ndarray
    lm_head: np.ndarray | None
    token_ids: np.ndarray | None
    accuracy: np.ndarray
    paths: tuple[tuple[int, ...], ...]
    frequency: np.ndarray
    nodes: int
    target: dict
    template_args: dict
    training: dict

    @property
    def width(self) -> int:
        """Width of the target that the heads read from."""
        return self.weight.shape[-1]


@dataclass(frozen=True)
class _Layout:
    """`layer`: the name of a head's layer up to .weight; `heads`, `layers`: the config's fields for their numbers."""

    file: str
    layer: str
    heads: str
    layers: str


# Heads that share the target's lm_head (FasterDecoding/Medusa, trainer "version 2").
_SHARED = _Layout("medusa_lm_head.safetensors", "{}.{}.linear", "medusa_num_heads", "medusa_num_layers")
# Heads with an lm_head of their own, over some of the target's tokens (vLLM, models/medusa.py).
_OWN = _Layout("model.safetensors", "blocks.{}.layers.{}", "num_heads", "num_hidden_layers")


def save_draft(folder: str | Path, draft: MedusaDraft, *, int8: bool = False) -> None:
    """Write the draft in the layout that fits it: vLLM's with a draft vocabulary, Medusa's version 2 without; `int8`:
    a quarter as large, for specjax alone.

    Raises ValueError if the draft contradicts itself, OSError if it cannot be written.
    """
    folder = Path(folder).expanduser()
    if (draft.lm_head is None) != (draft.token_ids is None):
        raise ValueError("the draft to save has only one of lm_head and token_ids; a draft vocabulary needs both")
    if draft.token_ids is not None:
        _check_token_ids(draft.token_ids, draft.target["vocab_size"], "the draft to save")
    _check_calibration(draft, "the draft to save")
    layout = _SHARED if draft.token_ids is None else _OWN
    draft_files.write(folder, layout.file, _tensors(draft, layout), _config(draft, layout), int8=int8)
    (folder / (_OWN if layout is _SHARED else _SHARED).file).unlink(missing_ok=True)


def _tensors(draft: MedusaDraft, layout: _Layout) -> dict[str, np.ndarray]:
    tensors = {}
    for i, j in np.ndindex(draft.weight.shape[:2]):
        name = layout.layer.format(i, j)
        tensors |= {f"{name}.weight": draft.weight[i, j], f"{name}.bias": draft.bias[i, j]}
    if layout is _OWN:
        tensors |= {LM_HEAD: draft.lm_head, TOKEN_MAP: draft.token_ids.astype(np.int64)}  # torch indexes with int64
    return tensors


def _config(draft: MedusaDraft, layout: _Layout) -> dict:
    heads, layers, width = draft.weight.shape[:3]
    config = {
        layout.heads: heads,
        layout.layers: layers,
        "base_model_name_or_path": draft.target["name"],
        "torch_dtype": draft.weight.dtype.name,
    }
    if layout is _SHARED:
        config["version"] = "2"
    else:
        config |= {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": width,
            "vocab_size": draft.target["vocab_size"],
            "truncated_vocab_size": len(draft.token_ids),
            "medusa_fc_bias": True,
            "original_lm_head": True,
        }
    config["specjax"] = {
        "schema_version": SCHEMA_VERSION,
        "method": "medusa",
        "target": draft.target,
        "template_args": draft.template_args,
        "accuracy": np.asarray(draft.accuracy, np.float64).tolist(),
        "paths": draft.paths,
        "frequency": np.asarray(draft.frequency, np.float64).tolist(),
        "nodes": draft.nodes,
        "training": draft.training,
    }
    return config


def load_draft(folder: str | Path) -> MedusaDraft:
    """A draft folder in either layout, or a training work directory that holds one as `draft` -> draft.

    Files of other trainers have no `specjax` section: their accuracy is then taken as halving with every head and
    every rank, the tree as a chain of first guesses, each half as frequent as the one before, and one line says so.
    Raises FileNotFoundError or ValueError in one sentence naming the file and the field or tensor that is wrong.
    """
    folder = locate(folder)
    config = read_json(folder / CONFIG)
    layout = _OWN if config.get("model_type") == "medusa" else _SHARED
    path = folder / layout.file
    tensors = _read(path)
    weight, bias = _take_layers(tensors, layout, config, path)
    lm_head = token_ids = None
    if layout is _OWN:
        lm_head, token_ids = _take_vocabulary(tensors, config, weight.shape[-1], path)
    if tensors:
        raise ValueError(f"{path} holds surplus tensors ({_listed(sorted(tensors))}); this is no Medusa draft")
    about = _read_section(config, len(weight), folder)
    if "target" not in about:
        known = {"width": weight.shape[-1], "vocab_size": config.get("vocab_size")}
        about["target"] = {key: value for key, value in known.items() if value is not None}
    draft = MedusaDraft(weight, bias, lm_head, token_ids, **about)
    _check_calibration(draft, str(folder / CONFIG))
    return draft


def _read(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file; heads that each have a vocabulary matrix are refused."""
    tensors = {name.removeprefix("medusa_heads."): value for name, value in read_tensors(path).items()}
    for name, value in tensors.items():
        if re.fullmatch(r"\d+\.\d+\.weight|lm_heads\.[1-9]\d*\.weight", name):
            raise ValueError(
                f"{path} holds a vocabulary matrix for each head ({name}), which is not supported; "
                "use heads that share one lm_head, such as specjax trains"
            )
        check_float(path, name, value, (TOKEN_MAP,))
    return tensors


def _take_layers(tensors: dict, layout: _Layout, config: dict, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Removes the heads' layers from `tensors` -> weight [heads, layers, D, D], bias [heads, layers, D]."""
    pattern = re.escape(layout.layer).replace(r"\{\}", r"(\d+)") + r"\.weight"
    places = [tuple(map(int, found.groups())) for name in tensors if (found := re.fullmatch(pattern, name))]
    if not places:
        raise ValueError(f"{path} lacks tensor {layout.layer.format(0, 0)}.weight; this is no Medusa draft")
    heads, layers = (1 + max(numbers) for numbers in zip(*places))
    for field, count in ((layout.heads, heads), (layout.layers, layers)):
        if config.get(field, count) != count:
            raise ValueError(
                f"{path.parent / CONFIG} says {field} = {config[field]!r} but {path.name} holds {count}; "
                "correct the config if the file is whole"
            )
    width = config.get("hidden_size", tensors[f"{layout.layer.format(*places[0])}.weight"].shape[-1])
    optional_bias = layout is _OWN and not config.get("medusa_fc_bias", False)
    weight, bias, shapes = [], [], {"weight": (width, width), "bias": (width,)}
    for i, j in np.ndindex(heads, layers):
        for kind, into in (("weight", weight), ("bias", bias)):
            name = f"{layout.layer.format(i, j)}.{kind}"
            if kind == "bias" and optional_bias:
                tensors.setdefault(name, np.zeros(width, weight[0].dtype))
            into.append(_take(tensors, name, shapes[kind], path))
    return (
        np.stack(weight).reshape(heads, layers, width, width),
        np.stack(bias).reshape(heads, layers, width),
    )


def _take(tensors: dict, name: str, shape: tuple[int, ...], path: Path) -> np.ndarray:
    if name not in tensors:
        raise ValueError(f"{path} lacks tensor {name} of shape {list(shape)}; download or train it again")
    value = tensors.pop(name)
    if value.shape != shape:
        raise ValueError(f"{path}: tensor {name} has shape {list(value.shape)} where {list(shape)} is needed")
    return value


def _take_vocabulary(tensors: dict, config: dict, width: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Removes the draft vocabulary from `tensors` -> lm_head [V_d, D], token_ids [V_d], ascending.

    As in vLLM, a file without a map covers the whole vocabulary, and an lm_head that does so is cut down by the map.
    """
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ValueError(f"{path.parent / CONFIG} has vocab_size {vocab_size!r}; set it to the target's")
    size = config.get("truncated_vocab_size", vocab_size)
    token_map = tensors.pop(TOKEN_MAP, None)
    if token_map is None and size != vocab_size:
        raise ValueError(
            f"{path} lacks tensor {TOKEN_MAP}, without which {size} of {vocab_size} tokens have no ids; "
            "download or train it again"
        )
    ids = np.arange(vocab_size) if token_map is None else token_map.reshape(-1)
    if len(ids) != size:
        raise ValueError(f"{path}: {TOKEN_MAP} has {len(ids)} ids where truncated_vocab_size is {size}")
    order = np.argsort(ids)
    ids = ids[order]
    _check_token_ids(ids, vocab_size, str(path))
    rows = len(tensors.get(LM_HEAD, ids))
    lm_head = _take(tensors, LM_HEAD, (rows if rows == vocab_size else size, width), path)
    return lm_head[order if rows == size else ids], ids.astype(np.int32)


def _check_token_ids(ids: np.ndarray, vocab_size: int, source: str) -> None:
    if not len(ids) or (np.diff(ids) <= 0).any():
        raise ValueError(f"{source}: {TOKEN_MAP} has to name different tokens in ascending order; train it again")
    if not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise ValueError(
            f"{source}: {TOKEN_MAP} runs from {ids[0]} to {ids[-1]}, outside the target's {vocab_size} tokens; "
            "train it again"
        )


def _read_section(config: dict, heads: int, folder: Path) -> dict:
    """The `specjax` section as fields of `MedusaDraft`, or the defaults of a draft without one."""
    section, source = config.get("specjax"), folder / CONFIG
    if section is None:
        say(f"{folder} was written by another trainer: accuracy assumed to halve by head and rank, tree a chain")
        accuracy = 0.5 ** (1 + np.add.outer(np.arange(heads), np.arange(_DEFAULT_RANKS)))
        return {
            "accuracy": accuracy,
            "paths": tuple((0,) * depth for depth in range(1, heads + 1)),
            "frequency": accuracy[:, 0],
            "nodes": heads + 1,
            "template_args": {},
            "training": {},
        }
    if section.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{source} has schema_version {section.get('schema_version')!r} where {SCHEMA_VERSION} is read; "
            "use the specjax that wrote it"
        )
    if section.get("method") != "medusa":
        raise ValueError(f"{source} is a draft of method {section.get('method')!r}, not 'medusa'; choose that method")
    needed = ("target", "template_args", "accuracy", "paths", "frequency", "nodes", "training")
    missing = [key for key in needed if key not in section]
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)} in its specjax section; train it again")
    about = {key: section[key] for key in needed}
    arrays = {key: np.asarray(section[key], np.float64) for key in ("accuracy", "frequency")}
    return about | arrays | {"paths": tuple(map(tuple, section["paths"]))}


def _check_calibration(draft: MedusaDraft, source: str) -> None:
    heads, accuracy, frequency = len(draft.weight), draft.accuracy, draft.frequency
    if accuracy.ndim != 2 or len(accuracy) != heads or not _shares(accuracy):
        raise ValueError(f"{source} needs an accuracy from 0 to 1 for every rank of {heads} heads; calibrate it again")
    known = {()}
    for path in draft.paths:
        if path in known or path[:-1] not in known or len(path) > heads or path[-1] < 0:
            raise ValueError(
                f"{source} has {path} among its paths, which stands twice or before its parent, or is outside "
                f"{heads} heads; calibrate it again"
            )
        known.add(path)
    if frequency.shape != (len(draft.paths),) or not _shares(frequency) or (np.diff(frequency) > 0).any():
        raise ValueError(
            f"{source} needs a frequency from 0 to 1 for each of {len(draft.paths)} paths, the highest first; "
            "calibrate it again"
        )
    if not isinstance(draft.nodes, int) or not 2 <= draft.nodes <= len(draft.paths) + 1:
        raise ValueError(
            f"{source} has a tree of {draft.nodes} nodes, but {len(draft.paths)} paths make 2 to "
            f"{len(draft.paths) + 1}; calibrate it again"
        )


def _shares(x: np.ndarray) -> bool:
    return bool(((x >= 0) & (x <= 1)).all())


def check_draft(
    draft,
    *,
    name: str,
    fingerprint: str,
    width: int,
    vocab_size: int,
    tokenizer: str,
    template_args: dict,
) -> None:
    """Does a draft of any method fit the target called `name`, with these fingerprints of weights and of tokenizer?

    Raises ValueError if width, vocabulary or tokenizer differ, since its guesses would mean nothing. Other weights
    (another precision of the same model has them, too) and template arguments make it guess worse: a line says so.
    """
    trained = draft.target
    own = trained.get("name", "another target")
    pairs = {
        "width": (draft.width, width),
        "vocabulary size": (trained.get("vocab_size", vocab_size), vocab_size),
        "tokenizer fingerprint": (trained.get("tokenizer", tokenizer), tokenizer),
    }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ValueError(
                f"the draft was trained for {own} with {what} {ours}, but {name} has {theirs}; train a draft for {name}"
            )
    if draft.token_ids is not None and draft.token_ids[-1] >= vocab_size:
        raise ValueError(
            f"the draft guesses token {draft.token_ids[-1]}, but {name} has {vocab_size} tokens; "
            f"train a draft for {name}"
        )
    if "fingerprint" not in trained:
        return
    if trained["fingerprint"] != fingerprint:
        say(
            f"warning: the draft was trained for {own} with weights {trained['fingerprint']}, but {name} has "
            f"{fingerprint}: the text stays the target's, fewer guesses may be right"
        )
    if draft.template_args != template_args:
        say(
            f"warning: the draft was trained with template arguments {draft.template_args}, but decoding uses "
            f"{template_args}: the text stays the target's, fewer guesses may be right"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
