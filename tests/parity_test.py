"""The loaded target against transformers: the same logits for every family, format, scaling and window."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import TINY, edit_json, reference_model, save_folder, save_gguf, smollm2
from flax import nnx
from safetensors.numpy import load_file, save_file

import specjax
from specjax import cache
from specjax.bench import workloads
from specjax.loading.checkpoint import Checkpoint
from specjax.loading.target import load_parameters, open_checkpoint
from specjax.models.transformer import Transformer
from specjax.sharding import make_mesh

TOKENS = np.random.default_rng(0).integers(0, TINY["vocab_size"], (1, 120))  # position 100 is inside

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def rope(kind: str, fields: dict) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | fields}


CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "head_dim": 8}),
    "llama-linear": ("llama", rope("linear", {"factor": 2.0})),
    "llama-llama3": ("llama", rope("llama3", LLAMA3)),
    "llama-yarn": ("llama", rope("yarn", YARN)),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-window-yarn": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1} | rope("yarn", YARN),
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
}


def load(target: Path | Checkpoint, dtype=jnp.float32, mesh: str = ""):
    """(mesh, model) with the checkpoint's parameters."""
    checkpoint = open_checkpoint(target) if isinstance(target, Path) else target
    mesh = make_mesh(mesh)
    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(lambda: Transformer(checkpoint.config, rngs=nnx.Rngs(0), dtype=dtype))
        graphdef, state = nnx.split(abstract)
        return mesh, nnx.merge(graphdef, load_parameters(checkpoint, state, mesh))


@jax.jit
def forward(model, tokens, positions, prefix, mask):
    return model(tokens, positions, prefix, mask).logits


def logits(target: Path | Checkpoint, tokens: np.ndarray = TOKENS, dtype=jnp.float32, mesh: str = "") -> np.ndarray:
    """Logits [T, V] of one causal pass with nothing cached."""
    mesh, model = load(target, dtype, mesh)
    length = tokens.shape[1]
    with jax.set_mesh(mesh):
        prefix = cache.empty(model.config, 1, 8, dtype)
        mask = jnp.tril(jnp.ones((1, length, length), bool))
        out = forward(model, jnp.asarray(tokens), jnp.arange(length)[None], prefix, mask)
        return np.asarray(out)[0, :, : model.config.vocab_size]


def expected(model, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Logits [T, V] of a transformers model."""
    torch = pytest.importorskip("torch", reason="torch is a test extra: pip install torch")
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits[0].numpy()


@functools.cache
def expected_of(family: str, fields: str) -> np.ndarray:
    """By the fields as JSON, so that tests on one model share its logits."""
    return expected(reference_model(family, json.loads(fields)))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    family, fields = CASES[case]
    folder = save_folder(tmp_path, family, fields)
    want = expected_of(family, json.dumps(fields))
    np.testing.assert_allclose(logits(folder), want, atol=1e-4, rtol=0)


def test_padding_for_the_mesh_changes_nothing(tmp_path):
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices; tests/conftest.py makes 8 on CPU")
    fields = {
        "num_key_value_heads": 2,
        "intermediate_size": 46,
    }  # neither divides by 4, nor does the vocabulary
    folder = save_folder(tmp_path, "qwen2", fields)
    want = expected_of("qwen2", json.dumps(fields))
    np.testing.assert_allclose(logits(folder, mesh="data=1,model=4"), want, atol=1e-4, rtol=0)


def test_bfloat16_is_close_to_float32(tmp_path):
    folder = save_folder(tmp_path)
    want = expected_of("llama", "{}")
    error = np.sqrt(np.mean((logits(folder, dtype=jnp.bfloat16) - want) ** 2))
    assert error < 0.05 * want.std()  # eight bits of mantissa through three layers of large random weights


def test_a_tied_checkpoint_may_repeat_the_embedding_as_head(tmp_path):
    fields = CASES["llama-tied"][1]
    folder = save_folder(tmp_path, "llama", fields)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    np.testing.assert_allclose(logits(folder), expected_of("llama", json.dumps(fields)), atol=1e-4, rtol=0)


def test_a_tied_checkpoint_with_another_head_is_refused(tmp_path):
    folder = save_folder(tmp_path, "llama", CASES["llama-tied"][1])
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="says tie_word_embeddings but its lm_head.weight differs"):
        load(folder)


def test_an_untied_checkpoint_without_head_is_refused(tmp_path):
    folder = save_folder(tmp_path, "llama", CASES["llama-tied"][1])
    edit_json(folder / "config.json", {"tie_word_embeddings": False})
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        load(folder)


@pytest.mark.parametrize("case", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_gguf_logits_equal_transformers(case, tmp_path):
    family, fields = CASES[case]
    path = save_gguf(tmp_path / "model.gguf", save_folder(tmp_path, family, fields), family)
    np.testing.assert_allclose(logits(path), expected_of(family, json.dumps(fields)), atol=1e-4, rtol=0)


def test_gguf_rope_divisors_are_llama3_scaling(tmp_path):
    """Converters write llama3 scaling as one divisor a frequency, in rope_freqs.weight."""
    family, fields = CASES["llama-llama3"]
    folder = save_folder(tmp_path, family, fields)
    scaled = open_checkpoint(folder).config.rope.frequencies(TINY["head_dim"])
    divisors = (10000.0 ** -(np.arange(0, 16, 2) / 16) / scaled).astype(np.float32)
    path = save_gguf(tmp_path / "model.gguf", folder, tensors={"rope_freqs.weight": divisors})
    np.testing.assert_allclose(logits(path), expected_of(family, json.dumps(fields)), atol=1e-4, rtol=0)


def test_gguf_mistral_window(tmp_path):
    family, fields = CASES["mistral-window"]
    folder = save_folder(tmp_path, family, fields)
    path = save_gguf(tmp_path / "model.gguf", folder, "llama", metadata={"attention.sliding_window": 8})
    np.testing.assert_allclose(logits(path), expected_of(family, json.dumps(fields)), atol=1e-4, rtol=0)


@functools.cache
def smollm2_in_transformers():
    """SmolLM2 as transformers' own GGUF loader reads it, float32."""
    transformers = pytest.importorskip("transformers", reason="transformers is a test extra: pip install transformers")
    torch = pytest.importorskip("torch", reason="torch is a test extra: pip install torch")
    path = smollm2().path
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


def test_smollm2_logits_equal_transformers_own_gguf_loader():
    tokens = np.random.default_rng(1).integers(17, 49152, (1, 40))
    tokens[0, :5] = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    np.testing.assert_allclose(
        logits(smollm2(), tokens), expected(smollm2_in_transformers(), tokens), atol=1e-3, rtol=0
    )


def test_smollm2_writes_64_greedy_tokens_of_transformers_on_a_prompt_of_each_workload():
    """One pass of transformers over prompt and output: each token must be its argmax after the tokens before it,
    which by induction is what its greedy decoding writes."""
    smollm2()
    engine = specjax.load(max_context=1024)
    prompts = [min(workloads.load(name), key=lambda prompt: len(prompt.turns[0])) for name in workloads.WORKLOADS]
    prompts = [engine.encode(prompt.turns[0][-600:]) for prompt in prompts]
    results = engine.generate(prompts, specjax.Sampling(max_new_tokens=64, ignore_end=True), batch_size=12)
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.tokens) == 64
        scores = expected(smollm2_in_transformers(), np.array([prompt + result.tokens[:-1]]))[len(prompt) - 1 :]
        assert scores.argmax(-1).tolist() == result.tokens
