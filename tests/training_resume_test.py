"""A stopped run goes on as if it had not been stopped, on another mesh too, and never with another configuration."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from scripted import MESHES, target

from specjax import Engine
from specjax.checkpoints import Checkpoints
from specjax.loading.drafts import load_draft
from train_drafts import loop
from train_drafts.loop import Training
from train_drafts.step import Optimizer
from train_drafts.tasks import Medusa, medusa
from train_drafts.trainer import Trainer

TASK = Medusa(heads=2, draft_vocab=15)
OPTIMIZER = Optimizer(learning_rate=3e-3, warmup=0.0, final=1.0)  # one rate, however many steps
TRAINING = Training(
    max_tokens=32,
    rows=(32,),
    tokens_per_batch=96,  # three rows: no mesh divides them
    epochs=4,
    max_steps=20,
    holdout=2,
    log_every=4,
    checkpoint_every=5,
    prompts=1,
    new_tokens=4,
)
DOUBLED = dataclasses.replace(TRAINING, accumulate=2, max_steps=10)
STOPPED = 12  # within an epoch of 8 steps, two after a checkpoint


@dataclasses.dataclass
class Watched:
    """What went through a run, by step; `states` also has what it began with."""

    examples: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    metrics: dict[int, object] = dataclasses.field(default_factory=dict)
    states: dict[int, object] = dataclasses.field(default_factory=dict)


def train(engine: Engine, data: Path, workdir: Path, training=TRAINING, *, task=TASK, optimizer=OPTIMIZER, stop=None):
    """Run, and call `stop` after step STOPPED."""
    seen, steps = Watched(), Trainer.steps

    def watched(self, first, batches, start):
        seen.states[start] = jax.device_get(first)
        for done, state, metrics, batch in steps(self, first, batches, start):
            seen.examples[done], seen.metrics[done] = batch.example.tolist(), jax.device_get(metrics)
            seen.states[done] = jax.device_get(state)
            yield done, state, metrics, batch
            if stop and done == STOPPED // training.accumulate:
                stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "steps", watched)
        patch.setattr(medusa, "SHAPES", {"chain": ((0,),)})
        loop.run(engine, task, optimizer, training, data, workdir)
    return seen


def interrupt():
    raise KeyboardInterrupt


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def open_engine(mesh: str = "", **fields) -> Engine:
    return Engine(target(mesh, **fields), "eager", chunk=16, max_context=64)


def write(path: Path, count: int = 27, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    rows = [(rng.integers(2, 40, rng.integers(3, 9)), rng.integers(2, 40, rng.integers(9, 20))) for _ in range(count)]
    lines = [json.dumps({"prompt_ids": p.tolist(), "response_ids": a.tolist(), "finish": "stop"}) for p, a in rows]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "answers.jsonl")


@pytest.fixture(scope="module")
def unstopped(engine, data, tmp_path_factory) -> tuple[Watched, Path]:
    workdir = tmp_path_factory.mktemp("unstopped")
    return train(engine, data, workdir), workdir


def assert_goes_on_as(whole: Watched, again: Watched, start: int) -> None:
    steps = [step for step in whole.metrics if step > start]
    assert list(again.metrics) == steps and len(steps) > 1
    for step in steps:
        assert again.examples[step] == whole.examples[step]
        jax.tree.map(np.testing.assert_array_equal, again.metrics[step], whole.metrics[step])
    for step in (start, steps[-1]):
        jax.tree.map(np.testing.assert_array_equal, again.states[step], whole.states[step])


def test_a_run_stopped_within_an_epoch_goes_on_bit_by_bit(engine, data, unstopped, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(engine, data, tmp_path, stop=interrupt)
    assert_goes_on_as(unstopped[0], train(engine, data, tmp_path), start=10)
    both = [load_draft(folder) for folder in (tmp_path, unstopped[1])]
    np.testing.assert_array_equal(both[0].weight, both[1].weight)
    scalars = logged(tmp_path)
    assert scalars == logged(unstopped[1]) and list(scalars["train/objective"]) == [4, 8, 12, 16, 20]
    assert scalars["train/objective"][12] == pytest.approx(unstopped[0].metrics[12].objective)


def logged(workdir: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows of a run; speeds and times differ."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(workdir / "tensorboard"))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if "per_second" not in tag]
    assert all(tag.replace("/", "").replace("_", "").isalnum() for tag in tags)
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


def test_a_run_that_was_killed_goes_on_bit_by_bit(engine, data, unstopped, tmp_path):
    code = (
        "import conftest, sys, training_resume_test as tests\n"
        "from pathlib import Path\n"
        "tests.train(tests.open_engine(), Path(sys.argv[1]), Path(sys.argv[2]), stop=tests.kill)\n"
    )
    command = [sys.executable, "-c", code, str(data), str(tmp_path)]
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    again = train(engine, data, tmp_path)
    assert_goes_on_as(unstopped[0], again, start=min(again.metrics) - 1)
    assert min(again.metrics) in (6, 11)  # the last save may have been under way


def test_a_run_that_accumulates_goes_on_bit_by_bit(engine, data, tmp_path):
    whole = train(engine, data, tmp_path / "whole", DOUBLED)
    with pytest.raises(KeyboardInterrupt):
        train(engine, data, tmp_path / "stopped", DOUBLED, stop=interrupt)
    assert_goes_on_as(whole, train(engine, data, tmp_path / "stopped", DOUBLED), start=5)


def test_more_steps_on_another_mesh_go_on_with_the_same_values(engine, data, unstopped, tmp_path, capfd):
    whole = unstopped[0]
    train(engine, data, tmp_path, dataclasses.replace(TRAINING, max_steps=10, log_every=5))
    capfd.readouterr()
    again = train(open_engine(MESHES["eight"]), data, tmp_path)
    said = capfd.readouterr().err
    assert "changed since the run began: mesh from {'data': 1, 'model': 1} to {'data': 2, 'model': 4}" in said
    assert "max_steps from 10 to 20" in said and "log_every from 5 to 4" in said and "checkpoint_every" not in said
    assert "going on from step 10 of 20" in said
    for step in range(11, 21):
        assert again.examples[step] == whole.examples[step]
        assert again.metrics[step].objective == pytest.approx(whole.metrics[step].objective, rel=1e-5)
    jax.tree.map(np.testing.assert_array_equal, again.states[10], whole.states[10])
    for one, eight in zip(*(jax.tree.leaves(run.states[20]) for run in (whole, again)), strict=True):
        np.testing.assert_allclose(eight, one, atol=1e-4)


def test_another_configuration_is_refused_by_name(engine, data, unstopped, tmp_path):
    workdir = unstopped[1]
    before = (workdir / "config.json").read_bytes()
    other_data = write(tmp_path / "other.jsonl", seed=1)
    cases = {
        "data": lambda: train(engine, other_data, workdir),
        "training.seed": lambda: train(engine, data, workdir, dataclasses.replace(TRAINING, seed=1, holdout=2)),
        "training.tokens_per_batch": lambda: train(
            engine, data, workdir, dataclasses.replace(TRAINING, tokens_per_batch=64)
        ),
        "task.loss": lambda: train(engine, data, workdir, task=dataclasses.replace(TASK, loss="lk")),
        "optimizer.clip": lambda: train(engine, data, workdir, optimizer=dataclasses.replace(OPTIMIZER, clip=2.0)),
        "target": lambda: train(open_engine(num_hidden_layers=1), data, workdir),
        "dtype": lambda: train(open_engine(dtype="bfloat16"), data, workdir),
    }
    for name, again in cases.items():
        with pytest.raises(ValueError, match=f"holds a run with {name} ") as refusal:
            again()
        assert str(workdir) in str(refusal.value) and "--workdir" in str(refusal.value)
    with pytest.raises(ValueError, match="has come to step 20 and 15 are asked for"):
        train(engine, data, workdir, dataclasses.replace(TRAINING, max_steps=15))
    assert (workdir / "config.json").read_bytes() == before


def test_a_gradient_that_is_no_number_stops_the_run_before_it_is_saved(engine, data, tmp_path):
    wild = Optimizer(learning_rate=1e30, warmup=0.0, final=1.0)
    often = dataclasses.replace(TRAINING, log_every=100, checkpoint_every=1)
    with pytest.raises(ValueError, match=r"the gradient of step 2 is not finite; lower optimizer.learning_rate"):
        train(engine, data, tmp_path, often, optimizer=wild)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 1
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rows": ()}, "rows"),
        ({"max_tokens": 9000}, "max_tokens 9000"),
        ({"epochs": 0}, "epochs is 0"),
        ({"nodes": 1}, "nodes is 1"),
    ],
)
def test_settings_that_make_no_sense_are_named(fields, named):
    with pytest.raises(ValueError, match=named):
        Training(**fields)
