"""What training says of a draft is what serving makes of it: drafts learn texts by heart, then serve them."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from scripted import prompts, target

from specjax import Engine, Sampling, trees
from specjax.bench import layer_ids
from specjax.loading.eagle import load_eagle
from train_drafts import loop
from train_drafts.data import Example
from train_drafts.evaluate import Evaluation, Evaluator
from train_drafts.loop import Training
from train_drafts.material import Material
from train_drafts.step import Optimizer
from train_drafts.tasks import Eagle, Medusa, eagle, medusa

CHAIN, NEW = 3, 1 + 4 * 4  # prefill's own token, then four full cycles
TASKS = {
    "medusa": Medusa(heads=CHAIN + 1, layers=2, draft_vocab=97, decay=1.0),
    "eagle": Eagle(steps=CHAIN, states=(1, 2), draft_vocab=97, loss="ce", decay=1.0),
}
SHAPES = {"medusa": {"chain": trees.chain(CHAIN)}, "eagle": {"chain": (CHAIN + 1, CHAIN, 1)}}


@dataclasses.dataclass
class Learnt:
    """A draft that knows its texts: the run's folder, its evaluation, evaluator, parameters and prompts."""

    engine: Engine
    workdir: Path
    last: Evaluation
    evaluator: Evaluator
    params: object
    prompts: list[list[int]]


def learn(name: str, workdir: Path) -> Learnt:
    engine = Engine(target("", hidden_size=64, num_hidden_layers=3), "eager", chunk=16, max_context=64)
    asked = prompts((4, 5, 6, 7, 8, 9, 10, 11))
    answers = [result.tokens for result in engine.generate(asked, Sampling(max_new_tokens=NEW), batch_size=8)]
    examples = [
        Example(np.array([*ask, *answer], np.int32), np.arange(len(ask) + NEW) >= len(ask), "")
        for ask, answer in zip(asked, answers)
    ]
    everything = np.arange(97, dtype=np.int32)
    material = Material(examples, examples, everything, everything, "learnt by heart")
    training = Training(
        max_tokens=32, rows=(32,), tokens_per_batch=256, epochs=150, log_every=100, checkpoint_every=1000,
        prompts=8, new_tokens=NEW,
    )  # fmt: skip
    kept = {}

    class Kept(Evaluator):
        def __call__(self, params, step, tokens):
            kept["evaluator"], kept["params"] = self, params
            return super().__call__(params, step, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr({"medusa": medusa, "eagle": eagle}[name], "SHAPES", SHAPES[name])
        patch.setattr(loop, "prepare", lambda *args, **named: material)
        patch.setattr(loop, "Evaluator", Kept)
        _, last = loop.run(engine, TASKS[name], Optimizer(learning_rate=1e-2), training, Path("unread"), workdir)
    return Learnt(engine, workdir, last, kept["evaluator"], kept["params"], asked)


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> Learnt:
    return learn("medusa", tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def layer(tmp_path_factory) -> Learnt:
    return learn("eagle", tmp_path_factory.mktemp("layer"))


def evaluated(learnt: Learnt, change) -> Evaluation:
    """The heads changed by `change`, evaluated again."""
    params = learnt.params
    changed = type(params)({name: value.replace(change(name, value[...])) for name, value in params.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(medusa, "SHAPES", SHAPES["medusa"])
        return learnt.evaluator(changed, 0, 0)


@pytest.mark.parametrize("name", ["heads", "layer"])
def test_served_acceptance_is_teacher_forced_accuracy(name, request):
    last = request.getfixturevalue(name).last
    served = last.served["chain_T0"].stats
    assert last.accuracy[0, 0] > 0.95
    assert served.acceptance_by_depth[0] == pytest.approx(last.accuracy[0, 0], abs=0.02)
    assert served.tokens_per_cycle > 0.8 * (CHAIN + 1)
    assert served.cycles < 8 * (NEW - 1) / 3


def test_evaluation_sees_heads_that_learnt_other_positions(heads):
    """Labels off by one: each head says what the next one should."""
    off = evaluated(heads, lambda name, value: value if name == "lm_head" else jnp.roll(value, -1, axis=0))
    assert off.accuracy[0, 0] < 0.5 and off.served["chain_T0"].stats.acceptance_by_depth[0] < 0.5
    assert off.served["chain_T0"].stats.tokens_per_cycle < 0.6 * heads.last.served["chain_T0"].stats.tokens_per_cycle
    assert off.served["chain_T0"].texts == heads.last.served["chain_T0"].texts


def test_evaluation_sees_heads_that_were_swapped(heads):
    def swapped(name, value):
        return value if name == "lm_head" else value[jnp.array([0, 2, 1, 3])]

    got, whole = (run.served["chain_T0"].stats for run in (evaluated(heads, swapped), heads.last))
    assert got.acceptance_by_depth[0] == pytest.approx(whole.acceptance_by_depth[0], abs=0.1)
    assert got.acceptance_by_depth[1] < whole.acceptance_by_depth[1] - 0.3


@pytest.mark.parametrize("name", ["heads", "layer"])
def test_the_finished_draft_serves_what_the_evaluation_said(name, request):
    learnt = request.getfixturevalue(name)
    method = f"{'medusa' if name == 'heads' else 'eagle'}:chain{CHAIN + 1}"
    engine = Engine(learnt.engine.target, method, learnt.workdir, chunk=16, max_context=64)
    results = engine.generate(learnt.prompts, Sampling(max_new_tokens=NEW), batch_size=8)
    stats = sum((result.stats for result in results[1:]), results[0].stats)
    assert stats == learnt.last.served["chain_T0"].stats
    assert [result.text for result in results] == learnt.last.served["chain_T0"].texts


def test_a_draft_that_reads_the_layer_before_or_after_its_own_is_told_apart(layer):
    """Each convention of counting layers, read by the other, is found to be off by one, and the right one by none."""
    draft = load_eagle(layer.workdir)
    for off in layer_ids.SHIFTS:
        read = dataclasses.replace(draft, taps=tuple(tap + off for tap in draft.taps))
        drafts = layer_ids.shifted(read, layer.engine.target.config.layers)
        assert drafts.keys() == {shift for shift in layer_ids.SHIFTS if 0 <= 1 + off + shift <= 2}
        found = dict(layer_ids.tokens_per_cycle(layer.engine, drafts, layer.prompts, NEW))
        assert layer_ids.better(found) == -off
        assert found[-off] == pytest.approx(layer.last.served["chain_T0"].stats.tokens_per_cycle)


def test_layer_ids_of_a_draft_that_fuses_none_are_not_checked(layer):
    draft = load_eagle(layer.workdir)
    with pytest.raises(ValueError, match="reads the target's last state alone"):
        layer_ids.shifted(dataclasses.replace(draft, config=dataclasses.replace(draft.config, states=0)), 3)
