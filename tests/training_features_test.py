"""States on disk are those that a step computes, and are trusted as far as they were written."""

import errno
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from scripted import FIELDS, MESHES, states, target, tensors

from train_drafts import features, loop, packing, step
from train_drafts.data import Example
from train_drafts.features import FeatureBatches, build, trim
from train_drafts.loop import Training
from train_drafts.material import Material
from train_drafts.packing import Batches
from train_drafts.tasks import Medusa

IDENTITY = {"target": "tiny"}
TAPS = (1, FIELDS["num_hidden_layers"])


def examples(count: int = 12) -> list[Example]:
    """Prompts of 4 to 8 tokens, answers of 3 to 12, a question and another answer."""
    rng, made = np.random.default_rng(0), []
    for _ in range(count):
        prompt, answer = rng.integers(4, 9), rng.integers(3, 13)
        mask = np.repeat([False, True, False, True], [prompt, answer, 2, 2])
        made.append(Example(rng.integers(0, FIELDS["vocab_size"], len(mask), dtype=np.int32), mask, ""))
    return made


EXAMPLES = examples()


def planned(sequences: list[Example], accumulate: int = 1) -> packing.Plan:
    lengths = [len(example.ids) for example in sequences]
    return packing.plan(
        lengths, tokens_per_batch=32, ladder=(32,), seed=0, epochs=1, row_multiple=1, accumulate=accumulate
    )


def kept(folder: Path, mesh: str = "", spans: bool = True) -> np.ndarray:
    return build(folder, target(mesh), EXAMPLES, planned(EXAMPLES), TAPS, IDENTITY, spans=spans)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[np.ndarray, Path]:
    folder = tmp_path_factory.mktemp("features")
    return np.array(kept(folder)), folder


def limited(folder: Path, limit: int | None = None) -> int:
    """A pass over the text that is interrupted after `limit` batches: how many it took."""
    taken, place = [], step.place

    def counted(*args, **named):
        if len(taken) == limit:
            raise KeyboardInterrupt
        taken.append(args)
        return place(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "_FLUSH", 2)
        patch.setattr(step, "place", counted)
        if limit is None:
            kept(folder)
        else:
            with pytest.raises(KeyboardInterrupt):
                kept(folder)
    return len(taken)


@pytest.mark.parametrize("trimmed", [True, False])
def test_batches_carry_the_states_of_their_own_tokens(whole, trimmed, tmp_path):
    spans = trim(EXAMPLES) if trimmed else EXAMPLES
    features = whole[0] if trimmed else kept(tmp_path, spans=False)
    assert not trimmed or all(span.mask[:2].tolist() == [False, True] for span in spans)
    assert [span.mask.sum() for span in spans] == [example.mask.sum() for example in EXAMPLES]
    source = FeatureBatches(Batches(spans, planned(spans, accumulate=2)), features, spans)
    reference = []
    for example, span in zip(EXAMPLES, spans):
        found = states(FIELDS, tensors(FIELDS), example.ids.tolist())
        reference.append(np.stack([found[tap] for tap in TAPS], axis=1)[-len(span.ids) :])
    seen = 0
    for number in range(len(source)):
        batch, held = source[number]
        assert held.dtype == ml_dtypes.bfloat16 and held.shape == (*batch.tokens.shape, 2, FIELDS["hidden_size"])
        for place in zip(*np.nonzero(batch.example >= 0)):
            want = reference[batch.example[place]][batch.position[place]]
            np.testing.assert_allclose(held[place].astype(np.float64), want, rtol=2**-8, atol=2e-3)
            seen += 1
        assert not held[batch.example < 0].any()
    assert seen == len(features) == sum(len(span.ids) for span in spans)


def test_a_run_keeps_all_of_them_whatever_it_accumulates(whole, tmp_path):
    training = Training(max_tokens=32, rows=(32,), tokens_per_batch=32, accumulate=2, epochs=2, features=True)
    source, plan = loop.read(target(), Medusa(), training, Material(EXAMPLES, [], None, None, ""), tmp_path, IDENTITY)
    assert len(source) == len(plan.steps) and plan.steps[-1].epoch == 1 and source[0][1].shape[0] == 2
    stored = np.fromfile(tmp_path / "features" / "features.bin", ml_dtypes.bfloat16)
    np.testing.assert_array_equal(stored.reshape(whole[0][:, -1].shape), whole[0][:, -1])


def test_a_mesh_keeps_the_same(whole, tmp_path):
    got = kept(tmp_path, MESHES["eight"]).astype(np.float32)
    np.testing.assert_allclose(got, whole[0].astype(np.float32), rtol=2**-7, atol=1e-3)


def test_features_of_another_run_are_not_overwritten(tmp_path):
    kept(tmp_path)
    before = (tmp_path / "features.bin").read_bytes()
    with pytest.raises(ValueError, match=r"holds features of a run with target 'tiny', and now it is 'other'; remove"):
        build(tmp_path, target(), EXAMPLES, planned(EXAMPLES), TAPS, {"target": "other"}, spans=True)
    with pytest.raises(ValueError, match=r"a run with taps \[\d, \d\], and now it is \[0\]"):
        build(tmp_path, target(), EXAMPLES, planned(EXAMPLES), (0,), IDENTITY, spans=True)
    assert (tmp_path / "features.bin").read_bytes() == before


def test_the_size_is_said_before_and_is_the_files(tmp_path, capfd, monkeypatch):
    class Large:
        """Nothing but what the size is computed from."""

        config = type("Config", (), {"width": 2**20})

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"features.bin needs 3\d\d MiB \(No space left on device\); make room"):
        build(tmp_path, Large, EXAMPLES, planned(EXAMPLES), (0,), IDENTITY, spans=True)
    said = float(capfd.readouterr().err.split("numbers, ")[1].split(" MiB")[0].replace(",", ""))
    assert said == pytest.approx(sum(len(span.ids) for span in trim(EXAMPLES)) * 2, rel=0.01)
    assert not list(tmp_path.iterdir())


def test_the_file_is_as_large_as_its_numbers(whole):
    array, folder = whole
    assert (folder / "features.bin").stat().st_size == array.size * 2


def test_a_stopped_pass_goes_on_and_gives_the_same(whole, tmp_path):
    batches = len(planned(EXAMPLES).steps)
    assert limited(tmp_path, 5) == 5
    assert json.loads((tmp_path / "features.json").read_text())["batches"] == 4
    assert limited(tmp_path) == batches - 4 > 2
    assert limited(tmp_path) == 0
    np.testing.assert_array_equal(np.array(kept(tmp_path)), whole[0])


def test_a_lost_file_is_computed_anew_whatever_its_note_says(whole, tmp_path):
    kept(tmp_path)
    (tmp_path / "features.bin").unlink()
    limited(tmp_path, 1)
    assert limited(tmp_path) == len(planned(EXAMPLES).steps)
    np.testing.assert_array_equal(np.array(kept(tmp_path)), whole[0])
