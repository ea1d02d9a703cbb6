"""Rotary position frequencies: the plain ones and the scalings that open checkpoints use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# Fields of each kind in a config: needed, then optional. Any other field that is set is refused.
_FIELDS = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        (),
        (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "truncate",
        ),
    ),
}
_HARMLESS = {"type", "rope_type", "finetuned", "max_position_embeddings"}


@dataclass(frozen=True)
class Rope:
    """One set of rotary frequencies for all layers.

    `attention_factor` multiplies cosines and sines (1 except for yarn). `kind` "divided" is how GGUF files
    store llama3 scaling: one divisor a frequency, in `divisors`.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()

    def __post_init__(self):
        if self.kind not in (*_FIELDS, "divided"):
            raise ValueError(f"rope type {self.kind!r} is not supported; use one of {', '.join(_FIELDS)}")
        if not self.theta > 0 or not self.factor > 0:
            raise ValueError(f"rope theta {self.theta} and factor {self.factor} have to be above zero")
        if self.kind in ("llama3", "yarn") and self.original_context < 1:
            raise ValueError(f"rope type {self.kind} needs original_max_position_embeddings above zero")
        if self.kind == "llama3" and not self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"rope low_freq_factor {self.low_frequency_factor} has to be below high_freq_factor "
                f"{self.high_frequency_factor}"
            )

    @classmethod
    def from_hf(cls, theta: float, fields: Mapping, *, original: int | None, max_context: int) -> "Rope":
        """`fields` of rope_scaling or rope_parameters (without theta) -> Rope.

        `original`: the config's own original_max_position_embeddings, which wins as in transformers.
        Raises ValueError naming an unsupported type, a missing field or a field that the type does not have.
        """
        kind = fields.get("rope_type") or fields.get("type") or "default"
        if fields.get("type") not in (None, kind):
            raise ValueError(f"rope type is {fields['type']!r} and rope_type {kind!r}; keep the right one")
        if kind not in _FIELDS:
            raise ValueError(f"rope type {kind!r} is not supported; use one of {', '.join(_FIELDS)}")
        needed, optional = _FIELDS[kind]
        for key, value in fields.items():
            neutral = value is None or (key == "partial_rotary_factor" and value == 1)
            if key not in needed + optional and key not in _HARMLESS and not neutral:
                raise ValueError(f"rope field {key} = {value!r} is not supported with rope type {kind!r}")
        for key in needed:
            if fields.get(key) is None:
                raise ValueError(f"rope type {kind!r} needs {key}")
        if kind == "default":
            return cls(theta)
        if kind == "linear":
            return cls(theta, kind, factor=float(fields["factor"]))
        context = original or fields.get("original_max_position_embeddings") or max_context
        if kind == "llama3":
            low, high = float(fields["low_freq_factor"]), float(fields["high_freq_factor"])
            return cls(theta, kind, float(fields["factor"]), low, high, context)
        factor = float(fields.get("factor") or max_context / context)
        attention = fields.get("attention_factor")
        if attention is None:
            attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return cls(
            theta,
            kind,
            factor,
            original_context=context,
            beta_fast=float(fields.get("beta_fast") or 32),
            beta_slow=float(fields.get("beta_slow") or 1),
            attention_factor=float(attention),
            truncate=fields.get("truncate") is not False,
        )

    def as_hf(self) -> dict:
        """The fields of a config.json that `from_hf` reads back. Raises ValueError for a GGUF file's divisors."""
        if self.kind == "divided":
            raise ValueError(
                "rope divisors of a GGUF file have no fields in a config.json; use the Hugging Face folder"
            )
        fields = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            fields |= {"low_freq_factor": self.low_frequency_factor, "high_freq_factor": self.high_frequency_factor}
        if self.kind == "yarn":
            names = ("beta_fast", "beta_slow", "attention_factor", "truncate")
            fields |= {name: getattr(self, name) for name in names}
        if self.original_context:
            fields["original_max_position_embeddings"] = self.original_context
        return {"rope_theta": self.theta} | ({} if self.kind == "default" else {"rope_scaling": fields})

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Inverse frequencies [H/2], float32."""
        plain = self.theta ** -(np.arange(0, head_dim, 2) / head_dim)
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "llama3":
            plain = self._llama3(plain)
        elif self.kind == "yarn":
            plain = self._yarn(plain, head_dim)
        elif self.kind == "divided":
            if len(self.divisors) != len(plain):
                raise ValueError(f"{len(self.divisors)} rope divisors are given for {len(plain)} frequencies")
            plain = plain / np.array(self.divisors)
        return plain.astype(np.float32)

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        """Low frequencies divided by `factor`, high ones kept, those between interpolated by wavelength."""
        turns = self.original_context * plain / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return plain * (kept + (1 - kept) / self.factor)

    def _yarn(self, plain: np.ndarray, head_dim: int) -> np.ndarray:
        """As llama3, but interpolated by the frequency's index between two numbers of turns."""

        def index(turns: float) -> float:
            return head_dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        divided = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        return plain * (1 - divided + divided / self.factor)
