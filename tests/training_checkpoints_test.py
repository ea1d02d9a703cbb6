"""Training state on disk: resume equals going on, on any mesh, and a save that fails takes nothing with it."""

import resource
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging

from specjax.checkpoints import Checkpoints
from specjax.sharding import make_mesh, spec

SHAPES = {"embed": ((16, 8), ("vocab", None)), "up": ((8, 32), (None, "mlp")), "bias": ((8,), (None,))}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def make_state(mesh):
    """Parameters, optimizer state and a random key, born on `mesh`."""
    with jax.set_mesh(mesh):
        parameters = {
            name: jax.device_put(np.random.default_rng(n).normal(size=shape).astype(np.float32), spec(*axes))
            for n, (name, (shape, axes)) in enumerate(SHAPES.items())
        }
        # On a mesh of one device jax gives a fresh key a sharding of rank one, which no ShapeDtypeStruct may have.
        key = jax.device_put(jax.random.key(3), spec())
        return parameters, OPTIMIZER.init(parameters), key


@jax.jit
def train(state):
    """One step on data drawn from the state's own key."""
    parameters, moments, key = state
    key, now = jax.random.split(key)
    grads = jax.tree.map(lambda p: p * jax.random.uniform(now), parameters)
    updates, moments = OPTIMIZER.update(grads, moments, parameters)
    return optax.apply_updates(parameters, updates), moments, key


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def values(state) -> list[np.ndarray]:
    def value(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return [value(x) for x in jax.tree.leaves(state)]


def assert_equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(values(a), values(b), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@pytest.fixture(scope="module")
def states():
    """The state before training and after one to four steps."""
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        found = [make_state(mesh)]
        for _ in range(4):
            found.append(train(found[-1]))
    return found


@pytest.fixture
def saved(states, tmp_path):
    """A folder with checkpoints 1 and 2."""
    with Checkpoints(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, states[step], {"step": step})
    return tmp_path / "run"


def large(n: int, size: int = 2**21):
    return {"w": jnp.arange(size) + n, "key": jax.random.key(n)}


@pytest.fixture
def disk():
    """Limits the size of a file, which stands for a full disk, or lifts the limit."""

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    yield limit
    limit(resource.RLIM_INFINITY)


def test_resumed_training_equals_training_on(states, saved):
    """Parameters, both moments, count and key, bit for bit; the newest is the default, and two are kept."""
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.latest() == 2
        state = checkpoints.restore(abstract(states[0]))
        assert_equal(state, states[2])
        with jax.set_mesh(make_mesh()):
            state = train(train(state))
        assert_equal(state, states[4])
        assert_equal(checkpoints.restore(abstract(states[0]), step=1), states[1])
        assert checkpoints.metadata(1) == {"step": 1}
        checkpoints.save(4, state, {"step": 4, "order": [3, 1], "loss": 0.5})
        assert checkpoints.metadata(4) == {"step": 4, "order": [3, 1], "loss": 0.5}
    assert sorted(path.name for path in saved.iterdir()) == ["2", "4"]


@pytest.mark.parametrize("other", ["", "data=4,model=2"])
def test_a_checkpoint_of_one_mesh_restores_onto_another(tmp_path, other):
    here, there = make_state(make_mesh("data=2,model=4")), make_state(make_mesh(other))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, here, {})
        restored = checkpoints.restore(abstract(there))
    assert_equal(restored, here)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(there), strict=True):
        assert got.sharding.is_equivalent_to(want.sharding, want.ndim)
    assert len(restored[0]["embed"].sharding.device_set) == (8 if other else 1)


def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path):
    state = {"w": jnp.arange(2.0**20), "count": jnp.zeros((), jnp.int32)}
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    want, shapes = values(state), abstract(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(3):
            state = overwrite(state)
        for got, value in zip(values(checkpoints.restore(shapes)), want):
            np.testing.assert_array_equal(got, value)


def test_an_empty_folder_has_no_checkpoint(tmp_path, states):
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(FileNotFoundError, match=r"holds no checkpoint \(steps there: none\)"):
            checkpoints.restore(abstract(states[0]))


def test_what_does_not_fit_is_refused_by_name(saved, states):
    wanted = abstract(states[0])
    narrow = (wanted[0] | {"up": jax.ShapeDtypeStruct((8, 16), jnp.float32)}, *wanted[1:])
    half = (wanted[0] | {"up": jax.ShapeDtypeStruct((8, 32), jnp.bfloat16)}, *wanted[1:])
    surplus = (wanted[0] | {"down": wanted[0]["up"]}, *wanted[1:])
    with Checkpoints(saved) as checkpoints:
        with pytest.raises(
            ValueError, match=r"0/up is float32 \[8, 32\] there and float32 \[8, 16\] here; resume with"
        ):
            checkpoints.restore(narrow)
        with pytest.raises(ValueError, match=r"0/up is float32 \[8, 32\] there and bfloat16 \[8, 32\] here"):
            checkpoints.restore(half)
        with pytest.raises(ValueError, match=r"0/down is absent there and float32 \[8, 32\] here"):
            checkpoints.restore(surplus)
        with pytest.raises(ValueError, match=r"2 is uint32 \[2\] there and absent here"):
            checkpoints.restore(wanted[:2])
        with pytest.raises(FileNotFoundError, match=r"holds no step 7 \(steps there: 1, 2\)"):
            checkpoints.restore(wanted, step=7)
        with pytest.raises(FileNotFoundError, match="holds no step 7"):
            checkpoints.metadata(7)
        with pytest.raises(ValueError, match="already holds step 2; go on from it"):
            checkpoints.save(2, states[2], {})
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(3, states[3], {"array": np.ones(2)})
        assert checkpoints.latest() == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_is_named_with_the_way_out(saved, states):
    shutil.rmtree(saved / "2" / "state" / "d")
    shutil.rmtree(saved / "2" / "state" / "ocdbt.process_0")
    with Checkpoints(saved) as checkpoints:
        with pytest.raises(ValueError, match="2 is damaged .*; remove it to resume from the one before"):
            checkpoints.restore(abstract(states[0]))
    shutil.rmtree(saved / "2")
    with Checkpoints(saved) as checkpoints:
        assert_equal(checkpoints.restore(abstract(states[0])), states[1])


def test_killed_while_saving_then_resumed(tmp_path, capfd):
    """The cut save is passed over with a line, the one before restores, and the same step can be saved again."""
    code = (
        "import os, signal, sys, jax.numpy as jnp\n"
        "from specjax.checkpoints import Checkpoints\n"
        "checkpoints = Checkpoints(sys.argv[1], keep=1)\n"
        "checkpoints.save(1, {'w': jnp.arange(9.0)}, {})\n"
        "checkpoints.save(2, {'w': jnp.arange(2.0**24)}, {})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path]).returncode == -signal.SIGKILL
    assert sorted(path.name.partition(".")[0] for path in tmp_path.iterdir()) == ["1", "2"]
    capfd.readouterr()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.latest() == 1
        state = {"w": jnp.arange(9.0)}
        assert_equal(checkpoints.restore(abstract(state)), state)
        checkpoints.save(2, state, {})
    (line,) = capfd.readouterr().err.splitlines()
    assert "2.orbax-checkpoint-tmp is incomplete" in line and "the last whole one is step 1" in line
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_a_full_disk_says_so_once_and_leaves_the_checkpoint_before(tmp_path, disk, capfd):
    """The call after the failed save raises; when there is room again the run can go on."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, large(1), {})
    assert checkpoints.latest() == 1
    disk(2**20)
    checkpoints.save(2, large(2), {})
    says = (
        "step {} could not be written to .*: .*too large.*; the last whole one is step {}: make room there, then resume"
    )
    with pytest.raises(OSError, match=says.format(2, 1)):
        checkpoints.save(3, large(3), {})
    disk(resource.RLIM_INFINITY)
    assert checkpoints.latest() == 1
    assert_equal(checkpoints.restore(abstract(large(0))), large(1))
    checkpoints.save(2, large(2), {})
    assert_equal(checkpoints.restore(abstract(large(0))), large(2))
    disk(2**20)
    checkpoints.save(3, large(3), {})
    with pytest.raises(OSError, match=says.format(3, 2)):
        checkpoints.close()
    assert capfd.readouterr().err == ""


def test_a_failed_save_does_not_hide_the_error_on_its_way_up(tmp_path, states, monkeypatch, capsys):
    def fail():
        raise ValueError("disk gone")

    with pytest.raises(KeyError, match="batch"):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, states[1], {})
            monkeypatch.setattr(checkpoints._orbax, "wait", fail)
            raise KeyError("batch")
    assert "warning: the checkpoint of step 1 could not be written" in capsys.readouterr().err


def test_orbax_is_silent_and_others_are_not(saved, states, caplog):
    before = logging.get_verbosity()
    logging.set_verbosity(logging.INFO)
    with caplog.at_level("INFO", logger="absl"), Checkpoints(saved) as checkpoints:
        checkpoints.restore(abstract(states[0]))
        checkpoints.save(3, states[3], {})
        logging.info("heard")
    logging.set_verbosity(before)
    assert [record.message for record in caplog.records if record.name == "absl"] == ["heard"]
