"""Drafts on disk: both layouts give back what was saved, and every damaged or foreign one is refused by name."""

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from checkpoints import edit_json
from safetensors.numpy import load_file, save_file

from specjax.loading import draft_files
from specjax.loading.drafts import MedusaDraft, check_draft, load_draft, save_draft

HEADS, LAYERS, WIDTH, VOCAB = 3, 2, 8, 97
IDS = np.array([3, 5, 8, 13, 21, 34, 55, 89], np.int32)
TARGET = {"name": "tiny", "fingerprint": "aa", "width": WIDTH, "vocab_size": VOCAB, "tokenizer": "bb"}
FILES = {"shared": "medusa_lm_head.safetensors", "own": "model.safetensors"}


def make(kind: str, dtype=np.float32, seed: int = 0) -> MedusaDraft:
    """A random draft: `own` has an lm_head over eight scattered tokens."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    return MedusaDraft(
        weight=normal(HEADS, LAYERS, WIDTH, WIDTH),
        bias=normal(HEADS, LAYERS, WIDTH),
        lm_head=normal(len(IDS), WIDTH) if kind == "own" else None,
        token_ids=IDS if kind == "own" else None,
        accuracy=rng.uniform(size=(HEADS, 4)),
        paths=((0,), (1,), (0, 0), (0, 3), (0, 0, 0)),
        frequency=np.array([0.5, 0.25, 0.25, 0.1, 0.0]),
        nodes=4,
        target=TARGET,
        template_args={"enable_thinking": False},
        training={"steps": 7, "data": "chat.jsonl", "loss": [1.5, 0.25]},
    )


def assert_same(a: MedusaDraft, b: MedusaDraft) -> None:
    for field in dataclasses.fields(a):
        left, right = getattr(a, field.name), getattr(b, field.name)
        assert type(left) is type(right), field.name
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            np.testing.assert_array_equal(left, right, err_msg=field.name)
        else:
            assert left == right, field.name


@pytest.fixture(params=["shared", "own"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def folder(tmp_path, kind):
    """A saved draft that the test may change."""
    save_draft(tmp_path / "draft", make(kind))
    return tmp_path / "draft"


def change(folder, kind: str, changes: dict) -> None:
    """Set tensors; None removes one."""
    tensors = load_file(folder / FILES[kind]) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / FILES[kind])


# Round trips


@pytest.mark.parametrize("dtype", [np.float32, np.dtype(ml_dtypes.bfloat16)])
def test_what_is_loaded_is_what_was_saved(tmp_path, kind, dtype):
    draft = make(kind, dtype)
    save_draft(tmp_path / "a", draft)
    assert_same(load_draft(tmp_path / "a"), draft)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["torch_dtype"] == np.dtype(dtype).name
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(["config.json", FILES[kind]])
    assert {stat.S_IMODE(p.stat().st_mode) & 0o444 for p in (tmp_path / "a").iterdir()} == {0o444}


@pytest.mark.parametrize("kind", ["own"], indirect=True)
def test_a_fresh_process_makes_the_same_proposals(folder):
    """Ranked tokens of every head: loaded arrays in another process, against tensors by their names in the file."""
    code = (
        "import sys, numpy as np\n"
        "from specjax.loading.drafts import load_draft\n"
        "d, out = load_draft(sys.argv[1]), []\n"
        "for weight, bias in zip(d.weight, d.bias):\n"
        "    x = np.linspace(-1, 1, 8)\n"
        "    for w, b in zip(weight, bias):\n"
        "        z = w @ x + b\n"
        "        x = x + z / (1 + np.exp(-z))\n"
        "    out.append(d.token_ids[np.argsort(d.lm_head @ x)])\n"
        "print(np.array(out).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    tensors = load_file(folder / "model.safetensors")
    for i, got in enumerate(json.loads(done.stdout)):
        x = np.linspace(-1, 1, WIDTH)
        for j in range(LAYERS):
            z = tensors[f"blocks.{i}.layers.{j}.weight"] @ x + tensors[f"blocks.{i}.layers.{j}.bias"]
            x = x + z / (1 + np.exp(-z))
        assert got == tensors["token_map"][np.argsort(tensors["lm_heads.0.weight"] @ x)].tolist()
        assert set(got) == set(IDS.tolist())


def test_configs_hold_the_fields_that_other_programs_read(tmp_path):
    save_draft(tmp_path / "a", make("shared"))
    save_draft(tmp_path / "b", make("own"))
    shared, own = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    want = {"medusa_num_heads": 3, "medusa_num_layers": 2, "version": "2", "base_model_name_or_path": "tiny"}
    assert want.items() <= shared.items()
    want = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": 8, "vocab_size": 97}
    want |= {"num_heads": 3, "num_hidden_layers": 2, "truncated_vocab_size": 8}
    want |= {"medusa_fc_bias": True, "original_lm_head": True}
    assert want.items() <= own.items()
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    assert tensors["token_map"].dtype == np.int64 and tensors["token_map"].shape == (8,)


def test_a_work_directory_stands_for_its_draft(tmp_path, kind):
    save_draft(tmp_path / "draft", make(kind))
    assert_same(load_draft(tmp_path), make(kind))


# Saving over a draft


def test_saving_over_the_other_layout_leaves_one_draft(tmp_path):
    for kind in ("own", "shared", "own"):
        save_draft(tmp_path, make(kind))
        assert_same(load_draft(tmp_path), make(kind))
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["config.json", FILES[kind]])


@pytest.mark.parametrize("step", ["save_file", "write_json"])
def test_a_full_disk_leaves_the_whole_draft(folder, kind, monkeypatch, step):
    def full(value, path, **settings):
        (folder / ".rest").write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(draft_files, step, full)
    with pytest.raises(OSError, match="draft .* could not be written .No space left on device.; make room"):
        save_draft(folder, make(kind, seed=1))
    assert_same(load_draft(folder), make(kind))


@pytest.mark.parametrize("moves", [0, 1])
def test_weights_and_config_of_two_saves_never_meet(folder, kind, monkeypatch, moves):
    """Stopped between any two moves, the folder is no draft; saved again it is one."""
    done, replace = [], os.replace

    def stop(source, target):
        if str(source).endswith((".safetensors", f"{os.sep}.config.json")):
            if len(done) == moves:
                raise KeyboardInterrupt
            done.append(source)
        replace(source, target)

    monkeypatch.setattr(draft_files.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        save_draft(folder, make(kind, seed=1))
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        load_draft(folder)
    save_draft(folder, make(kind, seed=1))
    assert_same(load_draft(folder), make(kind, seed=1))
    assert sorted(p.name for p in folder.iterdir()) == sorted(["config.json", FILES[kind]])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"token_ids": None}, "only one of lm_head and token_ids"),
        ({"token_ids": IDS[::-1]}, "different tokens in ascending order"),
        ({"token_ids": IDS + 20}, "runs from 23 to 109, outside the target's 97 tokens"),
        ({"accuracy": np.ones((2, 4))}, "an accuracy from 0 to 1 for every rank of 3 heads"),
        ({"accuracy": np.full((3, 4), np.nan)}, "an accuracy from 0 to 1"),
        ({"paths": ((0,), (0, 0, 0))}, r"\(0, 0, 0\) among its paths, which stands twice or before its parent"),
        ({"paths": ((0,), (1,), (0,))}, r"\(0,\) among its paths, which stands twice"),
        ({"paths": ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))}, r"\(0, 0, 0, 0\) among .* outside 3 heads"),
        ({"paths": ((0,), (-1,))}, r"\(-1,\) among its paths"),
        (
            {"frequency": np.array([0.5, 0.25, 0.1, 0.2, 0.0])},
            "a frequency from 0 to 1 for each of 5 paths, the highest",
        ),
        ({"frequency": np.array([1.5, 0.25, 0.1, 0.1, 0.0])}, "a frequency from 0 to 1"),
        ({"frequency": np.array([0.5, 0.25, 0.1, np.nan, 0.0])}, "a frequency from 0 to 1"),
        ({"frequency": np.array([0.5, 0.25])}, "a frequency from 0 to 1 for each of 5 paths"),
        ({"nodes": 7}, "a tree of 7 nodes, but 5 paths make 2 to 6"),
        ({"nodes": 1}, "a tree of 1 nodes"),
    ],
)
def test_a_draft_that_contradicts_itself_is_not_saved(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        save_draft(tmp_path / "a", dataclasses.replace(make("own"), **changes))
    assert not (tmp_path / "a").exists()


# Other people's files


def test_a_draft_of_another_trainer_loads_with_defaults(folder, kind, capsys):
    edit_json(folder / "config.json", {"specjax": None})
    draft = load_draft(folder)
    assert "written by another trainer" in capsys.readouterr().err
    np.testing.assert_array_equal(draft.weight, make(kind).weight)
    np.testing.assert_array_equal(draft.accuracy[:, :2], [[1 / 2, 1 / 4], [1 / 4, 1 / 8], [1 / 8, 1 / 16]])
    assert draft.paths == ((0,), (0, 0), (0, 0, 0)) and draft.nodes == 4
    np.testing.assert_array_equal(draft.frequency, [1 / 2, 1 / 4, 1 / 8])
    fits = FITS | {"name": "x", "fingerprint": "?", "tokenizer": "?", "template_args": {"a": 1}}
    check_draft(draft, **fits)
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match="width 8, but x has 16"):
        check_draft(draft, **fits | {"width": 16})
    if kind == "own":
        with pytest.raises(ValueError, match="vocabulary size 97, but x has 96"):
            check_draft(draft, **fits | {"vocab_size": 96})


def test_vllm_files_load_in_all_their_forms(tmp_path):
    """Ids in any order, a whole lm_head that the map cuts down, no biases, no map, a prefix: as vLLM reads them."""
    whole = np.random.default_rng(1).normal(size=(VOCAB, WIDTH)).astype(np.float32)
    folder, draft = tmp_path / "draft", make("own")
    save_draft(folder, draft)
    order = np.array([4, 0, 7, 2, 1, 3, 6, 5])
    change(folder, "own", {"token_map": IDS[order].astype(np.int64), "lm_heads.0.weight": draft.lm_head[order]})
    assert_same(load_draft(folder), draft)
    change(folder, "own", {"lm_heads.0.weight": whole})
    np.testing.assert_array_equal(load_draft(folder).lm_head, whole[IDS])
    change(folder, "own", {f"blocks.{i}.layers.{j}.bias": None for i in range(HEADS) for j in range(LAYERS)})
    edit_json(folder / "config.json", {"medusa_fc_bias": None})
    np.testing.assert_array_equal(load_draft(folder).bias, np.zeros((HEADS, LAYERS, WIDTH), np.float32))
    change(folder, "own", {"token_map": None})
    edit_json(folder / "config.json", {"truncated_vocab_size": None})
    np.testing.assert_array_equal(load_draft(folder).token_ids, np.arange(VOCAB))
    np.testing.assert_array_equal(load_draft(folder).lm_head, whole)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"medusa_heads.{name}": value for name, value in tensors.items()}, folder / "model.safetensors")
    np.testing.assert_array_equal(load_draft(folder).weight, draft.weight)


@pytest.mark.parametrize("kind", ["shared"], indirect=True)
def test_heads_with_a_vocabulary_matrix_each_are_refused(folder):
    change(folder, "shared", {f"{i}.{LAYERS}.weight": np.zeros((VOCAB, WIDTH), np.float32) for i in range(HEADS)})
    with pytest.raises(ValueError, match=r"a vocabulary matrix for each head \(0.2.weight\), which is not supported"):
        load_draft(folder)


OWN_ONLY = {
    "each its own matrix": ({"lm_heads.1.weight": np.zeros((8, 8), np.float32)}, {}, r"head \(lm_heads.1.weight\)"),
    "no map": ({"token_map": None}, {}, "lacks tensor token_map, without which 8 of 97 tokens have no ids"),
    "no lm_head": ({"lm_heads.0.weight": None}, {}, r"lacks tensor lm_heads.0.weight of shape \[8, 8\]"),
    "small lm_head": ({"lm_heads.0.weight": np.zeros((7, 8), np.float32)}, {}, r"has shape \[7, 8\] where \[8, 8\]"),
    "zero map": ({"token_map": np.zeros(8, np.int64)}, {}, "has to name different tokens"),
    "map outside": ({"token_map": np.arange(90, 98)}, {}, "runs from 90 to 97, outside the target's 97 tokens"),
    "map of another size": ({"token_map": np.arange(9)}, {}, "has 9 ids where truncated_vocab_size is 8"),
    "no vocabulary size": ({}, {"vocab_size": None}, "has vocab_size None; set it to the target's"),
    "no bias": ({"blocks.1.layers.0.bias": None}, {}, r"lacks tensor blocks.1.layers.0.bias of shape \[8\]"),
    "heads": ({}, {"num_heads": 5}, "says num_heads = 5 but model.safetensors holds 3"),
    "width": ({}, {"hidden_size": 16}, r"blocks.0.layers.0.weight has shape \[8, 8\] where \[16, 16\] is needed"),
}


@pytest.mark.parametrize("kind", ["own"], indirect=True)
@pytest.mark.parametrize("case", OWN_ONLY)
def test_damaged_vllm_files_are_refused_by_name(folder, case):
    tensors, config, message = OWN_ONLY[case]
    change(folder, "own", tensors)
    edit_json(folder / "config.json", config)
    with pytest.raises(ValueError, match=message):
        load_draft(folder)


SHARED_ONLY = {
    "heads": ({}, {"medusa_num_heads": 5}, "says medusa_num_heads = 5 but medusa_lm_head.safetensors holds 3"),
    "layers": ({}, {"medusa_num_layers": 1}, "says medusa_num_layers = 1 but medusa_lm_head.safetensors holds 2"),
    "missing": ({"1.0.linear.weight": None}, {}, r"lacks tensor 1.0.linear.weight of shape \[8, 8\]"),
    "no bias": ({"2.1.linear.bias": None}, {}, r"lacks tensor 2.1.linear.bias of shape \[8\]"),
    "shape": ({"2.1.linear.bias": np.zeros(9, np.float32)}, {}, r"2.1.linear.bias has shape \[9\] where \[8\]"),
    "surplus": ({"model.norm.weight": np.zeros(8, np.float32)}, {}, r"surplus tensors \(model.norm.weight\)"),
    "type": ({"0.0.linear.bias": np.zeros(8, np.int8)}, {}, "0.0.linear.bias has type int8; use float32"),
    "schema": ({}, {"specjax": {"schema_version": 2}}, "schema_version 2 where 1 is read"),
    "method": ({}, {"specjax": {"schema_version": 1, "method": "eagle"}}, "a draft of method 'eagle', not 'medusa'"),
    "section": (
        {},
        {"specjax": {"schema_version": 1, "method": "medusa"}},
        "lacks target, template_args, accuracy, paths",
    ),
}


@pytest.mark.parametrize("kind", ["shared"], indirect=True)
@pytest.mark.parametrize("case", SHARED_ONLY)
def test_damaged_drafts_are_refused_by_name(folder, case):
    tensors, config, message = SHARED_ONLY[case]
    change(folder, "shared", tensors)
    edit_json(folder / "config.json", config)
    with pytest.raises(ValueError, match=message):
        load_draft(folder)


def test_missing_and_truncated_files_are_named(folder, kind, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; give a folder that training wrote"):
        load_draft(tmp_path / "nowhere")
    path = folder / FILES[kind]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=f"{FILES[kind]} is truncated or damaged"):
        load_draft(folder)
    save_file({"other": np.zeros(3, np.float32)}, path)
    with pytest.raises(ValueError, match="lacks tensor .*0.*0.*weight; this is no Medusa draft"):
        load_draft(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{FILES[kind]} is missing; .* pickled weights"):
        load_draft(folder)


# Does it fit the target


FITS = TARGET | {"template_args": {"enable_thinking": False}}


def test_a_draft_of_this_target_is_taken_in_silence(kind, capsys):
    check_draft(make(kind), **FITS)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"width": 16}, "trained for tiny with width 8, but tiny has 16; train a draft for tiny"),
        ({"vocab_size": 96, "name": "small"}, "trained for tiny with vocabulary size 97, but small has 96"),
        ({"tokenizer": "cc"}, "with tokenizer fingerprint bb, but tiny has cc"),
    ],
)
def test_a_draft_of_another_target_is_refused(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        check_draft(make(kind), **FITS | changes)


def test_tokens_outside_the_target_are_refused():
    draft = dataclasses.replace(make("own"), target={})
    with pytest.raises(ValueError, match="guesses token 89, but tiny has 89 tokens"):
        check_draft(draft, **FITS | {"vocab_size": 89})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"fingerprint": "cc"}, "warning: the draft was trained for tiny with weights aa, but tiny has cc"),
        ({"template_args": {}}, "warning: .* template arguments {'enable_thinking': False}, but decoding uses {}"),
    ],
)
def test_other_weights_or_template_arguments_warn(kind, capsys, changes, message):
    check_draft(make(kind), **FITS | changes)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(message, line)
