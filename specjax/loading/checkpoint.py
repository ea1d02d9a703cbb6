"""What every checkpoint format offers to the rest of the library."""

from pathlib import Path
from typing import Protocol

import numpy as np

from specjax.models.config import ModelConfig


class Checkpoint(Protocol):
    """A target on disk. Tensor names and layouts are those of Hugging Face, whatever the file's own are.

    `shapes` lists every tensor; `end_ids` are the end tokens that the model's own files name (the
    tokenizer may add more). Opening reads headers only.
    """

    path: Path
    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    end_ids: tuple[int, ...]

    def read(self, name: str) -> np.ndarray:
        """The whole tensor, in its stored float type or float32 where it is quantised."""
        ...

    def first_row(self, name: str) -> np.ndarray:
        """`read(name)[:1]` (a vector: all of it) without reading the rest."""
        ...


def token_ids(value: int | list[int] | None, source: str) -> tuple[int, ...]:
    """The `eos_token_id` of a config, an id or a list of ids or nothing -> ids.

    Raises ValueError naming `source` if it is anything else.
    """
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"eos_token_id in {source} is {value!r}; an id or a list of ids is needed")
    return ids
