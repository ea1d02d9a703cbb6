"""Folders in the Hugging Face layout: config.json, generation_config.json, safetensors whole or in shards."""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.loading.checkpoint import token_ids
from specjax.models.config import from_hf

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Integers and 8-bit floats are quantised in some way, and nothing here says which.
_DTYPES = ("F64", "F32", "F16", "BF16")


def read_json(path: Path) -> dict:
    """A JSON object from a file; raises FileNotFoundError or ValueError naming it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; a model folder needs it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} where a JSON object is needed")
    return value


class FolderCheckpoint:
    """One model folder; see `Checkpoint`."""

    def __init__(self, path: Path):
        """Raises ValueError or FileNotFoundError naming the file, field or tensor that is wrong."""
        self.path = path
        raw = read_json(path / "config.json")
        try:
            self.config = from_hf(raw)
        except ValueError as error:
            raise ValueError(f"{path / 'config.json'}: {error}") from error
        self._files = _open_tensors(path)
        slices = {name: file.get_slice(name) for name, file in self._files.items()}
        for name, piece in slices.items():
            if piece.get_dtype() not in _DTYPES:
                raise ValueError(f"{path}: tensor {name} has type {piece.get_dtype()}; use one of {', '.join(_DTYPES)}")
        self.shapes = {name: tuple(piece.get_shape()) for name, piece in slices.items()}
        ends = set(token_ids(raw.get("eos_token_id"), str(path / "config.json")))
        generation = path / "generation_config.json"
        if generation.exists():
            ends |= set(token_ids(read_json(generation).get("eos_token_id"), str(generation)))
        self.end_ids = tuple(sorted(ends))

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype."""
        return self._files[name].get_tensor(name)

    def first_row(self, name: str) -> np.ndarray:
        """The first row, or a whole vector."""
        return self._files[name].get_slice(name)[:1] if len(self.shapes[name]) > 1 else self.read(name)


def _open_tensors(path: Path) -> dict[str, safe_open]:
    """Tensor name -> open file that holds it. As in transformers, a single file goes before an index."""
    if (path / SINGLE).exists():
        file = _open(path / SINGLE)
        return dict.fromkeys(file.keys(), file)
    if (path / INDEX).exists():
        return _open_shards(path)
    found = sorted(p.name for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    if any(not name.endswith(".safetensors") for name in found):
        raise ValueError(f"{path} holds pickled weights ({found[0]}), which are never loaded; convert to safetensors")
    raise FileNotFoundError(f"{path} has neither {SINGLE} nor {INDEX} (weights found: {', '.join(found) or 'none'})")


def _open_shards(path: Path) -> dict[str, safe_open]:
    """Files and index have to agree in both directions."""
    index = read_json(path / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{path / INDEX} has no weight_map; download it again")
    names = sorted(set(index.values()))
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{path} lacks {', '.join(missing)}, which {INDEX} names; download the rest")
    files = {name: _open(path / name) for name in names}
    stored = {(tensor, name) for name, file in files.items() for tensor in file.keys()}
    for tensor, name in sorted(index.items() - stored):
        raise ValueError(f"{path / name} lacks tensor {tensor}, which {INDEX} places there; download both again")
    for tensor, name in sorted(stored - index.items()):
        raise ValueError(
            f"{path / name} holds tensor {tensor}, which {INDEX} does not place there; download both again"
        )
    return {tensor: files[name] for tensor, name in index.items()}


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); download it again") from error
