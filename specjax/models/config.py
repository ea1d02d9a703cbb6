"""What a target looks like: the config.json of the Llama, Mistral, Qwen2 and Qwen3 families, read strictly.

A field that would change the result and that specjax does not compute is refused by name. Fields known to
change nothing pass; an unknown field passes only if its value says "off".
"""

from collections.abc import Mapping
from dataclasses import dataclass

from specjax.models.rope import Rope

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Read by `from_hf` itself, in every family.
_HANDLED = {
    "architectures", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "original_max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "tie_word_embeddings", "vocab_size",
}  # fmt: skip

# Read in these families only; elsewhere a value that is on is refused.
_WINDOW_FIELDS = {
    "llama": set(),
    "mistral": {"sliding_window"},
    "qwen2": {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
    "qwen3": {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
}

# Metadata, training-time and generation-time fields: the logits do not depend on them.
_HARMLESS = {
    "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled", "_name_or_path",
    "attention_dropout", "attn_implementation", "attn_pdrop", "bad_words_ids", "begin_suppress_tokens",
    "bos_token_id", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "embd_pdrop", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "hidden_dropout", "id2label",
    "initializer_range", "is_llama_config", "keys_to_ignore_at_inference", "label2id", "length_penalty",
    "max_length", "max_new_tokens", "min_length", "model_max_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values",
    "repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k",
    "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
    "unsloth_fixed", "unsloth_version", "use_cache",
}  # fmt: skip

# Multipliers and the like that are off at a value other than None, False or empty.
_NEUTRAL = {
    "chunk_size_feed_forward": 0,
    "embedding_multiplier": 1,
    "logits_scaling": 1,
    "moe_intermediate_size": 0,
    "n_shared_experts": 0,
    "num_experts": 0,
    "num_local_experts": 0,
    "partial_rotary_factor": 1,
    "residual_multiplier": 1,
}

_REASONS = {
    "attention_bias": "a bias on the attention projections",
    "auto_map": "model code from the checkpoint, which specjax never runs",
    "mlp_bias": "a bias in the MLP",
    "partial_rotary_factor": "rotary positions on a part of each head",
    "quantization_config": "quantised safetensors; use the unquantised checkpoint or a GGUF file",
}


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a target. `windows`: per layer, its sliding window or None."""

    family: str
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    max_context: int
    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"model family {self.family!r} is not supported; use one of {', '.join(FAMILIES)}")
        sizes = ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width", "max_context")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; a whole number above zero is needed")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads do not divide into {self.kv_heads} kv heads of equal groups")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even one")
        if not self.norm_eps > 0:
            raise ValueError(f"the norm epsilon is {self.norm_eps!r}; it has to be above zero")
        if len(self.windows) != self.layers:
            raise ValueError(f"{len(self.windows)} windows are given for {self.layers} layers; give one a layer")
        for window in self.windows:
            if window is not None and (not isinstance(window, int) or window < 1):
                raise ValueError(f"a sliding window of {window!r} is not possible; give a size above zero, or None")

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.heads // self.kv_heads


def from_hf(raw: Mapping) -> ModelConfig:
    """The fields of a Hugging Face config.json -> ModelConfig.

    Raises ValueError, in one sentence that names the field, on what is missing, malformed or not supported.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; use one of {', '.join(FAMILIES)}")
    _refuse_unsupported(raw, family)
    heads, width = _required(raw, "num_attention_heads"), _required(raw, "hidden_size")
    max_context = _required(raw, "max_position_embeddings")
    # Qwen3's library default is 128 whatever the width; every other family derives it.
    head_dim = raw.get("head_dim") or (128 if family == "qwen3" and "head_dim" not in raw else width // heads)
    return ModelConfig(
        family=family,
        vocab_size=_required(raw, "vocab_size"),
        width=width,
        layers=_required(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        mlp_width=_required(raw, "intermediate_size"),
        max_context=max_context,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, max_context),
        windows=_windows(raw, family),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _required(raw: Mapping, key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config field {key} is {value!r}; a whole number above zero is needed")
    return value


def _refuse_unsupported(raw: Mapping, family: str) -> None:
    """Raises ValueError on the first field that would change the result and is not computed here."""
    architectures = raw.get("architectures") or [FAMILIES[family]]
    if list(architectures) != [FAMILIES[family]]:
        raise ValueError(f"architectures {architectures} is not supported; a {family} target is [{FAMILIES[family]!r}]")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; only silu is")
    for key, value in raw.items():
        if key in _HANDLED or key in _HARMLESS or key in _WINDOW_FIELDS[family]:
            continue
        off = value is None or value is False or value in ([], {}, "")
        if not off and not (key in _NEUTRAL and value == _NEUTRAL[key]):
            reason = _REASONS.get(key, "it may change the result and specjax does not compute it")
            raise ValueError(f"config field {key} = {_short(value)} is not supported: {reason}")


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _rope(raw: Mapping, max_context: int) -> Rope:
    """Either spelling: rope_theta with rope_scaling, or rope_parameters with everything in it."""
    old, new = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    nested = [value for value in new.values() if isinstance(value, Mapping)]
    if nested:
        if any(value != nested[0] for value in nested):
            raise ValueError("rope_parameters differ between layer types; only one set for all layers is supported")
        new = nested[0]
    if old and new and old != new:
        raise ValueError("rope_scaling and rope_parameters disagree; keep the one that the model was trained with")
    fields = dict(old or new)
    theta = fields.pop("rope_theta", None)
    outer = raw.get("rope_theta")
    if theta is not None and outer is not None and theta != outer:
        raise ValueError(f"rope_theta is {outer} and {theta} inside the rope parameters; keep the right one")
    # 10,000 is what every supported family means by leaving it out.
    theta = float(next((value for value in (theta, outer) if value is not None), 10_000.0))
    original = raw.get("original_max_position_embeddings")
    return Rope.from_hf(theta, fields, original=original, max_context=max_context)


def _windows(raw: Mapping, family: str) -> tuple[int | None, ...]:
    """Per layer its sliding window; a field left out means what the family's own default is."""
    layers = _required(raw, "num_hidden_layers")
    window = raw.get("sliding_window", 4096)
    if family == "mistral":
        return (window,) * layers
    if family == "llama":
        return (None,) * layers
    used = raw.get("use_sliding_window", False) and window is not None
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28) if used else layers
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        raise ValueError(
            f"layer_types {_short(kinds)} does not say full_attention or sliding_attention for each of {layers} layers"
        )
    if "sliding_attention" in kinds and not used:
        raise ValueError("layer_types has sliding_attention but use_sliding_window or sliding_window is off; set both")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
