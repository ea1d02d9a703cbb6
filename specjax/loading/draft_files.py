"""The folder of a draft of any method: config.json and one file of weights, written so that two saves never mix."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from specjax.telemetry import write_json

CONFIG, SCHEMA_VERSION = "config.json", 1
SCALE = ".scale"  # tensor NAME in int8 has float32 NAME.scale beside it, one number for each row
_FLOATS = ("float32", "float16", "bfloat16")


def locate(folder: str | Path) -> Path:
    """The folder of a draft, which may be the one called `draft` in a training work directory. Raises
    FileNotFoundError if there is none."""
    folder = Path(folder).expanduser()
    folder = folder / "draft" if (folder / "draft").is_dir() else folder
    if not folder.is_dir():
        raise FileNotFoundError(f"draft {folder} does not exist; give a folder that training wrote")
    return folder


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file, those in int8 as the float32 that they stand for. Raises FileNotFoundError if it is
    missing, ValueError if it is damaged."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; a draft needs it, pickled weights (.pt, .bin) are never loaded")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); download or train it again") from error
    scales = {name.removesuffix(SCALE): tensors.pop(name) for name in list(tensors) if name.endswith(SCALE)}
    for name, scale in scales.items():
        if name not in tensors or tensors[name].shape[:-1] != scale.shape:
            raise ValueError(f"{path}: {name}{SCALE} has no tensor that it fits; download or train it again")
        tensors[name] = tensors[name].astype(np.float32) * scale[..., None]
    return tensors


def check_float(path: Path, name: str, value: np.ndarray, maps: Collection[str]) -> None:
    """Raises ValueError if a tensor is no float, unless it is one of the vocabulary's `maps`."""
    if name not in maps and value.dtype.name not in _FLOATS:
        raise ValueError(f"{path}: tensor {name} has type {value.dtype}; use float32, float16 or bfloat16")


def write(folder: Path, file: str, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], *, int8: bool) -> None:
    """Write weights as `file`, and the config. `int8`: float matrices become int8 with a scale for each row, a quarter
    of float32.

    All is written beside first; while the files are moved into place the folder has no config, so that weights and
    config of two saves never meet. Raises OSError if it cannot be written.
    """
    fresh_weights, fresh_config = folder / f".{file}", folder / f".{CONFIG}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        whole = {name: np.ascontiguousarray(value) for name, value in (_in_int8(tensors) if int8 else tensors).items()}
        save_file(whole, fresh_weights, metadata={"format": "pt"})
        os.chmod(fresh_weights, 0o644)  # safetensors' own files are for the user alone
        write_json(fresh_config, config)
    except (OSError, SafetensorError) as error:
        fresh_weights.unlink(missing_ok=True)
        raise OSError(f"draft {folder} could not be written ({error}); make room there and save again") from error
    (folder / CONFIG).unlink(missing_ok=True)
    os.replace(fresh_weights, folder / file)
    os.replace(fresh_config, folder / CONFIG)


def _in_int8(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    packed = {}
    for name, value in tensors.items():
        if value.ndim < 2 or value.dtype.name not in _FLOATS:
            packed[name] = value
            continue
        wide = value.astype(np.float32)
        scale = np.maximum(np.abs(wide).max(-1), np.finfo(np.float32).tiny) / 127
        packed |= {name: np.rint(wide / scale[..., None]).astype(np.int8), name + SCALE: scale}
    return packed
