"""GGUF files: metadata -> config, tensors dequantised and brought to Hugging Face names and row order."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from specjax.loading.checkpoint import token_ids
from specjax.models.config import ModelConfig, from_hf

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral models are stored as llama
QUANTISATIONS = (
    Kind.F32, Kind.F16, Kind.BF16,
    Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1,
    Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
)  # fmt: skip

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"

# `<architecture>.<key>` -> field of a config.json. `rope.scaling.*` and the checks are in `_config`.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_CHECKED = {"rope.scaling.type", "rope.dimension_count", "attention.value_length"}
_NEUTRAL = {
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.finetuned": (True,),
    "rope.scale_linear": (1.0,),
}


class GgufCheckpoint:
    """One GGUF file; see `Checkpoint`. `metadata` holds the file's keys, for the tokenizer."""

    def __init__(self, path: Path):
        """Raises ValueError on a file that is no whole GGUF file or holds a model that is not supported."""
        self.path = path
        reader = _open(path)
        self.metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        unsupported = sorted({t.tensor_type.name for t in reader.tensors if t.tensor_type not in QUANTISATIONS})
        if unsupported:
            known = ", ".join(kind.name for kind in QUANTISATIONS)
            raise ValueError(
                f"{path} holds {', '.join(unsupported)} tensors, which are not supported; use one of {known}"
            )
        divisors = tensors.pop(_ROPE_DIVISORS, None)
        self._tensors = {_hf_name(name): tensor for name, tensor in tensors.items()}
        # GGUF lists dimensions fastest first.
        self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}
        self.config = _config(path, self.metadata, self.shapes)
        if divisors is not None:
            self.config = _with_divisors(path, self.config, divisors.data)
        ends = [self.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        self.end_ids = token_ids(sorted({i for i in ends if i is not None}), str(path))

    def read(self, name: str) -> np.ndarray:
        """The dequantised tensor, rows in Hugging Face order."""
        tensor = self._tensors[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        heads = self._interleaved_heads(name)
        return _half_split(values, heads) if heads else values

    def first_row(self, name: str) -> np.ndarray:
        """The first row; reordering within a head leaves it in place."""
        tensor = self._tensors[name]
        return gguf.dequantize(tensor.data[:1] if tensor.data.ndim > 1 else tensor.data, tensor.tensor_type)

    def _interleaved_heads(self, name: str) -> int:
        """How many heads of a query or key tensor are stored in interleaved order; 0 for all other tensors.

        The file does not say: it is a convention of the converter for the architecture `llama` alone.
        """
        if self.metadata["general.architecture"] != "llama":
            return 0
        if ".q_proj." in name:
            return self.config.heads
        return self.config.kv_heads if ".k_proj." in name else 0


def _open(path: Path) -> gguf.GGUFReader:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is no GGUF file: it starts with {magic!r} instead of b'GGUF'")
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); download it again") from error
    if reader.byte_order == "S":
        raise ValueError(f"{path} has the other byte order; convert it with gguf-py's gguf-convert-endian")
    return reader


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    layer, stem, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(.*?)(?:\.(weight|bias))?", name).groups()
    if stem not in _NAMES or kind is None:
        return name
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{_NAMES[stem]}.{kind}"


def _half_split(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved order (0, H/2, 1, H/2 + 1, ...) to half-split order (0, 1, ...)."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _config(path: Path, metadata: Mapping, shapes: Mapping) -> ModelConfig:
    """The file's metadata as config.json fields, so that both formats pass the same checks."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{path} has architecture {architecture!r}; only {', '.join(ARCHITECTURES)} are supported")
    if metadata.get("split.count", 0) > 1:
        raise ValueError(f"{path} is one of {metadata['split.count']} parts; merge them with llama-gguf-split --merge")
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    _refuse_unsupported(path, prefix, values)
    fields = {field: values[key] for key, field in _FIELDS.items() if key in values}
    window = fields.pop("sliding_window", 0) or None
    if window and architecture != "llama":
        raise ValueError(f"{path} does not say which layers its sliding window of {window} covers; use safetensors")
    fields["model_type"] = architecture if window is None else "mistral"
    if window:
        fields["sliding_window"] = window
    fields.setdefault("vocab_size", shapes.get("model.embed_tokens.weight", (0,))[0])
    fields["tie_word_embeddings"] = "lm_head.weight" not in shapes
    fields["rope_scaling"] = _scaling(values)
    if "rms_norm_eps" in fields:  # stored in float32; 1e-5 shall not become 9.99999974e-06
        fields["rms_norm_eps"] = float(str(np.float32(fields["rms_norm_eps"])))
    try:
        config = from_hf(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, config.head_dim) != config.head_dim:
            raise ValueError(
                f"{path} has {prefix}{key} = {values[key]} where the head size {config.head_dim} is needed"
            )
    return config


def _refuse_unsupported(path: Path, prefix: str, values: Mapping) -> None:
    for key, value in values.items():
        if isinstance(value, list):
            raise ValueError(f"{path} has {prefix}{key} = one value a layer, which is not supported")
        known = key in _FIELDS or key in _SCALING or key in _CHECKED
        if not known and value and value not in _NEUTRAL.get(key, ()):
            raise ValueError(f"{path} has {prefix}{key} = {value!r}, which may change the result and is not supported")


def _scaling(values: Mapping) -> dict | None:
    """`rope.scaling.*` -> rope_scaling of a config.json; to llama.cpp a factor without a type is linear."""
    factor = values.get("rope.scaling.factor")
    kind = values.get("rope.scaling.type", "linear" if factor else "none")
    if kind == "none":
        return None
    fields = {field: values[key] for key, field in _SCALING.items() if values.get(key)}
    if kind == "linear":  # the other keys are yarn's, and llama.cpp does not look at them
        fields = {"factor": fields.get("factor", 1.0)}
    return {"rope_type": kind} | fields


def _with_divisors(path: Path, config: ModelConfig, divisors: np.ndarray) -> ModelConfig:
    """`rope_freqs.weight`: each frequency's divisor, which is how converters write llama3 scaling."""
    if config.rope.kind != "default":
        raise ValueError(
            f"{path} has both {_ROPE_DIVISORS} and rope scaling {config.rope.kind!r}; only one is supported"
        )
    values = tuple(float(v) for v in divisors.ravel())
    if len(values) != config.head_dim // 2:
        raise ValueError(f"{path} has {len(values)} values in {_ROPE_DIVISORS}; {config.head_dim // 2} are needed")
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, kind="divided", divisors=values))
