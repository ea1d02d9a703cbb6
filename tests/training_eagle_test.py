"""Training of EAGLE layers: what the training-time test computes is what decoding computes, in all variants."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_test import TAPS, Reference, Variant
from flax import nnx
from scripted import FIELDS, MESHES, rms_norm, states, target, tensors
from training_test import IDS, VOCAB, WIDTH, assert_same, begin, packed, step

from specjax.models.transformer import vocabulary_logits
from train_drafts.step import place
from train_drafts.tasks import Eagle

LAYERS, STEPS = FIELDS["num_hidden_layers"], 3
KIND = {"steps": STEPS, "states": TAPS, "draft_vocab": 15, "loss": "kl"}
VARIANTS = {
    "3": (Eagle(**KIND), Variant()),
    "3, more kv heads": (Eagle(**KIND, kv_heads=4), Variant()),
    "3.1": (Eagle(**KIND, variant="3.1"), Variant(state_norms=True, norm_output=True)),
    "1": (Eagle(variant="1", steps=STEPS, draft_vocab=0), Variant(states=0, draft_vocab=None)),
}

SAME_START = (Eagle(**KIND), Eagle(**KIND, kv_heads=4))


def own_states(task: Eagle, batch) -> np.ndarray:
    """What the target's layers make of each sequence of a packed batch, alone [R, T, taps, D]."""
    taps = task.taps(target().config)
    found = np.zeros((*batch.tokens.shape, len(taps), WIDTH), np.float32)
    for row, segment in [(row, segment) for row in range(len(batch.tokens)) for segment in (1, 2)]:
        here = batch.segment[row] == segment
        each = states(FIELDS, tensors(FIELDS), batch.tokens[row, here].tolist())
        found[row, here] = np.stack([each[tap] for tap in taps], axis=1)
    return found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", VARIANTS)
def test_each_step_at_each_place_gives_the_law_that_decoding_gives_there(name, mesh):
    """Row t at step i: the law after the tokens up to t + 1 of its own sequence, and i drafted ones."""
    task, variant = VARIANTS[name]
    place_of, graph, ids, params = begin(task, MESHES[mesh])
    batch = packed(2)
    draft = task.export(params, IDS if task.draft_vocab else None, place_of, about())
    shape = (FIELDS["num_attention_heads"], draft.config.layer.kv_heads, FIELDS["head_dim"])
    reference = Reference(variant, draft.tensors, shape, FIELDS["rope_theta"])

    def laws(leaves, params, batch, states):
        model, layer = place_of.module(leaves), nnx.merge(graph, params)
        outputs = task.outputs(layer, model, batch, states)
        lm_head = layer.lm_head[...] if task.draft_vocab else model.head
        size = task.draft_vocab or VOCAB
        each = [vocabulary_logits(lm_head, outputs[:, :, guess], size) for guess in range(STEPS)]
        return [jax.nn.log_softmax(logits) for logits in each]

    with jax.set_mesh(place_of.mesh):
        placed = place(place_of, (batch, own_states(task, batch)), axis=0)
        got = [
            np.asarray(law)[..., : task.draft_vocab or VOCAB] for law in jax.jit(laws)(place_of.leaves, params, *placed)
        ]
    for row, segment in [(row, segment) for row in range(2) for segment in (1, 2)]:
        here = np.flatnonzero(batch.segment[row] == segment)
        text = batch.tokens[row, here].tolist()
        for t in (0, 3, len(text) - STEPS - 1):
            for guess in range(STEPS):
                want = reference.after(text[: t + 2], tuple(text[t + 2 : t + 2 + guess]))
                np.testing.assert_allclose(got[guess][row, here[t]], want, atol=1e-5 * np.abs(want).max())


def test_a_layer_starts_as_the_targets_last_one_and_its_head_as_the_targets_rows():
    task = Eagle(**KIND)
    place_of = target()
    draft = task.export(task.init(place_of, jnp.array(IDS)), IDS, place_of, about())
    table = tensors(FIELDS)
    last = f"model.layers.{LAYERS - 1}."
    same = "post_attention_layernorm"
    for ours, theirs in {same: same, "hidden_norm": "input_layernorm"}.items():
        np.testing.assert_array_equal(draft.tensors[f"midlayer.{ours}.weight"], table[f"{last}{theirs}.weight"])
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        np.testing.assert_array_equal(draft.tensors[f"midlayer.{name}.weight"], table[f"{last}{name}.weight"])
    for name in ("q", "k", "v"):
        read, unread = np.split(draft.tensors[f"midlayer.self_attn.{name}_proj.weight"], [WIDTH], axis=1)[::-1]
        np.testing.assert_array_equal(read, table[f"{last}self_attn.{name}_proj.weight"])
        assert not unread.any()
    np.testing.assert_array_equal(draft.tensors["fc.weight"], np.eye(WIDTH, 3 * WIDTH, 2 * WIDTH))
    np.testing.assert_array_equal(draft.tensors["norm.weight"], table["model.norm.weight"])
    np.testing.assert_array_equal(draft.tensors["lm_head.weight"], table["lm_head.weight"][IDS])


@pytest.mark.parametrize("mesh", MESHES)
def test_a_layer_of_more_kv_heads_starts_as_the_same_function(mesh):
    place_of = target(mesh=MESHES[mesh])
    fewer, more = (task.export(task.init(place_of, jnp.array(IDS)), IDS, place_of, about()) for task in SAME_START)
    assert more.tensors["midlayer.self_attn.k_proj.weight"].shape[0] == 4 * FIELDS["head_dim"]
    for name in ("k", "v"):
        heads = fewer.tensors[f"midlayer.self_attn.{name}_proj.weight"].reshape(2, FIELDS["head_dim"], -1)
        got = more.tensors[f"midlayer.self_attn.{name}_proj.weight"].reshape(4, FIELDS["head_dim"], -1)
        np.testing.assert_array_equal(got, heads[[0, 0, 1, 1]])
    assert set(fewer.tensors) == set(more.tensors)
    for name in fewer.tensors.keys() - {f"midlayer.self_attn.{name}_proj.weight" for name in "kv"}:
        np.testing.assert_array_equal(more.tensors[name], fewer.tensors[name])


def test_kv_heads_that_do_not_group_the_targets_are_refused():
    with pytest.raises(ValueError, match="kv_heads 3 is not a multiple of the target's 2"):
        Eagle(**KIND, kv_heads=3).init(target(), jnp.array(IDS))


def test_training_goes_on_from_a_draft_with_other_steps(tmp_path):
    place_of, task = target(), Eagle(**KIND | {"steps": 1}, kv_heads=4)
    first = task.init(place_of, jnp.array(IDS))
    moved = jax.tree.map(lambda x: x + 0.01, first)
    task.save(tmp_path, task.export(moved, IDS, place_of, about()))
    again = Eagle(**KIND, kv_heads=4, start=str(tmp_path)).init(target(mesh=MESHES["eight"]), jnp.array(IDS))
    assert jax.tree.structure(again) == jax.tree.structure(moved)
    got = Eagle(**KIND, kv_heads=4).export(again, IDS, place_of, about()).tensors
    for name, value in task.export(moved, IDS, place_of, about()).tensors.items():
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize("change", [{"kv_heads": 2}, {"states": (0, 2)}, {"variant": "3.1"}, {"draft_vocab": 16}])
def test_a_draft_of_another_kind_is_no_start(tmp_path, change):
    place_of, task = target(), Eagle(**KIND, kv_heads=4)
    task.save(tmp_path, task.export(task.init(place_of, jnp.array(IDS)), IDS, place_of, about()))
    other = Eagle(**KIND | {"kv_heads": 4, "start": str(tmp_path)} | change)
    ids = jnp.array(IDS) if other.draft_vocab == len(IDS) else jnp.arange(16)
    with pytest.raises(ValueError, match="training cannot start from .* leave out start"):
        other.init(place_of, ids)
    with pytest.raises(ValueError, match="training cannot start from"):
        dataclasses.replace(task, start=str(tmp_path)).init(place_of, jnp.arange(15) + 40)


def test_a_layer_without_input_norm_starts_by_reading_what_the_targets_last_one_reads():
    task, place_of = VARIANTS["1"][0], target()
    params = task.init(place_of, None)
    table, last = tensors(FIELDS), f"model.layers.{LAYERS - 1}.input_layernorm.weight"
    state = np.random.default_rng(0).normal(size=WIDTH)
    embedding = np.random.default_rng(1).normal(size=WIDTH)
    fused = np.asarray(params["fc"][...]) @ [*embedding, *rms_norm(state, table["model.norm.weight"], FIELDS)]
    np.testing.assert_allclose(fused, rms_norm(state, table[last], FIELDS), rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_mesh_and_two_parts_give_the_same_step(name):
    task = VARIANTS[name][0]
    one = step(task, packed(4))
    assert_same(step(task, packed(4), mesh=MESHES["eight"]), one, 3e-4, task)
    assert_same(step(task, packed(4), accumulate=2), one, 3e-4, task)


def test_distance_to_the_targets_states_and_tokens_loss_add_up():
    """EAGLE-1's loss: smooth L1 to the state ahead, and the tokens' loss with its own weight."""
    kind = {"variant": "1", "steps": 2, "draft_vocab": 15}
    tokens, both = Eagle(**kind, scale=0.1), Eagle(**kind, scale=0.1, regression=0.7)
    batch = packed(2)
    found = own_states(tokens, batch)
    place_of, graph, _, params = begin(tokens)
    placed = place(place_of, (batch, found), axis=0)
    with jax.set_mesh(place_of.mesh):
        outputs = both.outputs(nnx.merge(graph, params), place_of.module(place_of.leaves), *placed)
        labels, taught = map(np.asarray, tokens.labels(placed[0], begin(tokens)[2][1]))
    scale = tensors(FIELDS)["model.norm.weight"]
    hidden = found[:, :, -1].astype(np.float64)
    hidden *= scale / np.sqrt((hidden**2).mean(-1, keepdims=True) + FIELDS["rms_norm_eps"])
    distances = [[], []]
    for row, t, guess in np.argwhere(taught & (labels >= 0)):
        off = np.abs(np.asarray(outputs)[row, t, guess] - hidden[row, t + 1 + guess])
        distances[guess].append(np.where(off < 1, off**2 / 2, off - 0.5).mean())
    want = step(tokens, batch, found)[1].objective + 0.7 * (np.mean(distances[0]) + 0.8 * np.mean(distances[1]))
    assert step(both, batch, found)[1].objective == pytest.approx(want, rel=1e-5)


def test_noise_changes_the_loss_of_a_step_and_not_what_is_evaluated():
    quiet, noisy = (Eagle(variant="1", draft_vocab=15, noise=noise) for noise in (0.0, 0.05))
    batch = packed(2)
    one, other, again = (step(task, batch)[1].objective for task in (quiet, noisy, noisy))
    assert one != other == again
    place_of, graph, _, params = begin(quiet)
    with jax.set_mesh(place_of.mesh):
        placed = place(place_of, (batch, own_states(quiet, batch)), axis=0)
        given = nnx.merge(graph, params), place_of.module(place_of.leaves), *placed
        np.testing.assert_array_equal(quiet.outputs(*given), noisy.outputs(*given))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"variant": "2"}, "choose one of 1, 3, 3.1"),
        ({"variant": "1", "states": (1,)}, "leave states out"),
        ({"steps": 0}, "steps 0"),
        ({"draft_vocab": -1}, "draft_vocab is -1"),
        ({"loss": "mse"}, "choose one of ce, kl, lk"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        Eagle(**settings)


def test_states_that_the_target_does_not_have_are_named():
    with pytest.raises(ValueError, match=f"not all among 0 to {LAYERS}"):
        Eagle(states=(1, LAYERS + 1)).declare(target())


def about() -> dict:
    return {"target": {}, "template_args": {}, "training": {}}
