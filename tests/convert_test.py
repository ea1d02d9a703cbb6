"""launch.convert: int8 is a quarter as large and reads back within half a step; without it nothing changes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from drafts_test import make
from eagle_test import Variant, save
from safetensors.numpy import load_file, save_file

from specjax.loading.draft_files import SCALE, read_tensors
from specjax.loading.drafts import save_draft

ROOT = Path(__file__).parent.parent
WEIGHTS = "model.safetensors"


def convert(*flags: str) -> str:
    command = [sys.executable, "-m", "launch.convert", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.fixture(params=["medusa", "eagle"])
def draft(request, tmp_path) -> tuple[str, Path]:
    if request.param == "medusa":
        save_draft(tmp_path / "draft", make("own"))
    else:
        save(tmp_path / "draft", Variant(state_norms=True, norm_output=True))
    return request.param, tmp_path / "draft"


def test_int8_reads_back_within_half_a_step_of_each_row(draft, tmp_path):
    method, folder = draft
    said = convert(f"--method={method}", f"--draft={folder}", f"--out={tmp_path / 'small'}", "--int8")
    assert said.startswith(f"written: {tmp_path / 'small'} (")
    before, after = read_tensors(folder / WEIGHTS), read_tensors(tmp_path / "small" / WEIGHTS)
    stored = load_file(tmp_path / "small" / WEIGHTS)
    assert set(before) == set(after)
    for name, value in before.items():
        if value.ndim < 2 or value.dtype != np.float32:
            np.testing.assert_array_equal(after[name], value)
            continue
        assert stored[name].dtype == np.int8 and stored[name + SCALE].shape == value.shape[:-1]
        step = np.abs(value).max(-1, keepdims=True) / 127
        assert (np.abs(after[name] - value) <= 0.5001 * step).all()


def test_without_int8_the_tensors_are_the_same(draft, tmp_path):
    method, folder = draft
    convert(f"--method={method}", f"--draft={folder}", f"--out={tmp_path / 'same'}")
    before, after = read_tensors(folder / WEIGHTS), read_tensors(tmp_path / "same" / WEIGHTS)
    assert set(before) == set(after)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


def test_a_scale_that_fits_nothing_is_named(tmp_path):
    save_file({"a": np.ones((2, 3), np.int8), f"a{SCALE}": np.ones(3, np.float32)}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"a\.scale has no tensor that it fits"):
        read_tensors(tmp_path / WEIGHTS)
