"""Tiny random checkpoints: Hugging Face folders written by transformers, and the same as GGUF files."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.loading.gguf import GgufCheckpoint
from specjax.loading.target import default_target, open_checkpoint

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # times 4 heads: twice the width
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,  # large enough for attention to matter
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@functools.cache
def smollm2() -> GgufCheckpoint:
    """The default target, opened once; skips the test where it is not installed."""
    try:
        return open_checkpoint(default_target())
    except FileNotFoundError as error:
        pytest.skip(str(error))


def reference_model(family: str, fields: Mapping):
    """A random transformers model of `family`; norms and biases are random too, so none can be swapped."""
    torch = pytest.importorskip("torch", reason="torch is a test extra: pip install torch")
    transformers = pytest.importorskip("transformers", reason="transformers is a test extra: pip install transformers")
    config = transformers.AutoConfig.for_model(family, **(TINY | dict(fields)))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.3)
    return model


def save_folder(folder: Path, family: str = "llama", fields: Mapping = {}, shard_size: str = "1GB") -> Path:
    """A checkpoint folder as transformers writes it."""
    reference_model(family, fields).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def edit_json(path: Path, changes: Mapping) -> None:
    """Set fields of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | dict(changes)
    path.write_text(json.dumps({key: field for key, field in value.items() if field is not None}))


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows as llama.cpp's converter stores them for the architecture llama.

    Within each head row j of the first half and row j of the second half become neighbours, because its
    rotary code turns pairs (2j, 2j + 1) instead of (j, j + H/2).
    """
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, stem = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_GGUF_NAMES[stem]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def save_gguf(
    path: Path,
    folder: Path,
    architecture: str = "llama",
    *,
    metadata: Mapping = {},
    tensors: Mapping = {},
    kinds: Mapping = {},
) -> Path:
    """The folder's tensors as a GGUF file, F32 unless `kinds` names another type for a tensor.

    `metadata`: further keys without the architecture prefix (int, float, str or a list; None leaves one of
    the usual out). `tensors`: further arrays by GGUF name, stored as they are: float32, or bytes of `kinds`.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    usual = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": 10000.0,
        "rope.dimension_count": config["head_dim"],
    }
    for key, value in (usual | dict(metadata)).items():
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
        }
        if value is not None:
            add.get(type(value), writer.add_array)(
                key if key.startswith("tokenizer.") else f"{architecture}.{key}", value
            )
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, value in load_file(folder / "model.safetensors").items():
        projection = name.split(".")[-2]
        if architecture == "llama" and projection in heads:
            value = interleaved(value, heads[projection])
        kind = kinds.get(gguf_name(name), gguf.GGMLQuantizationType.F32)
        writer.add_tensor(gguf_name(name), gguf.quantize(value.astype(np.float32), kind), raw_dtype=kind)
    for name, value in tensors.items():
        writer.add_tensor(name, value, raw_dtype=kinds.get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
