"""EAGLE drafts on disk: config.json and model.safetensors, in whichever layout a trainer wrote them.

EAGLE-3   SafeAILab, SpecForge: midlayer.*, fc, norm, lm_head, d2t, t2d; this is also what specjax writes
          vLLM speculators, ModelOpt: layers.0.* for midlayer.*; speculators nest the layer's config
EAGLE-1   layers.0.* without an input norm, fc over [embedding, state]; the LM head is the target's
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.loading import draft_files
from specjax.loading.draft_files import CONFIG, SCHEMA_VERSION, check_float, locate, read_tensors
from specjax.loading.huggingface import SINGLE, read_json
from specjax.loading.target import Part, decoder_layer, whole
from specjax.models.config import from_hf
from specjax.models.eagle import EagleConfig

LAYER = "midlayer."
EMBED, LM_HEAD, OFFSETS, KEPT = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
# What a layer's shapes and constants are read from; the rest of its config is about training or serving.
_LAYER_FIELDS = (
    "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_key_value_heads", "original_max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_scaling",
    "rope_theta", "vocab_size",
)  # fmt: skip
_REFUSED = {
    "input_norm.weight": "a norm over all fused states (norm_before_fc)",
    "mask_hidden": "parallel drafting (P-EAGLE)",
    "embedding_layernorm.weight": "HASS's extra norms",
    "hidden_states_layernorm.weight": "HASS's extra norms",
}


@dataclass(frozen=True)
class EagleDraft:
    """An EAGLE layer and all that decoding has to know of it.

    tensors: by the names of the midlayer layout, each [out, in]; embedding: [V, W] where the layer is not as wide as
    the target, which then cannot lend its own; token_ids: int32 [V_d], ascending target ids of the own LM head.
    taps: the target states that are fused, state i being what enters layer i (None: 2, half of the layers, and the
    third from the end, as SafeAILab's trainer takes them). target, template_args, training: as in `MedusaDraft`.
    """

    config: EagleConfig
    tensors: Mapping[str, np.ndarray]
    embedding: np.ndarray | None
    token_ids: np.ndarray | None
    taps: tuple[int, ...] | None
    target: dict
    template_args: dict
    training: dict

    @property
    def width(self) -> int:
        """Width of the target that it reads from."""
        return self.config.target_width

    def taps_among(self, layers: int) -> tuple[int, ...]:
        """The states that are fused, of a target of so many layers."""
        return self.taps or (2, layers // 2, layers - 3)


def load_eagle(folder: str | Path) -> EagleDraft:
    """A draft folder in any of the layouts, or a training work directory that holds one as `draft` -> draft.

    Raises FileNotFoundError or ValueError in one sentence naming the file and the field or tensor that is wrong."""
    folder = locate(folder)
    raw, path = read_json(folder / CONFIG), folder / SINGLE
    tensors = _read(path)
    section = _section(raw, folder / CONFIG)
    layer_fields = raw.get("transformer_layer_config", raw)
    try:
        config = _config(raw, layer_fields, tensors, section)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    embedding = tensors.pop(EMBED, None)
    if config.layer.width == config.target_width:
        embedding = None  # a copy of the target's, which is used instead
    elif embedding is None:
        raise ValueError(f"{path} lacks tensor {EMBED}, and the target's does not fit a layer of {config.layer.width}")
    token_ids = _token_ids(tensors, config, layer_fields["vocab_size"], path)
    _check_shapes(tensors, config, path)
    known = {"width": config.target_width, "vocab_size": layer_fields["vocab_size"]}
    return EagleDraft(
        config,
        tensors,
        embedding,
        token_ids,
        _taps(raw, config, section, folder / CONFIG),
        section.get("target", known),
        section.get("template_args", {}),
        section.get("training", {}),
    )


def parts(config: EagleConfig) -> dict[tuple, tuple[Part, ...]]:
    """For each parameter of an `EagleLayer`, by its path in the tree, the tensors it is made of."""
    layer, width, own = config.layer, config.layer.width, config.target_width
    joined = 2 * width
    table = decoder_layer(layer, LAYER, joined if config.states else width)
    if config.states:
        fused = config.states * own
        table |= {
            ("fc",): (whole("fc.weight", width, fused),),
            ("embed_norm",): (whole(f"{LAYER}input_layernorm.weight", width),),
            ("hidden_norm",): (whole(f"{LAYER}hidden_norm.weight", width),),
            ("norm",): (whole("norm.weight", width),),
        }
    else:
        table["fc",] = (whole("fc.weight", width, joined),)
    if config.fc_bias:
        table["fc_bias",] = (whole("fc.bias", width),)
    if config.state_norms:
        norms = [Part(f"fc_norm.{i}.weight", (own,), (own,), (i,)) for i in range(config.states)]
        table["state_norms",] = tuple(norms)
    if config.draft_vocab:
        shape = (config.draft_vocab, width)
        table["lm_head",] = (Part(LM_HEAD, shape, shape, (slice(config.draft_vocab),)),)
    return table


def save_eagle(folder: str | Path, draft: EagleDraft, *, int8: bool = False) -> None:
    """Write the draft in the midlayer layout; `int8`: a quarter as large, for specjax alone.

    Raises OSError if it cannot be written.
    """
    folder, tensors = Path(folder).expanduser(), dict(draft.tensors)
    vocab_size = draft.config.layer.vocab_size
    if draft.embedding is not None:
        tensors[EMBED] = draft.embedding
    if draft.token_ids is not None:
        kept = np.zeros(vocab_size, bool)
        kept[draft.token_ids] = True
        tensors |= {OFFSETS: draft.token_ids.astype(np.int64) - np.arange(len(draft.token_ids)), KEPT: kept}
    draft_files.write(folder, SINGLE, tensors, _as_json(draft), int8=int8)


def _as_json(draft: EagleDraft) -> dict[str, Any]:
    config, layer = draft.config, draft.config.layer
    return {
        "architectures": ["LlamaForCausalLMEagle3" if config.states else "LlamaForCausalLMEagle"],
        "model_type": layer.family,
        "num_hidden_layers": 1,
        "hidden_size": layer.width,
        "intermediate_size": layer.mlp_width,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "max_position_embeddings": layer.max_context,
        "rms_norm_eps": layer.norm_eps,
        **layer.rope.as_hf(),
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": config.draft_vocab or layer.vocab_size,
        "target_hidden_size": config.target_width,
        "tie_word_embeddings": False,
        "bias": config.fc_bias,
        "fc_norm": config.state_norms,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
        "specjax": {
            "schema_version": SCHEMA_VERSION,
            "method": "eagle",
            "layer_id_convention": "state i enters layer i",
            "taps": draft.taps,
            "target": draft.target,
            "template_args": draft.template_args,
            "training": draft.training,
        },
    }


def _read(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file by their names in the midlayer layout."""
    tensors = {}
    for name, value in read_tensors(path).items():
        name = name.removeprefix("model.")
        name = LAYER + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
        if name in _REFUSED:
            raise ValueError(f"{path} has {name}: {_REFUSED[name]} is not supported")
        check_float(path, name, value, (OFFSETS, KEPT))
        tensors[name] = value
    return tensors


def _section(raw: Mapping[str, Any], source: Path) -> Mapping[str, Any]:
    section = raw.get("specjax", {})
    if section and section.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{source} has schema_version {section.get('schema_version')!r} where {SCHEMA_VERSION} is read; "
            "use the specjax that wrote it"
        )
    return section


def _config(raw: Mapping, layer_fields: Mapping, tensors: Mapping[str, np.ndarray], section: Mapping) -> EagleConfig:
    """The variant: the tensors say most of it, since configs of older trainers do not."""
    if (layers := layer_fields.get("num_hidden_layers", 1)) != 1:
        raise ValueError(f"num_hidden_layers is {layers}; drafts of one layer are supported")
    if layer_fields.get("attention_bias") or layer_fields.get("mlp_bias"):
        raise ValueError("attention_bias or mlp_bias is on, which is not supported")
    family = "qwen3" if f"{LAYER}self_attn.q_norm.weight" in tensors else "llama"
    fields = {name: layer_fields[name] for name in _LAYER_FIELDS if name in layer_fields}
    layer = from_hf(fields | {"model_type": family, "num_hidden_layers": 1})
    for name in (f"{LAYER}self_attn.q_proj.weight", "fc.weight"):
        if name not in tensors:
            raise ValueError(f"the weights lack tensor {name}; this is no EAGLE draft")
    fused = tensors[f"{LAYER}self_attn.q_proj.weight"].shape[1] == 2 * layer.width
    target_width = raw.get("target_hidden_size") or layer.width
    states = tensors["fc.weight"].shape[1] // target_width if fused else 0
    return EagleConfig(
        layer=layer,
        target_width=target_width,
        states=states,
        draft_vocab=len(tensors[LM_HEAD]) if LM_HEAD in tensors else None,
        fc_bias="fc.bias" in tensors,
        state_norms="fc_norm.0.weight" in tensors,
        norm_output=bool(raw.get("norm_output", False)),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
    )


def _token_ids(tensors: dict, config: EagleConfig, vocab_size: int, path: Path) -> np.ndarray | None:
    """Removes the draft vocabulary's maps from `tensors` -> ascending target ids [V_d]; None for the whole one."""
    offsets, kept = tensors.pop(OFFSETS, None), tensors.pop(KEPT, None)
    if config.draft_vocab is None or (offsets is None and config.draft_vocab == vocab_size):
        return None
    if offsets is None:
        raise ValueError(
            f"{path} lacks tensor {OFFSETS}, without which {config.draft_vocab} of {vocab_size} tokens have no ids; "
            "download or train it again"
        )
    ids = np.arange(len(offsets)) + offsets  # a draft id's target id, less the draft id
    if len(ids) != config.draft_vocab or (np.diff(ids) <= 0).any() or not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise ValueError(
            f"{path}: {OFFSETS} does not give {config.draft_vocab} ascending ids of {vocab_size} tokens; "
            "download or train it again"
        )
    if kept is not None and not np.array_equal(np.flatnonzero(kept), ids):
        raise ValueError(f"{path}: {KEPT} and {OFFSETS} name different tokens; download or train it again")
    return ids.astype(np.int32)


def _taps(raw: Mapping, config: EagleConfig, section: Mapping, source: Path) -> tuple[int, ...] | None:
    """Which states are fused, as what enters a layer. `eagle_config` (SpecForge, ModelOpt) counts what leaves one."""
    name = "eagle_aux_hidden_state_layer_ids"
    leaving = (raw.get("eagle_config") or {}).get(name)
    found = section.get("taps") or raw.get(name) or (leaving and [layer + 1 for layer in leaving])
    if not config.states or not found:
        return None
    if len(found) != config.states:
        raise ValueError(f"{source} names {len(found)} target states, but fc fuses {config.states}; correct {name}")
    return tuple(found)


def _check_shapes(tensors: Mapping[str, np.ndarray], config: EagleConfig, path: Path) -> None:
    needed = {part.name: part.shape for group in parts(config).values() for part in group}
    for name, shape in needed.items():
        if name not in tensors:
            raise ValueError(f"{path} lacks tensor {name} of shape {list(shape)}; download or train it again")
        if tensors[name].shape != shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {list(tensors[name].shape)} where {list(shape)} is needed"
            )
    if surplus := sorted(set(tensors) - set(needed)):
        raise ValueError(f"{path} holds surplus tensors ({', '.join(surplus[:4])}); this is no known EAGLE layout")
