"""config.json is read strictly: the right values from both spellings, unsupported fields refused by name."""

import dataclasses

import numpy as np
import pytest

from specjax.models.config import from_hf
from specjax.models.rope import Rope

BASE = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-all": {
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


def config(**fields):
    return from_hf(BASE | fields)


def spellings(name: str, theta: float) -> list[dict]:
    """The same scaling as older and newer config files write it."""
    kind, fields = name.split("-")[0], SCALINGS[name]
    inside = {"rope_type": kind, "rope_theta": theta} | fields
    return [
        {"rope_theta": theta, "rope_scaling": {"type": kind} | fields},
        {"rope_theta": theta, "rope_scaling": {"rope_type": kind} | fields},
        {"rope_parameters": inside},
        {"rope_parameters": {"full_attention": inside, "sliding_attention": inside}},
    ]


def test_plain_fields():
    c = config()
    assert (c.heads, c.kv_heads, c.group, c.head_dim, c.windows) == (4, 2, 2, 8, (None,) * 4)
    assert not (c.tied or c.qkv_bias or c.qk_norm)
    assert c.rope == Rope(10000.0)
    assert config(num_key_value_heads=None).kv_heads == 4


def test_head_dim_is_read_and_not_derived():
    assert config(head_dim=16).head_dim == 16
    assert config(head_dim=None).head_dim == 8
    assert config(model_type="qwen3").head_dim == 128  # the family's default
    assert config(model_type="qwen3", head_dim=16).qk_norm


def test_llama3_frequencies_are_the_known_numbers():
    for fields in spellings("llama3", 10000.0):
        np.testing.assert_allclose(config(**fields).rope.frequencies(8), [1, 0.0130423, 0.00125, 0.000125], rtol=1e-5)
    np.testing.assert_allclose(config().rope.frequencies(8), [1, 0.1, 0.01, 0.001], rtol=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_frequencies_equal_transformers_from_every_spelling(name, head_dim):
    transformers = pytest.importorskip("transformers", reason="transformers is a test extra: pip install transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    kind, theta = name.split("-")[0], 50000.0
    parameters = {"rope_type": kind, "rope_theta": theta} | SCALINGS[name]
    reference = transformers.LlamaConfig(**BASE | {"head_dim": head_dim, "rope_parameters": parameters})
    frequencies, factor = rope_utils.ROPE_INIT_FUNCTIONS[kind](reference, "cpu")
    for fields in spellings(name, theta):
        rope = config(head_dim=head_dim, **fields).rope
        np.testing.assert_allclose(rope.frequencies(head_dim), frequencies.numpy(), rtol=2e-6)
        assert rope.frequencies(head_dim).dtype == np.float32
        assert rope.attention_factor == pytest.approx(factor)


def test_original_context_falls_back_to_the_context():
    assert config(rope_scaling={"type": "yarn", "factor": 2.0}).rope.original_context == 512
    outer = config(rope_scaling={"type": "yarn", "factor": 2.0}, original_max_position_embeddings=100)
    assert outer.rope.original_context == 100


def test_yarn_without_factor_stretches_to_the_context():
    rope = config(rope_scaling={"type": "yarn", "original_max_position_embeddings": 128}).rope
    assert rope.factor == 4.0


def test_windows():
    assert config(model_type="mistral", sliding_window=7).windows == (7,) * 4
    assert config(model_type="mistral", sliding_window=None).windows == (None,) * 4
    assert config(model_type="mistral").windows == (4096,) * 4  # what leaving it out means
    qwen = {"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 3}
    assert config(**qwen).windows == (None,) * 4
    assert config(**qwen, use_sliding_window=True).windows == (None, None, None, 7)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert config(**qwen, use_sliding_window=True, layer_types=kinds).windows == (7, None, 7, None)


def test_metadata_passes():
    config(
        architectures=["LlamaForCausalLM"],
        torch_dtype="bfloat16",
        transformers_version="4.40.0",
        use_cache=True,
        pad_token_id=0,
        eos_token_id=[1, 2],
        initializer_range=0.02,
        attention_dropout=0.1,
        pretraining_tp=1,
        attention_bias=False,
        mlp_bias=False,
        is_llama_config=True,
        rope_interleaved=False,
        quantization_config=None,
        partial_rotary_factor=1.0,
        use_mrope=False,
        **{"transformers.js_config": {"dtype": "q4"}},
    )


REFUSED = {
    "family": ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported"),
    "no family": ({"model_type": None}, "model_type None"),
    "architecture": ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "attention bias": ({"attention_bias": True}, "attention_bias = True"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias = True"),
    "remote code": ({"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    "experts": ({"num_local_experts": 8}, "num_local_experts = 8"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    "multiplier": ({"attention_multiplier": 0.5}, "attention_multiplier = 0.5"),
    "scaling of logits": ({"logits_scaling": 8.0}, "logits_scaling = 8.0"),
    "interleaved rope": ({"rope_interleaved": True}, "rope_interleaved = True"),
    "unknown": ({"use_new_trick": True}, "use_new_trick = True"),
    "window in llama": ({"sliding_window": 7}, "sliding_window = 7"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "partial rotary inside": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5",
    ),
    "rope type": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
    "two types": (
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        "keep the right one",
    ),
    "yarn mscale": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale = 0.7"),
    "factor missing": ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
    "theta twice": ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is"),
    "two ropes": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1.0}},
        "disagree",
    ),
    "ropes by layer": (
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1.0},
                "sliding_attention": {"rope_theta": 2.0},
            }
        },
        "differ between layer types",
    ),
    "layer kinds": ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 4}, "layer_types"),
    "layer kinds short": ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "each of 4 layers"),
    "layer kinds without window": (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4},
        "is off",
    ),
    "missing": ({"hidden_size": None}, "config field hidden_size is None"),
    "heads": ({"num_key_value_heads": 3}, "4 query heads do not divide into 3 kv heads"),
    "odd head": ({"head_dim": 7}, "head_dim is 7"),
    "epsilon": ({"rms_norm_eps": 0.0}, "epsilon is 0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    fields, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as error:
        config(**fields)
    assert "\n" not in str(error.value)


def test_one_window_a_layer():
    with pytest.raises(ValueError, match="3 windows are given for 4 layers"):
        dataclasses.replace(config(), windows=(None,) * 3)
