"""The mesh and the one table from logical axes to mesh axes.

Every array in specjax names its dimensions logically ("batch", "kv_heads", ...); this file alone knows
which mesh axis, if any, each of them is split over. Meshes use JAX's explicit-sharding mode, so a
dimension that is split where an operation does not expect it fails at trace time instead of being
gathered in silence.
"""

import math

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

AXES = ("data", "model")
RULES = {"batch": "data", "kv_heads": "model", "mlp": "model", "vocab": "model"}


def parse_mesh(text: str) -> dict[str, int]:
    """`"data=2,model=4"` -> `{"data": 2, "model": 4}`; an axis left out has size 1.

    Raises ValueError on an unknown axis or a size that is no positive integer.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name.strip() not in sizes or not size.strip().isdigit() or int(size) < 1:
            raise ValueError(
                f"mesh part {part!r} is not AXIS=SIZE with an axis of {', '.join(AXES)}; try data=1,model=4"
            )
        sizes[name.strip()] = int(size)
    return sizes


def make_mesh(text: str = "", devices=None) -> Mesh:
    """A mesh of axes `data` and `model` over the first devices that it needs (default: one device).

    Raises ValueError if there are fewer devices than the mesh has places.
    """
    sizes = parse_mesh(text)
    devices = jax.devices() if devices is None else devices
    need = math.prod(sizes.values())
    if need > len(devices):
        raise ValueError(
            f"mesh {text!r} needs {need} devices and {len(devices)} are here; choose sizes whose product fits"
        )
    grid = np.array(devices[:need]).reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def spec(*axes: str | None) -> P:
    """Logical axis names (None: not split) -> PartitionSpec under the current rules."""
    return P(*(RULES.get(axis) for axis in axes))


def row_spec(rank: int) -> P:
    """The split of an array that leads with B and is whole otherwise."""
    return spec("batch", *[None] * (rank - 1))


def axis_size(axis: str) -> int:
    """How many devices the current mesh splits this logical axis over."""
    return jax.sharding.get_abstract_mesh().shape.get(RULES.get(axis), 1)


def padded(size: int, axis: str) -> int:
    """`size` rounded up to a multiple of the mesh axis: what a dimension is declared as.

    The surplus rows hold zeros (padded attention groups and MLP rows contribute nothing) or are masked
    (padded vocabulary), so results do not change.
    """
    return -(-size // axis_size(axis)) * axis_size(axis)


def unsplit_rows(x: jax.Array) -> jax.Array:
    """x [B, ...] with all its rows on every device, its other dimensions split as before."""
    return jax.reshard(x, P(None, *jax.typeof(x).sharding.spec[1:]))


def rowwise(function):
    """`function` with compiler-chosen partitioning inside; every array it returns leads with B and is split by rows.

    For code that only gathers and compares within a row, where naming the split of each intermediate would say nothing.
    """
    return jax.sharding.auto_axes(function, out_sharding=spec("batch"))


def whole(x: jax.Array) -> jax.Array:
    """Inside `rowwise`: x [B, ...] split by rows alone, whatever it was split by before."""
    return x if jax.sharding.get_abstract_mesh().empty else lax.with_sharding_constraint(x, row_spec(x.ndim))
