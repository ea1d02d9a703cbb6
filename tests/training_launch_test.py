"""launch.train as a user starts it: bad input is one sentence, and reading batches does not slow a step."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import smollm2
from scripted import save_target

from specjax import Engine, load_target
from train_drafts import loop
from train_drafts.data import Example
from train_drafts.material import Material
from train_drafts.step import Optimizer
from train_drafts.tasks import Medusa
from train_drafts.trainer import Trainer

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The tiny target, and conversations that a user wrote."""
    folder = tmp_path_factory.mktemp("launch")
    save_target(folder / "target")
    user, assistant = {"role": "user", "content": "t5 t6"}, {"role": "assistant", "content": "t7 t8 t9"}
    (folder / "written.jsonl").write_text("\n".join([json.dumps({"messages": [user, assistant]})] * 16))
    (folder / "questions.jsonl").write_text("\n".join([json.dumps({"messages": [user]})] * 16))
    return folder


def launch(folder: Path, data: str, workdir: str, *flags: str) -> subprocess.CompletedProcess:
    given = ["--config=configs/medusa.py", f"--target={folder / 'target'}", f"--data={folder / data}", *flags]
    command = [sys.executable, "-m", "launch.train", *given, f"--workdir={folder / workdir}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def sentence(done: subprocess.CompletedProcess) -> str:
    """The one error, last on standard error, nothing on standard output and no traceback."""
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr, done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]


def test_missing_data_is_one_sentence(folder):
    assert "training data" in (error := sentence(launch(folder, "gone.jsonl", "a"))) and "does not exist" in error


def test_rows_without_answers_are_one_sentence(folder):
    error = sentence(launch(folder, "questions.jsonl", "b"))
    assert "holds nothing to train on: 16 rows, dropped: 16 no assistant text" in error


def test_a_config_without_a_task_is_one_sentence(folder):
    assert "configs/medusa.py" in sentence(launch(folder, "written.jsonl", "c", "--config=configs/smollm2.py"))


def test_a_work_directory_of_another_run_is_refused_after_the_hint_to_regenerate_answers(folder):
    (folder / "e").mkdir()
    (folder / "e" / "config.json").write_text(json.dumps({"made_of": {"target": "another"}, "settings": {}}))
    settings = ("--config.task.draft_vocab=20", "--config.training.rows=(16, 32)", "--config.training.max_tokens=32")
    done = launch(folder, "written.jsonl", "e", *settings)
    assert "holds a run with target 'another', and now it is" in sentence(done)
    assert "these answers were not written by the target; regenerate them with python -m launch.distill" in done.stderr


@pytest.mark.slow
def test_a_run_that_fits_prints_where_things_are_and_what_comes_next(folder):
    small = ("--config.training.max_tokens=16", "--config.training.rows=(16,)", "--config.training.tokens_per_batch=64")
    short = ("--config.training.epochs=3", "--config.training.new_tokens=4")
    more = ("--config.task.draft_vocab=20", "--max_context=64", *short)
    done = launch(folder, "written.jsonl", "my run", *small, *more)
    assert done.returncode == 0, done.stderr
    report, written, see, following = done.stdout.splitlines()
    assert report.startswith("step 6: held-out accuracy by head ") and "tree_T1" in report
    assert written.startswith(f"written: {folder / 'my run' / 'draft'}") and "--logdir '" in see
    assert f"--target={folder / 'target'}" in following and f"'--methods=eager,medusa={folder / 'my run'}'" in following
    assert {path.name for path in (folder / "my run").iterdir()} == {
        "checkpoints", "config.json", "draft", "results.json", "tensorboard", "training.png",
    }  # fmt: skip


@pytest.mark.slow
def test_a_step_with_its_input_costs_what_a_step_on_a_fixed_batch_costs(tmp_path):
    """Medians of alternating steps on the default target; batches are read ahead by threads."""
    rng = np.random.default_rng(0)
    target = load_target(smollm2().path)
    answers = [Example(rng.integers(0, 4096, 128, dtype=np.int32), np.arange(128) > 20, "") for _ in range(40)]
    ids = np.arange(1024, dtype=np.int32)
    inverse = np.where(np.arange(target.config.vocab_size) < 1024, np.arange(target.config.vocab_size), -1)
    material = Material(answers, answers[:1], ids, inverse.astype(np.int32), "noise")
    training = loop.Training(max_tokens=128, rows=(128,), tokens_per_batch=256)
    batches, _ = loop.read(Engine(target).target, training, material, tmp_path, {})
    trainer = Trainer(target, Medusa(heads=2, draft_vocab=1024), material, Optimizer(), len(batches))
    fixed = [batches[0]] * len(batches)
    states = [trainer._fresh(trainer.task.init(target, trainer.vocabulary[0])) for _ in range(2)]
    runs = [trainer.steps(state, source, 0) for state, source in zip(states, (batches, fixed))]
    times = [[], []]
    for number in range(15):
        for kind in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            jax.block_until_ready(next(runs[kind])[1])
            times[kind].append(time.perf_counter() - began)
    medians = [statistics.median(each[3:]) for each in times]
    print(f"step with its input {medians[0]:.3f} s, on a fixed batch {medians[1]:.3f} s: {medians[0] / medians[1]:.3f}")
    assert medians[0] <= 1.05 * medians[1]
