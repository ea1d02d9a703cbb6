"""One training step: its loss equals numpy's however rows are packed, split or sharded; only the draft changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from medusa_test import reference_heads
from scripted import FIELDS, MESHES, rms_norm, states, target, tensors

from train_drafts.packing import Batch
from train_drafts.step import Optimizer, TrainState, make_step, place
from train_drafts.tasks import Medusa, base

VOCAB, WIDTH, ROW = FIELDS["vocab_size"], FIELDS["hidden_size"], 32
TASK = Medusa(heads=3, draft_vocab=15, loss="ce", scale=0.3, decay=0.7)
IDS = np.sort(np.random.default_rng(4).choice(VOCAB, 15, replace=False)).astype(np.int32)


def packed(rows: int, length: int = ROW, seed: int = 0) -> Batch:
    """Rows [R, T] of two sequences and padding, each with an answer, a gap and another answer; each row its own mask.
    Half of the tokens are in the draft's vocabulary."""
    rng = np.random.default_rng(seed)
    batch = Batch(*(np.zeros((rows, length), kind) for kind in (np.int32, np.int32, np.int32, np.bool_, np.int32)))
    batch.tokens[:] = np.where(rng.random((rows, length)) < 0.5, rng.choice(IDS, (rows, length)), 3)
    for row in range(rows):
        start = 0
        for segment, size in enumerate(rng.integers(9, 16, 2), start=1):
            here = row, slice(start, start + size)
            batch.segment[here], batch.position[here] = segment, np.arange(size)
            batch.mask[here] = (np.arange(size) > rng.integers(1, 6)) & (np.arange(size) != rng.integers(7, 12))
            start += size
    return batch


def longer(batch: Batch, length: int) -> Batch:
    """The same rows with more padding."""
    return Batch(*(np.pad(x, [(0, 0), (0, length - x.shape[1])]) for x in batch))


def vocabulary(task: Medusa, place_of) -> tuple:
    if not task.draft_vocab:
        return None, None
    inverse = np.full(VOCAB, -1, np.int32)
    inverse[IDS] = np.arange(len(IDS))
    everywhere = jax.NamedSharding(place_of.mesh, jax.P())
    return jax.device_put(IDS, everywhere), jax.device_put(inverse, everywhere)


def noisy(params: nnx.State, rows: int, real: nnx.State) -> nnx.State:
    """A draft that has learnt something at random: not in its LM head's padding, nor beyond the shapes of `real`."""
    rng, learnt = np.random.default_rng(9), []
    for (path, variable), (_, shape) in zip(nnx.to_flat_state(params), nnx.to_flat_state(real), strict=True):
        old, inner = variable.get_value(), shape.get_value().shape
        noise = rng.normal(0, WIDTH**-0.5, inner).astype(np.float32)
        if path == ("lm_head",):
            noise[rows:] = 0
        noise = np.pad(noise, [(0, size - part) for size, part in zip(old.shape, inner)])
        learnt.append((path, variable.replace(jax.device_put(np.asarray(old) + noise, old.sharding))))
    return nnx.from_flat_state(learnt)


@functools.cache
def begin(task: Medusa, mesh: str = "", dtype: str = "float32"):
    """Target, graph, the draft's ids and the same host parameters on any mesh."""
    place_of = target(mesh, dtype)
    graph, declared = task.declare(place_of)
    ids = vocabulary(task, place_of)
    params = noisy(task.init(place_of, ids[0]), task.draft_vocab, task.declare(target())[1])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, declared)
    return place_of, graph, ids, params


def some_states(rows: int) -> np.ndarray:
    """What a target's last layer might give [R, T, 1, D]."""
    return np.random.default_rng(2).normal(0, 0.5, (rows, ROW, 1, WIDTH)).astype(np.float32)


def normed(states: np.ndarray) -> np.ndarray:
    """Last states [R, T, 1, D] as the target's LM head reads them [R, T, D]."""
    return rms_norm(states[:, :, -1].astype(np.float64), tensors(FIELDS)["model.norm.weight"], FIELDS)


def step(task: Medusa, batch: Batch, states=None, mesh: str = "", accumulate: int = 1):
    """(state, metrics) of one step of plain gradient descent at rate 1, so that parameters tell the gradient."""
    place_of, graph, ids, params = begin(task, mesh)
    params = jax.tree.map(jnp.copy, params)
    update = make_step(task, place_of, graph, optax.sgd(1.0))
    parts = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), (batch, states))
    with jax.set_mesh(place_of.mesh):
        state = TrainState(jnp.int32(0), params, optax.sgd(1.0).init(params))
        return jax.device_get(update(place_of.leaves, ids, state, *place(place_of, parts, axis=1)))


def gradient(task: Medusa, state: TrainState) -> dict[str, np.ndarray]:
    """By the parameter's name; without what only fills up the mesh."""
    before, after = (
        {path[-1]: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(params)}
        for params in (begin(task)[3], state.params)
    )
    return {name: old - after[name][tuple(map(slice, old.shape))] for name, old in before.items()}


# What is learnt


def reference(task: Medusa, draft, batch: Batch, hidden: np.ndarray) -> dict[str, np.ndarray]:
    """Place by place in float64: the task's text, written as loops."""
    head = tensors(FIELDS)["lm_head.weight"].astype(np.float64)
    ids = IDS if task.draft_vocab else np.arange(VOCAB)
    loss, right, known, taught = (np.zeros(task.heads) for _ in range(4))
    for row, t, i in np.ndindex(*batch.tokens.shape, task.heads):
        root, label = t + 1, t + 2 + i
        if label >= batch.tokens.shape[1] or not (batch.mask[row, root] and batch.mask[row, label]):
            continue
        if len({batch.segment[row, place] for place in (t, root, label)}) > 1:
            continue
        taught[i] += 1
        if batch.tokens[row, label] not in ids:
            continue
        known[i] += 1
        guess = reference_heads(draft, hidden[row, t : t + 1])[0, i]
        number = list(ids).index(batch.tokens[row, label])
        right[i] += np.argmax(guess) == number
        q, p = (np.exp(x - x.max()) for x in (guess, head[ids] @ hidden[row, t + 1 + i]))
        q, p = q / q.sum(), p / p.sum()
        alpha = np.minimum(p, q).sum()
        share = np.exp(-3 * alpha)
        kl = (p * np.log(p / q)).sum()
        loss[i] += {"ce": -np.log(q[number]), "kl": kl, "lk": share * kl + (1 - share) * (1 - alpha)}[task.loss]
    assert (known > 0).all() and (known < taught).any() == bool(task.draft_vocab)
    mean = loss / known
    total = (task.scale * task.decay ** np.arange(task.heads) * mean).sum()
    return {"loss": mean, "accuracy": right / taught, "objective": total, "tokens": taught[0]}


@pytest.mark.parametrize(("loss", "draft_vocab"), [("ce", 15), ("kl", 15), ("lk", 15), ("lk", 0)])
def test_loss_and_accuracy_equal_numpy_and_the_gradient_is_the_losses_slope(loss, draft_vocab):
    task = Medusa(heads=3, draft_vocab=draft_vocab, loss=loss, scale=0.3, decay=0.7)
    batch, states = packed(3), some_states(3)
    state, metrics = step(task, batch, states)
    about = {"target": {}, "template_args": {}, "training": {}}
    draft = task.export(begin(task)[3], IDS if draft_vocab else None, target(), about)
    want = reference(task, draft, batch, normed(states))
    for name, value in want.items():
        np.testing.assert_allclose(getattr(metrics, name), value, rtol=2e-5, err_msg=name)
    slope = gradient(task, state)
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0 for x in slope.values())
    if draft_vocab:
        assert not slope["lm_head"][draft_vocab:].any()
    if loss == "lk":  # its mixture is held fixed in the gradient, so a difference of losses is another thing
        return
    along, tiny = np.random.default_rng(3).normal(size=draft.weight.shape), 1e-5
    ends = []
    for sign in (1, -1):
        moved = dataclasses.replace(draft, weight=draft.weight.astype(np.float64) + sign * tiny * along)
        ends.append(reference(task, moved, batch, normed(states))["objective"])
    assert (slope["weight"] * along).sum() == pytest.approx((ends[0] - ends[1]) / (2 * tiny), rel=1e-3)


def test_places_of_prompts_count_as_much_as_is_asked():
    """The mean over the answers' places, and `prompts` times the sum over all others by the same count."""
    batch, states = packed(3), some_states(3)
    everywhere = batch._replace(mask=batch.segment > 0)
    kind = {"heads": 3, "draft_vocab": 15, "loss": "kl", "scale": 0.3, "decay": 0.7}
    answers, whole, mixed = (
        step(Medusa(**kind, prompts=weight), texts, states)[1]
        for weight, texts in ((0.0, batch), (0.0, everywhere), (0.25, batch))
    )
    known = [(np.asarray(x) & (y >= 0)).sum((0, 1)) for x, y in map(taught_labels, (batch, everywhere))]
    rest = whole.loss * known[1] - answers.loss * known[0]
    np.testing.assert_allclose(mixed.loss, answers.loss + 0.25 * rest / known[0], rtol=1e-5)
    np.testing.assert_array_equal(mixed.accuracy, answers.accuracy)


def taught_labels(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Which places teach each of TASK's guesses, and their labels in the draft's vocabulary."""
    place_of, _, ids, _ = begin(TASK)
    with jax.set_mesh(place_of.mesh):
        labels, taught = TASK.labels(place(place_of, batch, axis=0), ids[1])
    return np.asarray(taught), np.asarray(labels)


def test_states_of_packed_rows_are_those_of_each_sequence_alone():
    batch = packed(2)
    alone = np.zeros((2, ROW, 1, WIDTH), np.float32)
    for row in range(2):
        for segment in (1, 2):
            here = batch.segment[row] == segment
            alone[row, here, 0] = states(FIELDS, tensors(FIELDS), batch.tokens[row, here].tolist())[-1]
    inside, given = (step(TASK, batch, x)[1] for x in (None, alone))
    np.testing.assert_allclose(inside.loss, given.loss, rtol=1e-4)
    assert inside.grad_norm == pytest.approx(given.grad_norm, rel=1e-3)


# How it is cut up


def assert_same(one, other, tolerance: float, task: Medusa = TASK):
    for name in ("loss", "accuracy", "objective", "grad_norm", "tokens"):
        np.testing.assert_allclose(getattr(one[1], name), getattr(other[1], name), rtol=tolerance, err_msg=name)
    for a, b in zip(gradient(task, one[0]).values(), gradient(task, other[0]).values()):
        np.testing.assert_allclose(a, b, atol=tolerance * max(1, np.abs(b).max()))


@pytest.fixture(scope="module")
def plain():
    """One batch of eight rows."""
    return step(TASK, packed(8))


def test_two_batches_of_four_rows_give_what_one_of_eight_gives(plain):
    counts = packed(8).mask.reshape(2, -1).sum(1)
    assert counts[0] != counts[1]
    assert_same(step(TASK, packed(8), accumulate=2), plain, 1e-5)


def test_padding_to_twice_the_length_changes_nothing(plain):
    assert_same(step(TASK, longer(packed(8), 2 * ROW)), plain, 1e-6)


def test_chunks_of_positions_give_what_all_at_once_give(monkeypatch):
    """In the loss, with the target's logits ahead of a chunk, and in the ranks."""
    task = Medusa(heads=3, draft_vocab=15, loss="kl")
    place_of, graph, ids, params = begin(task)
    batch, states = packed(2), some_states(2)

    def both():
        with jax.set_mesh(place_of.mesh):
            placed, model = place(place_of, batch, axis=0), place_of.module(place_of.leaves)
            labels, _ = task.labels(placed, ids[1])
            ranks = task.ranks(nnx.merge(graph, params), model, placed, jnp.array(states), labels)
        return step(task, batch, states), np.asarray(ranks)

    whole, ranks = both()
    monkeypatch.setattr(base, "PLACES", 2 * 8 * 3 * 15)
    assert task._chunk(2, ROW, 15) == 8
    parts, ranks_of_parts = both()
    assert_same(parts, whole, 1e-5, task)
    np.testing.assert_array_equal(ranks_of_parts, ranks)


def test_a_mesh_that_divides_neither_rows_nor_vocabulary_gives_the_same():
    task = Medusa(heads=3, draft_vocab=15, loss="kl")
    batch = packed(3)
    assert_same(step(task, batch, mesh=MESHES["eight"]), step(task, batch), 1e-5, task)


def test_shared_head_on_a_mesh_gives_the_same():
    task = Medusa(heads=2, draft_vocab=0, loss="lk")
    one, eight = (step(task, packed(3), some_states(3), mesh=mesh) for mesh in MESHES.values())
    assert_same(eight, one, 1e-5, task)


# What changes


def test_steps_change_the_draft_alone_and_keep_it_in_float32():
    place_of, graph, ids, params = begin(TASK, "", "bfloat16")
    frozen = [np.array(x) for x in place_of.leaves]
    transform = Optimizer(learning_rate=1e-2).build(5)
    update = make_step(TASK, place_of, graph, transform)
    params = jax.tree.map(jnp.copy, params)
    shapes = sorted(x.shape for x in jax.tree.leaves(params))
    with jax.set_mesh(place_of.mesh):
        state = TrainState(jnp.int32(0), params, transform.init(params))
        batch = place(place_of, jax.tree.map(lambda x: x[None], packed(2)), axis=1)
        untaught = batch._replace(mask=jnp.zeros_like(batch.mask))
        losses = []
        for _ in range(5):
            state, metrics = update(place_of.leaves, ids, state, batch, None)
            losses.append(float(metrics.objective))
        before = jax.device_get(state)
        after, nothing = jax.device_get(update(place_of.leaves, ids, state, untaught, None))
    assert losses[-1] < losses[0]
    assert all(np.array_equal(np.array(x), y) for x, y in zip(place_of.leaves, frozen))
    arrays = [x for x in jax.tree.leaves(before.moments) if x.ndim]
    assert sorted(x.shape for x in arrays) == sorted(2 * shapes)
    assert {x.dtype for x in [*arrays, *jax.tree.leaves(before.params)]} == {np.dtype(np.float32)}
    # A step in which nothing is taught.
    assert after.step == before.step + 1 == 6
    assert (nothing.objective, nothing.grad_norm, nothing.tokens) == (0, 0, 0)
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.moments), (before.params, before.moments))


class Slope:
    """A task of constant gradient: the sum of one weight of 1.0."""

    def coefficients(self):
        return np.ones(1)

    def taps(self, config):
        return (config.layers,)

    def labels(self, batch, ids):
        return batch.tokens[..., None], batch.mask[..., None]

    def loss_sums(self, module, target, token_ids, batch, states, labels, taught, key):
        assert module.weight.dtype == states.dtype == jnp.bfloat16
        count = taught.sum((0, 1))
        return module.weight[...].astype(jnp.float32) * count, count * 0.0


def test_a_hundred_steps_of_1e_4_move_a_weight_of_a_bfloat16_draft_by_a_hundredth():
    place_of = target("", "bfloat16")
    module = nnx.Module()
    module.weight = nnx.Param(jnp.ones(1))
    graph, params = nnx.split(module)
    transform = Optimizer(learning_rate=1e-4, warmup=0.0, final=1.0).build(100)
    update = make_step(Slope(), place_of, graph, transform)
    with jax.set_mesh(place_of.mesh):
        everywhere = jax.NamedSharding(place_of.mesh, jax.P())
        state = jax.device_put(TrainState(jnp.int32(0), params, transform.init(params)), everywhere)
        batch = place(place_of, jax.tree.map(lambda x: x[None], packed(1)), axis=1)
        states = place(place_of, np.zeros((1, 1, ROW, 1, WIDTH), jnp.bfloat16), axis=1)
        for _ in range(100):
            state, _ = update(place_of.leaves, (None, None), state, batch, states)
    assert float(state.params["weight"][...][0]) == pytest.approx(0.99, abs=2e-5)


def test_the_learning_rate_warms_up_from_the_first_step_and_ends_at_its_final_share():
    schedule = Optimizer(learning_rate=2.0, warmup=0.1, final=0.25).schedule(40)
    rates = [float(schedule(made)) for made in range(40)]
    np.testing.assert_allclose(rates[:4], [0.5, 1.0, 1.5, 2.0])
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Medusa(heads=0), "heads 0"),
        (lambda: Medusa(loss="mse"), "choose one of ce, kl, lk"),
        (lambda: Medusa(loss="ce", prompts=0.5), "prompts 0.5 does not go with loss 'ce'"),
        (lambda: Optimizer(learning_rate=0.0), "learning_rate is 0.0"),
        (lambda: Optimizer(warmup=2.0), "warmup is 2.0"),
        (lambda: Optimizer(weight_decay=-1.0), "weight_decay is -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()
