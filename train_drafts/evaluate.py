"""How good a draft is: the ranks of the right tokens on held-out text, and tokens per cycle on the served path."""

import dataclasses
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
from specjax.drafters.medusa import from_draft
from specjax.loading.drafts import MedusaDraft
from specjax.trees import Path
from specjax.verify.target_first import TargetFirst
from train_drafts.data import Example
from train_drafts.packing import Batches, plan
from train_drafts.step import in_dtype, packed_pass, place

RANKS, PATHS = 10, 63  # what a draft records of its calibration: ranks of each head, and nodes of the largest tree
ROUND = 64  # held-out rows are multiples of it, so that they can be taken in chunks
LONGEST = 512  # tokens of a prompt that is served in an evaluation
TIMINGS = 9  # of a draft
SHAPES: dict[str, tuple[Path, ...]] = {  # fixed, so that curves compare and nothing compiles again during training
    "chain": ((0,), (0, 0), (0, 0, 0)),
    "tree": ((0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0)),
}


class HeldOut:
    """Held-out text and the target's hidden states of it, computed once."""

    def __init__(self, task, target: Target, graph: nnx.GraphDef, examples: Sequence[Example], draft_ids):
        lengths = [len(example.ids) for example in examples]
        longest = -(-max(lengths) // ROUND) * ROUND
        ladder = sorted({min(512, longest), longest})
        single = plan(lengths, tokens_per_batch=1, ladder=ladder, seed=0, epochs=1, row_multiple=1)
        batches = Batches(examples, single)
        forward = packed_pass(target)

        def ranks(leaves, params, draft_ids, batch, hidden):
            heads = in_dtype(graph, params, target.dtype)
            labels, taught = task.labels(batch, draft_ids)
            return task.ranks(heads, target.module(leaves), hidden, labels), taught

        self._target, self._draft_ids, self._ranks, self._held = target, draft_ids, jax.jit(ranks), []
        for number in range(len(batches)):
            batch = jax.tree.map(lambda x: x[0], batches[number])
            with jax.set_mesh(target.mesh):
                self._held.append((place(target, batch, axis=0), forward(batch)))

    def ranks(self, params: nnx.State) -> np.ndarray:
        """Rank of the right token under each head wherever the first head is taught: [n, heads]; a number beyond any
        rank where the text has ended or the draft cannot say the token."""
        found = []
        for batch, hidden in self._held:
            with jax.set_mesh(self._target.mesh):
                ranks, taught = self._ranks(self._target.leaves, params, self._draft_ids, batch, hidden)
            taught = np.asarray(taught)
            found.append(np.where(taught, np.asarray(ranks), np.iinfo(np.int32).max)[taught[..., 0]])
        return np.concatenate(found)


def accuracy(ranks: np.ndarray) -> np.ndarray:
    """ranks [n, heads] -> how often each head's guess of each rank is right [heads, RANKS]."""
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
        heads = ", ".join(f"{share:.3f}" for share in self.accuracy[:, 0])
        served = ", ".join(f"{name} {served.stats.tokens_per_cycle:.2f}" for name, served in self.served.items())
        return f"step {self.step}: held-out accuracy by head {heads}; tokens per cycle: {served}"


class Evaluator:
    """Calibrates and serves the draft of a run, on examples it is not trained on.

    The first `prompts` of them that are not longer than LONGEST tokens are answered, together, with `new_tokens` each.
    The shapes are compiled once; new heads take the place of the old.
    """

    def __init__(self, engine: Engine, trainer, material, prompts: int, new_tokens: int):
        self.engine, self._trainer, self._material = engine, trainer, material
        self._held = HeldOut(trainer.task, engine.target, trainer.graph, material.held, trainer.vocabulary[1])
        asked = (example.ids[: int(np.argmax(example.mask))].tolist() for example in material.held)
        self._prompts = [ids for ids in asked if 0 < len(ids) <= LONGEST and len(ids) < engine.max_context][:prompts]
        if not self._prompts:
            raise ValueError(f"no held-out prompt has {LONGEST} tokens or fewer; give data with shorter prompts too")
        self._new_tokens, self._engines, self._draft_ms = new_tokens, {}, None

    def __call__(self, params: nnx.State, step: int, tokens: int) -> Evaluation:
        """Evaluate `params` after `step` steps on `tokens` supervised tokens."""
        ranks = self._held.ranks(params)
        paths, frequency = trees.ranked(np.minimum(ranks, PATHS), PATHS)
        if not paths:  # nothing was right, yet a draft has a tree
            paths, frequency = trees.chain(1), np.zeros(1)
        draft, served = self.draft(params), {}
        for name, shape in SHAPES.items():
            for temperature in (0.0, 1.0):
                served[f"{name}_T{temperature:g}"] = self._serve(draft, shape, temperature)
        return Evaluation(step, int(tokens), accuracy(ranks), paths, frequency, served)

    def draft(self, params: nnx.State) -> MedusaDraft:
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
        return self._trainer.task.export(params, self._material.token_ids, about)

    def draft_ms(self, draft: MedusaDraft) -> float:
        """Milliseconds that one draft takes for one row, measured the first time it is asked."""
        if self._draft_ms is None:
            largest = max(SHAPES.values(), key=len)
            job = draft_job(self._serving(draft, largest), 1, self.engine.buckets[0])
            job.seconds()
            self._draft_ms = 1e3 * statistics.median(job.seconds() for _ in range(TIMINGS))
        return self._draft_ms

    def _serving(self, draft: MedusaDraft, shape: tuple[Path, ...]) -> Engine:
        """The engine that serves `draft` in that shape, as far as its heads reach."""
        fitting = tuple(path for path in shape if len(path) <= len(draft.weight))
        drafter = from_draft(draft, fitting, self.engine.target)
        if fitting not in self._engines:
            self._engines[fitting] = self.engine.with_method((drafter, TargetFirst(drafter.depth)))
        self._engines[fitting].replace_drafter(drafter)
        return self._engines[fitting]

    def _serve(self, draft: MedusaDraft, shape: tuple[Path, ...], temperature: float) -> Served:
        engine, together = self._serving(draft, shape), len(self._prompts)
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
        return Served(stats, before, [result.text for result in results], self._speedup(draft, engine, stats))

    def _speedup(self, draft: MedusaDraft, engine: Engine, stats: GenerationStats) -> float | None:
        costs = self.engine.costs
        if costs is None:
            return None
        block = engine.drafter.blocks[-1]
        return stats.tokens_per_cycle / costs.break_even(block, 1, costs.contexts[0], self.draft_ms(draft))
