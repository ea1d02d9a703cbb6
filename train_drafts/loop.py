"""A training run: data -> plan -> steps -> a draft on disk; the same call again goes on where it stopped.

WORKDIR/config.json                  what the run is made of
WORKDIR/checkpoints/                 parameters, moments, step (orbax)
WORKDIR/features/                    the target's states, where they are kept
WORKDIR/tensorboard/                 scalars and example texts
WORKDIR/results.json, training.png   every evaluation
WORKDIR/draft/                       the finished draft
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specjax import methods
from specjax.checkpoints import Checkpoints
from specjax.decode.engine import Engine
from specjax.decode.target import Target
from specjax.loading.drafts import MedusaDraft
from specjax.loading.eagle import EagleDraft
from specjax.telemetry import progress_bar, say, summary_writer, write_json
from train_drafts import data, packing
from train_drafts.evaluate import Evaluation, Evaluator
from train_drafts.features import FeatureBatches, build, trim
from train_drafts.material import Material, prepare
from train_drafts.record import Record
from train_drafts.step import Optimizer
from train_drafts.trainer import Trainer

MADE_OF = ("seed", "max_tokens", "rows", "tokens_per_batch", "accumulate", "holdout", "features")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How long, how much at once and how often to look.

    `max_tokens`: longer texts are cut; `rows`: lengths that a packed row may have; `tokens_per_batch`, `accumulate`:
    places of a batch, batches of a step; `epochs`, `max_steps` (0: all of them): the end; `holdout`: examples kept for
    evaluation; `features`: keep the target's states on disk, so that only the first epoch runs the target.
    `log_every`, `checkpoint_every`, `evaluate_every` (0: at the end only): steps. An evaluation serves `prompts`
    held-out prompts for `new_tokens` tokens each. `nodes`: the draft's default tree where no cost table chooses.
    """

    max_tokens: int = 2048
    rows: tuple[int, ...] = (512, 2048, 8192)
    tokens_per_batch: int = 4096
    accumulate: int = 1
    epochs: int = 3
    max_steps: int = 0
    seed: int = 0
    holdout: int = 64
    features: bool = False
    log_every: int = 10
    checkpoint_every: int = 200
    evaluate_every: int = 0
    prompts: int = 8
    new_tokens: int = 64
    nodes: int = 8

    def __post_init__(self):
        least = {"max_steps": 0, "seed": 0, "evaluate_every": 0, "nodes": 2}
        for field in dataclasses.fields(self):
            value, bound = getattr(self, field.name), least.get(field.name, 1)
            if type(value) is int and value < bound:
                raise ValueError(f"{field.name} is {value}; it must be {bound} or more")
        if not self.rows or not all(type(length) is int and length > 0 for length in self.rows):
            raise ValueError(f"rows {self.rows} are no lengths; give one or more, like (512, 2048)")
        if self.max_tokens > max(self.rows):
            raise ValueError(
                f"max_tokens {self.max_tokens} is above {max(self.rows)}, the longest row; add a longer one"
            )


def run(
    engine: Engine,
    task,
    optimizer: Optimizer,
    training: Training,
    path: Path,
    workdir: Path,
) -> tuple[MedusaDraft | EagleDraft, Evaluation]:
    """Train `task` for the engine's target on the text in `path`: the draft, also in workdir/draft, and how it serves.

    The engine's cost table, where it has one, chooses the draft's default tree. Raises ValueError or OSError in one
    sentence, for instance if `workdir` holds a run of another configuration.
    """
    material = prepare(
        engine,
        path,
        max_tokens=training.max_tokens,
        holdout=training.holdout,
        seed=training.seed,
        draft_vocab=task.draft_vocab,
    )
    made_of = identity(engine, task, optimizer, training, material)
    check_same(workdir / "config.json", made_of, settings(engine, training))
    batches, plan = read(engine.target, task, training, material, workdir, made_of)
    steps = min(training.max_steps or len(batches), len(batches))
    say(f"{steps} steps of {training.accumulate} x {training.tokens_per_batch} places, {plan.fill:.0%} of them text")
    trainer = Trainer(engine.target, task, material, optimizer, steps)
    evaluator = Evaluator(engine, trainer, material, training.prompts, training.new_tokens)
    seen = packing.taught_tokens(plan, [int(example.mask.sum()) for example in material.train])
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        first, start = trainer.begin(checkpoints)
        write_json(workdir / "config.json", {"made_of": made_of, "settings": settings(engine, training)})
        state = first
        bar = progress_bar("training", start, steps, "step")
        with summary_writer(workdir / "tensorboard", start + 1) as writer, bar:
            record = Record(workdir, writer, bar, start, training.log_every, optimizer.schedule(steps))
            for done, state, metrics, batch in trainer.steps(first, batches, start):
                record.step(done, metrics, batch)
                if done % training.checkpoint_every == 0 or done == steps:
                    record.check()
                    checkpoints.save(done, state, {"made_of": made_of})
                if training.evaluate_every and done % training.evaluate_every == 0 and done < steps:
                    record.evaluation(evaluator(state.params, done, seen[done]))
            last = evaluator(state.params, steps, seen[steps])
            record.evaluation(last)
    draft = evaluator.draft(state.params)
    draft = dataclasses.replace(draft, training={**draft.training, "evaluation": last.as_json()})
    if isinstance(draft, MedusaDraft):
        draft = with_tree(draft, evaluator, last, training.nodes)
    task.save(workdir / "draft", draft)
    return draft, last


def settings(engine: Engine, training: Training) -> dict[str, Any]:
    """What may change from start to start, as JSON."""
    free = {name: value for name, value in dataclasses.asdict(training).items() if name not in MADE_OF}
    return {"mesh": dict(engine.target.mesh.shape), **free}


def identity(engine: Engine, task, optimizer: Optimizer, training: Training, material: Material) -> dict[str, Any]:
    """What may not change between the starts of one run, as JSON."""
    target = engine.target
    made_of = {
        "target": target.fingerprint,
        "tokenizer": target.tokenizer.fingerprint,
        "template_args": engine.template_args,
        "dtype": jnp.dtype(target.dtype).name,
        "data": material.fingerprint,
        "method": type(task).__name__.lower(),
        **{f"task.{name}": value for name, value in dataclasses.asdict(task).items()},
        **{f"optimizer.{name}": value for name, value in dataclasses.asdict(optimizer).items()},
        **{f"training.{name}": getattr(training, name) for name in MADE_OF},
    }
    return json.loads(json.dumps(made_of))


def check_same(path: Path, made_of: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError naming what differs if `path` records a run made of something else; says which of the settings
    that may change have changed."""
    if not path.exists():
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for name, value in made_of.items():
        if before["made_of"].get(name) != value:
            raise ValueError(
                f"{path.parent} holds a run with {name} {before['made_of'].get(name)!r}, and now it is {value!r}; "
                "go on with the same, or train in another --workdir"
            )
    for name, value in now.items():
        if before["settings"].get(name) != value:
            say(f"changed since the run began: {name} from {before['settings'].get(name)!r} to {value!r}")


def read(target: Target, task, training: Training, material: Material, workdir: Path, made_of: Mapping[str, Any]):
    """The run's batches, as a random-access source of (Batch, target states or None), and their plan."""

    def planned(examples: Sequence[data.Example], epochs: int, accumulate: int) -> packing.Plan:
        return packing.plan(
            [len(example.ids) for example in examples],
            tokens_per_batch=training.tokens_per_batch,
            ladder=training.rows,
            seed=training.seed,
            epochs=epochs,
            row_multiple=1,
            accumulate=accumulate,
        )

    if not training.features:
        plan = planned(material.train, training.epochs, training.accumulate)
        return FeatureBatches(packing.Batches(material.train, plan)), plan
    text = {name: value for name, value in made_of.items() if not name.startswith(("task.", "optimizer."))}
    taps, once = task.taps(target.config), planned(material.train, 1, 1)
    kept = build(workdir / "features", target, material.train, once, taps, text, spans=task.spans)
    examples = trim(material.train) if task.spans else material.train
    plan = planned(examples, training.epochs, training.accumulate)
    return FeatureBatches(packing.Batches(examples, plan), kept, examples), plan


def with_tree(draft: MedusaDraft, evaluator: Evaluator, last: Evaluation, nodes: int) -> MedusaDraft:
    """The draft with what its calibration measured and the tree that is used by default: the fastest by the engine's
    cost table, else one of `nodes` nodes."""
    costs, nodes = evaluator.engine.costs, min(nodes, len(last.paths) + 1)
    if costs is None:
        say(f"default tree: {nodes} nodes; with --cost_table=FILE, which launch.costs writes, it is the fastest here")
    else:
        nodes = methods.fastest_tree(last.frequency, costs, evaluator.draft_ms("tree"))
        say(f"default tree: {nodes} nodes, the fastest by the cost table")
    return dataclasses.replace(draft, accuracy=last.accuracy, paths=last.paths, frequency=last.frequency, nodes=nodes)
