"""How good a draft is: the ranks of the right tokens on held-out text, and tokens per cycle on the served path."""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from specjax import trees
from specjax.bench.loops import onset
from specjax.bench.passes import draft_job
from specjax.bench.timing import pooled
from specjax.decode.engine import Engine, spread
from specjax.decode.request import GenerationStats, Sampling
from specjax.decode.target import Target
from specjax.trees import Path
from specjax.verify.target_first import TargetFirst
from train_drafts.data import Example
from train_drafts.packing import Batches, plan
from train_drafts.step import in_dtype, packed_pass, place

RANKS, PATHS = 10, 63  # what a calibration records: candidates of each guess, and nodes of the largest static tree
ROUND = 64  # held-out rows are multiples of it, so that they can be taken in chunks
LONGEST = 512  # tokens of a prompt that is served in an evaluation
TIMINGS = 9  # of a draft


class HeldOut:
    """Held-out text and the target's states of it, computed once."""

    def __init__(self, task, target: Target, graph: nnx.GraphDef, examples: Sequence[Example], vocabulary):
        lengths = [len(example.ids) for example in examples]
        longest = -(-max(lengths) // ROUND) * ROUND
        ladder = sorted({min(512, longest), longest})
        single = plan(lengths, tokens_per_batch=1, ladder=ladder, seed=0, epochs=1, row_multiple=1)
        batches = Batches(examples, single)
        forward = packed_pass(target, task.taps(target.config))

        def ranks(leaves, params, vocabulary, batch, states):
            draft = in_dtype(graph, params, target.dtype)
            labels, taught = task.labels(batch, vocabulary[1])
            return task.ranks(draft, target.module(leaves), batch, states, labels), taught

        self._target, self._vocabulary, self._ranks, self._held = target, vocabulary, jax.jit(ranks), []
        for number in range(len(batches)):
            batch = jax.tree.map(lambda x: x[0], batches[number])
            with jax.set_mesh(target.mesh):
                self._held.append((place(target, batch, axis=0), forward(batch)))

    def ranks(self, params: nnx.State) -> np.ndarray:
        """Rank of the right token at each guess wherever the first one is taught: [n, guesses]; a number beyond any
        rank where the text has ended or the draft cannot say the token."""
        found = []
        for batch, states in self._held:
            with jax.set_mesh(self._target.mesh):
                ranks, taught = self._ranks(self._target.leaves, params, self._vocabulary, batch, states)
            taught = np.asarray(taught)
            found.append(np.where(taught, np.asarray(ranks), np.iinfo(np.int32).max)[taught[..., 0]])
        return np.concatenate(found)


def accuracy(ranks: np.ndarray) -> np.ndarray:
    """ranks [n, guesses] -> how often the candidate of each rank is the right one [guesses, RANKS]."""
    return np.stack([(ranks == rank).mean(0) for rank in range(RANKS)], axis=1)


@dataclasses.dataclass(frozen=True)
class Served:
    """What the served decode path did: counts over all prompts, those before a text begins to repeat itself, and the
    texts. `speedup`: over eager at batch 1, predicted from the counts and the cost table (None: there is no table)."""

    stats: GenerationStats
    before_loop: GenerationStats
    texts: list[str]
    speedup: float | None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A draft after `step` steps on `tokens` supervised tokens: what `accuracy` gives, its tree nodes by worth
    (`trees.ranked`), and what it did when served, by shape and temperature ("tree_T0")."""

    step: int
    tokens: int
    accuracy: np.ndarray
    paths: tuple[Path, ...]
    frequency: np.ndarray
    served: dict[str, Served]

    def as_json(self) -> dict[str, Any]:
        each = self.served.items()
        return {
            "step": self.step,
            "tokens": self.tokens,
            "accuracy": self.accuracy[:, 0].tolist(),
            "tokens_per_cycle": {name: served.stats.tokens_per_cycle for name, served in each},
            "tokens_per_cycle_before_loop": {name: served.before_loop.tokens_per_cycle for name, served in each},
            "acceptance_by_depth": {name: served.stats.acceptance_by_depth for name, served in each},
            "predicted_speedup": {name: served.speedup for name, served in each},
        }

    def line(self) -> str:
        """The evaluation in one sentence."""
        guesses = ", ".join(f"{share:.3f}" for share in self.accuracy[:, 0])
        served = ", ".join(f"{name} {served.stats.tokens_per_cycle:.2f}" for name, served in self.served.items())
        return f"step {self.step}: held-out accuracy by guess {guesses}; tokens per cycle: {served}"


class Evaluator:
    """Calibrates and serves the draft of a run, on examples it is not trained on.

    The first `prompts` of them that are not longer than LONGEST tokens are answered, together, with `new_tokens` each.
    The shapes are compiled once; new heads take the place of the old.
    """

    def __init__(self, engine: Engine, trainer, material, prompts: int, new_tokens: int):
        self.engine, self._trainer, self._material = engine, trainer, material
        self._held = HeldOut(trainer.task, engine.target, trainer.graph, material.held, trainer.vocabulary)
        asked = (example.ids[: int(np.argmax(example.mask))].tolist() for example in material.held)
        self._prompts = [ids for ids in asked if 0 < len(ids) <= LONGEST and len(ids) < engine.max_context][:prompts]
        if not self._prompts:
            raise ValueError(f"no held-out prompt has {LONGEST} tokens or fewer; give data with shorter prompts too")
        self._new_tokens, self._engines, self._draft_ms = new_tokens, {}, {}

    def __call__(self, params: nnx.State, step: int, tokens: int) -> Evaluation:
        """Evaluate `params` after `step` steps on `tokens` supervised tokens."""
        ranks = self._held.ranks(params)
        paths, frequency = trees.ranked(np.minimum(ranks, PATHS), PATHS)
        if not paths:  # nothing was right, yet a draft has a tree
            paths, frequency = trees.chain(1), np.zeros(1)
        self._load(self.draft(params))
        shapes = itertools.product(self._engines, (0.0, 1.0))
        served = {f"{shape}_T{temperature:g}": self._serve(shape, temperature) for shape, temperature in shapes}
        return Evaluation(step, int(tokens), accuracy(ranks), paths, frequency, served)

    def draft(self, params: nnx.State):
        """The draft of `params`, not calibrated."""
        engine, target = self.engine, self.engine.target
        about = {
            "target": {
                "name": target.name,
                "fingerprint": target.fingerprint,
                "width": target.config.width,
                "vocab_size": target.config.vocab_size,
                "tokenizer": target.tokenizer.fingerprint,
            },
            "template_args": engine.template_args,
            "training": {"data": self._material.fingerprint, "examples": len(self._material.train)},
        }
        return self._trainer.task.export(params, self._material.token_ids, target, about)

    def draft_ms(self, shape: str) -> float:
        """Milliseconds that one draft of that shape takes for one row, measured the first time it is asked; after an
        evaluation."""
        if shape not in self._draft_ms:
            job = draft_job(self._engines[shape], 1, self.engine.buckets[0])
            job.seconds()
            self._draft_ms[shape] = 1e3 * statistics.median(job.seconds() for _ in range(TIMINGS))
        return self._draft_ms[shape]

    def _load(self, draft) -> None:
        """Let the engines of all shapes serve `draft`."""
        for shape, drafter in self._trainer.task.drafters(draft, self.engine.target).items():
            if shape not in self._engines:
                self._engines[shape] = self.engine.with_method((drafter, TargetFirst(drafter.depth)))
            self._engines[shape].replace_drafter(drafter)

    def _serve(self, shape: str, temperature: float) -> Served:
        engine, together = self._engines[shape], len(self._prompts)
        wishes = spread(Sampling(max_new_tokens=self._new_tokens, temperature=temperature), together)
        results = engine.generate(self._prompts, wishes, batch_size=together)
        stats = before = pooled([result.stats for result in results])
        onsets = [onset(result.tokens) for result in results]
        if any(spot is not None for spot in onsets):  # the same seeds write the same texts
            shorter = [
                wish if spot is None else dataclasses.replace(wish, max_new_tokens=max(spot, 1))
                for wish, spot in zip(wishes, onsets, strict=True)
            ]
            cut = engine.generate(self._prompts, shorter, batch_size=together)
            before = pooled([result.stats for result in cut])
        return Served(stats, before, [result.text for result in results], self._speedup(shape, stats))

    def _speedup(self, shape: str, stats: GenerationStats) -> float | None:
        costs, blocks = self.engine.costs, self._engines[shape].drafter.blocks
        if costs is None:
            return None
        return stats.tokens_per_cycle / costs.break_even(blocks[-1], 1, costs.contexts[0], self.draft_ms(shape))
