"""A loaded target: parameters flattened once, tokenizer, and what identifies it."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import sharding
from specjax.loading.target import default_target, fingerprint, load_parameters, open_checkpoint
from specjax.loading.tokenizer import Tokenizer, load_tokenizer
from specjax.models.config import ModelConfig
from specjax.models.transformer import Transformer
from specjax.telemetry import say

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Target:
    """Everything of a target that does not change while it decodes.

    `leaves` are its parameters as a flat list: a module costs milliseconds to take apart at each call.
    """

    name: str
    config: ModelConfig
    graph: nnx.GraphDef
    tree: jax.tree_util.PyTreeDef
    leaves: list[jax.Array]
    tokenizer: Tokenizer | None
    mesh: jax.sharding.Mesh
    dtype: jnp.dtype
    fingerprint: str

    def module(self, leaves: list[jax.Array]) -> Transformer:
        """The model around these leaves; call it inside a traced function."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))

    def put(self, x: np.ndarray, dtype, *axes: str | None) -> jax.Array:
        """A host array on the mesh, split along the named axes."""
        return jax.device_put(np.asarray(x, dtype), jax.NamedSharding(self.mesh, sharding.spec(*axes)))

    @property
    def embed(self) -> jax.Array:
        """The embedding [V', D] itself, not a copy."""
        return self._parameter("embed")

    @property
    def norm(self) -> jax.Array:
        """Scale [D] of the final norm."""
        return self._parameter("norm")

    @property
    def lm_head(self) -> jax.Array:
        """The head [V', D] itself, not a copy: the embedding where the two are tied."""
        return self._parameter("embed" if self.config.tied else "lm_head")

    def _parameter(self, name: str) -> jax.Array:
        return jax.tree.unflatten(self.tree, self.leaves)[name].get_value()


def load_target(path: str | Path | None = None, *, mesh: str = "", dtype: str = "float32", tokenizer=None) -> Target:
    """Open a Hugging Face folder or GGUF file (default: the installed SmolLM2) and place it on a mesh.

    Raises ValueError or FileNotFoundError in one sentence if something does not fit.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; choose {' or '.join(DTYPES)}")
    grid = sharding.make_mesh(mesh)
    checkpoint = open_checkpoint(path or default_target())
    words = load_tokenizer(checkpoint, tokenizer)
    say_padding(checkpoint.config, grid)
    graph, state = declare(checkpoint.config, grid, DTYPES[dtype])
    state = load_parameters(checkpoint, state, grid)
    name = checkpoint.path.stem if checkpoint.path.is_file() else checkpoint.path.name
    return from_state(name, checkpoint.config, graph, state, words, grid, DTYPES[dtype], fingerprint(checkpoint))


def declare(config: ModelConfig, mesh: jax.sharding.Mesh, dtype) -> tuple[nnx.GraphDef, nnx.State]:
    """Shapes, dtypes and shardings of all parameters on `mesh`; nothing is allocated."""
    with jax.set_mesh(mesh):
        return nnx.split(jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=dtype)))


def say_padding(config: ModelConfig, mesh: jax.sharding.Mesh) -> None:
    """A line for each dimension that the mesh does not divide."""
    sizes = {"kv_heads": config.kv_heads, "mlp": config.mlp_width, "vocab": config.vocab_size}
    with jax.set_mesh(mesh):
        for axis, size in sizes.items():
            if (wide := sharding.padded(size, axis)) != size:
                devices = sharding.axis_size(axis)
                say(f"{axis}: {size} does not divide over {devices} devices; padded with zeros to {wide}")


def from_state(name, config, graph, state, tokenizer, mesh, dtype, fingerprint) -> Target:
    """A Target around a filled parameter tree."""
    leaves, tree = jax.tree.flatten(state)
    return Target(name, config, graph, tree, leaves, tokenizer, mesh, dtype, fingerprint)
