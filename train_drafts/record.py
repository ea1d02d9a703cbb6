"""What a run shows while it goes on: scalars and texts in TensorBoard, every evaluation as JSON and as a picture."""

import json
import sys
import time
from pathlib import Path

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from tensorboardX import SummaryWriter
from tqdm import tqdm

from specjax.telemetry import write_json
from train_drafts.evaluate import Evaluation
from train_drafts.packing import Batch
from train_drafts.step import Metrics

matplotlib.use("Agg")
SCHEMA_VERSION = 1


class Record:
    """The record of a run in `workdir` from step `start` on; `bar` shows the steps, `schedule` is the learning rate."""

    def __init__(self, workdir: Path, writer: SummaryWriter, bar: tqdm, start: int, log_every: int, schedule):
        self._workdir, self._writer, self._bar = workdir, writer, bar
        self._log_every, self._schedule, self._unchecked = log_every, schedule, {}
        path = workdir / "results.json"
        before = json.loads(path.read_text(encoding="utf-8"))["evaluations"] if path.exists() else []
        self._evaluations = [evaluation for evaluation in before if evaluation["step"] <= start]
        self._restart_clock()

    def step(self, done: int, metrics: Metrics, batch: Batch) -> None:
        """Note a step; every few of them its metrics are fetched, checked and written, which waits for the device."""
        self._places += int((batch.example >= 0).sum())
        self._unchecked[done] = metrics.grad_norm
        self._bar.update()
        if done % self._log_every:
            return
        self.check()
        metrics = jax.device_get(metrics)
        tokens_per_second = self._places / (time.perf_counter() - self._began)
        self._bar.set_postfix_str(f"loss {metrics.objective:.3f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
        scalars = {
            "train/objective": metrics.objective,
            "train/learning_rate": float(self._schedule(done - 1)),
            "train/grad_norm": metrics.grad_norm,
            "train/tokens_per_second": tokens_per_second,
            "train/mask_ratio": batch.mask.sum() / max(1, (batch.example >= 0).sum()),
        }
        for head, (loss, accuracy) in enumerate(zip(metrics.loss, metrics.accuracy), start=1):
            scalars |= {f"train/loss/head_{head}": loss, f"train/accuracy/head_{head}": accuracy}
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, done)
        self._restart_clock()

    def check(self) -> None:
        """Raises ValueError if the gradient of a step since the last check is no number. Waits for the device."""
        for step, norm in jax.device_get(self._unchecked).items():
            if not np.isfinite(norm):
                raise ValueError(
                    f"the gradient of step {step} is not finite; lower optimizer.learning_rate, in another --workdir"
                )
        self._unchecked = {}

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation to the terminal, to TensorBoard, results.json and training.png."""
        self._bar.write(evaluation.line(), file=sys.stderr)
        step = evaluation.step
        for head, ranks in enumerate(evaluation.accuracy, start=1):
            self._writer.add_scalar(f"held_out/accuracy/head_{head}", ranks[0], step)
        for name, served in evaluation.served.items():
            self._writer.add_scalar(f"held_out/tokens_per_cycle/{name}", served.stats.tokens_per_cycle, step)
            before = served.before_loop.tokens_per_cycle
            self._writer.add_scalar(f"held_out/tokens_per_cycle_before_loop/{name}", before, step)
            if served.speedup is not None:
                self._writer.add_scalar(f"held_out/predicted_speedup/{name}", served.speedup, step)
            self._writer.add_text(f"served/{name}", served.texts[0], step)
            for depth, share in enumerate(served.stats.acceptance_by_depth, start=1):
                self._writer.add_scalar(f"held_out/acceptance/{name}/depth_{depth}", share, step)
        self._writer.flush()
        self._evaluations = [other for other in self._evaluations if other["step"] != step] + [evaluation.as_json()]
        write_json(self._workdir / "results.json", {"schema_version": SCHEMA_VERSION, "evaluations": self._evaluations})
        self._draw()
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._began, self._places = time.perf_counter(), 0

    def _draw(self) -> None:
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        tokens = [evaluation["tokens"] for evaluation in self._evaluations]
        for name in self._evaluations[-1]["tokens_per_cycle"]:
            values = [evaluation["tokens_per_cycle"].get(name) for evaluation in self._evaluations]
            axes.plot(tokens, values, marker="o", label=name)
        axes.set(xlabel="answer tokens trained on", ylabel="tokens per cycle, held-out prompts")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self._workdir / "training.png", dpi=120)
