"""How good a draft is: the ranks of the right tokens on held-out text, and tokens per cycle on the served path."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from specjax import trees
from specjax.decode.engine import Engine
from specjax.decode.request import GenerationStats, Sampling
from specjax.decode.target import Target
from specjax.drafters.medusa import from_draft
from specjax.loading.drafts import MedusaDraft
from specjax.trees import Path
from specjax.verify.target_first import TargetFirst
from train_drafts.data import Example
from train_drafts.packing import Batches, plan
from train_drafts.step import hidden_states, in_dtype, place

RANKS, PATHS = 10, 63  # what a draft records of its calibration: ranks of each head, and nodes of the largest tree
ROUND = 64  # held-out rows are multiples of it, so that they can be taken in chunks
LONGEST = 512  # tokens of a prompt that is served in an evaluation
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
        forward = jax.jit(lambda leaves, batch: hidden_states(target.module(leaves), batch))

        def ranks(leaves, params, draft_ids, batch, hidden):
            heads = in_dtype(graph, params, target.dtype)
            labels, taught = task.labels(batch, draft_ids)
            return task.ranks(heads, target.module(leaves), hidden, labels), taught

        self._target, self._draft_ids, self._ranks, self._held = target, draft_ids, jax.jit(ranks), []
        for number in range(len(batches)):
            with jax.set_mesh(target.mesh):
                batch = place(target, jax.tree.map(lambda x: x[0], batches[number]), axis=0)
                self._held.append((batch, forward(target.leaves, batch)))

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
    """What the served decode path did: counts over all prompts, and the texts."""

    stats: GenerationStats
    texts: list[str]


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
        return {
            "step": self.step,
            "tokens": self.tokens,
            "accuracy": self.accuracy[:, 0].tolist(),
            "tokens_per_cycle": {name: served.stats.tokens_per_cycle for name, served in self.served.items()},
            "acceptance_by_depth": {name: served.stats.acceptance_by_depth for name, served in self.served.items()},
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
        self._engine, self._trainer, self._material = engine, trainer, material
        self._held = HeldOut(trainer.task, engine.target, trainer.graph, material.held, trainer.vocabulary[1])
        asked = (example.ids[: int(np.argmax(example.mask))].tolist() for example in material.held)
        self._prompts = [ids for ids in asked if 0 < len(ids) <= LONGEST and len(ids) < engine.max_context][:prompts]
        if not self._prompts:
            raise ValueError(f"no held-out prompt has {LONGEST} tokens or fewer; give data with shorter prompts too")
        self._new_tokens, self._engines = new_tokens, {}

    def __call__(self, params: nnx.State, step: int, tokens: int) -> Evaluation:
        """Evaluate `params` after `step` steps on `tokens` supervised tokens."""
        ranks = self._held.ranks(params)
        paths, frequency = trees.ranked(np.minimum(ranks, PATHS), PATHS)
        if not paths:  # nothing was right, yet a draft has a tree
            paths, frequency = trees.chain(1), np.zeros(1)
        draft, served = self.draft(params), {}
        for name, shape in SHAPES.items():
            fitting = tuple(path for path in shape if len(path) <= len(ranks[0]))
            for temperature in (0.0, 1.0):
                served[f"{name}_T{temperature:g}"] = self._serve(draft, fitting, temperature)
        return Evaluation(step, int(tokens), accuracy(ranks), paths, frequency, served)

    def draft(self, params: nnx.State) -> MedusaDraft:
        """The draft of `params`, not calibrated."""
        engine, target = self._engine, self._engine.target
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

    def _serve(self, draft: MedusaDraft, shape: tuple[Path, ...], temperature: float) -> Served:
        drafter = from_draft(draft, shape, self._engine.target)
        if shape not in self._engines:
            self._engines[shape] = self._engine.with_method((drafter, TargetFirst(drafter.depth)))
        engine = self._engines[shape]
        engine.replace_drafter(drafter)
        wish = Sampling(max_new_tokens=self._new_tokens, temperature=temperature)
        results = engine.generate(self._prompts, wish, batch_size=len(self._prompts))
        stats = functools.reduce(operator.add, (result.stats for result in results))
        return Served(stats, [result.text for result in results])
