"""Medusa heads: what trains them and how they are stored and tried."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import trees
from specjax.drafters.medusa import from_draft
from specjax.loading.drafts import MedusaDraft, save_draft
from specjax.models.medusa import MedusaHeads
from specjax.trees import Path
from train_drafts.tasks.base import Task

SHAPES: dict[str, tuple[Path, ...]] = {
    "chain": ((0,), (0, 0), (0, 0, 0)),
    "tree": ((0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa(Task):
    """Medusa-1 (Cai et al. 2024, arXiv 2401.10774): `heads` of `layers` residual blocks, the target frozen; head i
    learns guess i from the hidden state of token t."""

    heads: int = 4
    layers: int = 1
    loss: str = "ce"
    scale: float = 0.2

    spans = True
    save = staticmethod(save_draft)

    def __post_init__(self):
        super().__post_init__()
        if self.heads < 1 or self.layers < 1:
            raise ValueError(
                f"heads {self.heads} and layers {self.layers} make no Medusa heads; give 1 or more of each"
            )

    @property
    def guesses(self):
        return self.heads

    def taps(self, config):
        return (config.layers,)

    def outputs(self, draft, target, batch, states, key=None):
        return draft(target.normed(states[:, :, -1]))

    def export(self, params, token_ids, target, about: Mapping[str, Any]) -> MedusaDraft:
        """Not calibrated yet: a chain."""
        host = {name: np.asarray(value.get_value()) for name, value in params.items()}
        chain = trees.chain(self.heads)
        return MedusaDraft(
            weight=host["weight"],
            bias=host["bias"],
            lm_head=host["lm_head"][: self.draft_vocab] if self.draft_vocab else None,
            token_ids=token_ids,
            accuracy=np.zeros((self.heads, 1)),
            paths=chain,
            frequency=np.zeros(len(chain)),
            nodes=len(chain) + 1,
            **about,
        )

    def drafters(self, draft, target):
        """As far as the heads reach."""
        fitting = {name: tuple(path for path in shape if len(path) <= self.heads) for name, shape in SHAPES.items()}
        return {name: from_draft(draft, paths, target) for name, paths in fitting.items()}

    def _fresh(self, config) -> MedusaHeads:
        return MedusaHeads(
            config.width,
            heads=self.heads,
            layers=self.layers,
            draft_vocab=self._rows or None,
            rngs=nnx.Rngs(0),
            dtype=jnp.float32,
        )
