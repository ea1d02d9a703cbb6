"""What a target pass and a draft cost, measured: the table that says whether speculation can pay.

Costs are medians in milliseconds, measured at a grid of batch sizes, contexts (cache slots) and block sizes
(tokens per pass) in one environment; another device, dtype or target makes another table.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.telemetry import write_json

SCHEMA_VERSION = 1
HOW_TO_MEASURE = "python -m launch.costs --config=configs/smollm2.py --out=FILE"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def environment(mesh: jax.sharding.Mesh, dtype, target: str) -> dict[str, str | int]:
    """The fingerprint of what a cost depends on; `target` is the target's own fingerprint."""
    device = mesh.devices.flat[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cores": cores(),
        "mesh": ",".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
        "dtype": jnp.dtype(dtype).name,
        "jax": jax.__version__,
        "target": target,
    }


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Measured costs of one target in one environment.

    `passes` [(batch, context, block)]: milliseconds of a target pass, over a full grid that has block 1;
    `drafts` [method][(batch, context)]: milliseconds of a drafter's `draft`; `floor_ms`: the time that reading
    the weights once takes, `weight_bytes` over `bandwidth` (bytes per second); `cycles`: figures of whole
    decode loops by name.
    """

    environment: Mapping[str, str | int]
    passes: Mapping[tuple[int, int, int], float]
    drafts: Mapping[str, Mapping[tuple[int, int], float]]
    weight_bytes: int
    bandwidth: float
    cycles: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if set(self.passes) != set(itertools.product(self.batches, self.contexts, self.blocks)) or 1 not in self.blocks:
            raise ValueError("a cost table needs every block at every batch size and context, block 1 among them")

    @property
    def batches(self) -> list[int]:
        return sorted({batch for batch, _, _ in self.passes})

    @property
    def contexts(self) -> list[int]:
        return sorted({context for _, context, _ in self.passes})

    @property
    def blocks(self) -> list[int]:
        return sorted({block for _, _, block in self.passes})

    @property
    def floor_ms(self) -> float:
        return 1e3 * self.weight_bytes / self.bandwidth

    def target_ms(self, block: int, batch: int, context: int) -> float:
        """Milliseconds of a target pass over `block` tokens of each of `batch` rows with `context` cache slots.

        Linear between measured points along each axis, since bytes and operations grow linearly with each;
        see `_interpolate` for what lies outside.
        """

        def at(batch: int, context: int) -> float:
            return _interpolate(block, self.blocks, [self.passes[batch, context, known] for known in self.blocks])

        return self._between(at, batch, context)

    def draft_ms(self, method: str, batch: int, context: int) -> float:
        """Milliseconds of one draft. Raises ValueError if the method was not measured."""
        if method not in self.drafts:
            raise ValueError(f"the table has no draft of {method!r}; measure it: {HOW_TO_MEASURE} --methods={method}")
        known = self.drafts[method]
        return self._between(lambda batch, context: known[batch, context], batch, context)

    def break_even(self, block: int, batch: int, context: int, draft_ms: float = 0.0) -> float:
        """Tokens per cycle at which a draft of `block` tokens, made in `draft_ms`, is as fast as none. A cycle emits
        `block` tokens at most, so above `block` it can never pay."""
        return (self.target_ms(block, batch, context) + draft_ms) / self.target_ms(1, batch, context)

    def ceiling(self, batch: int, context: int) -> float:
        """The speed-up over eager with every token of the best block accepted and a draft that costs nothing."""
        return max(block / self.break_even(block, batch, context) for block in self.blocks)

    def last_paying_batch(self, context: int) -> int | None:
        """The largest measured batch size at which a perfect, free draft is faster than none; None: at no size."""
        return max((batch for batch in self.batches if self.ceiling(batch, context) > 1), default=None)

    def differences(self, here: Mapping[str, str | int]) -> list[str]:
        """How the environment of this table differs from `here`, field by field; empty if it does not."""
        return [f"{k} {self.environment.get(k)!r}, here {v!r}" for k, v in here.items() if self.environment.get(k) != v]

    def save(self, path: str | Path) -> None:
        """Write the table as JSON; the file is either the old one or whole."""
        first = self.batches[0], self.contexts[0]
        write_json(
            path,
            {
                "schema_version": SCHEMA_VERSION,
                "environment": dict(self.environment),
                "floor_ms": self.floor_ms,
                "target_ms": {str(block): self.passes[*first, block] for block in self.blocks},
                "weight_bytes": self.weight_bytes,
                "bandwidth_bytes_per_second": self.bandwidth,
                "passes": [
                    {"batch": batch, "context": context, "block": block, "ms": ms}
                    for (batch, context, block), ms in sorted(self.passes.items())
                ],
                "drafts": [
                    {"method": method, "batch": batch, "context": context, "ms": ms}
                    for method, known in self.drafts.items()
                    for (batch, context), ms in sorted(known.items())
                ],
                "cycles": dict(self.cycles),
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> "CostTable":
        """Read what `save` wrote. Raises FileNotFoundError, or ValueError if it is something else or broken."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"cost table {path} does not exist; measure one: {HOW_TO_MEASURE}")
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            version = found["schema_version"]
            drafts = {row["method"]: {} for row in found["drafts"]}
            for row in found["drafts"]:
                drafts[row["method"]][row["batch"], row["context"]] = float(row["ms"])
            table = cls(
                environment=dict(found["environment"]),
                passes={(row["batch"], row["context"], row["block"]): float(row["ms"]) for row in found["passes"]},
                drafts=drafts,
                weight_bytes=int(found["weight_bytes"]),
                bandwidth=float(found["bandwidth_bytes_per_second"]),
                cycles=dict(found["cycles"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is no cost table ({reason}); measure one: {HOW_TO_MEASURE}") from error
        if version != SCHEMA_VERSION:
            raise ValueError(f"{path} has schema_version {version}, not {SCHEMA_VERSION}; measure it again")
        return table

    def _between(self, at, batch: int, context: int) -> float:
        """`at(batch, context)` of the grid, interpolated over both."""
        along = [_interpolate(context, self.contexts, [at(b, c) for c in self.contexts]) for b in self.batches]
        return _interpolate(batch, self.batches, along)


def _interpolate(x: float, known: Sequence[int], costs: Sequence[float]) -> float:
    """Costs at `known` points (ascending) -> the cost at x, linear between neighbours.

    Below the first point it is the first cost: a pass never gets cheaper than its weights. Past the last it goes
    on with the last slope, never falling: clamped there, a large block or batch would look free. A single point
    says nothing of a slope and holds everywhere.
    """
    if x <= known[-1] or len(known) == 1:
        return float(np.interp(x, known, costs))
    slope = (costs[-1] - costs[-2]) / (known[-1] - known[-2])
    return costs[-1] + max(0.0, slope) * (x - known[-1])
