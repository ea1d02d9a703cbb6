"""The cost table: interpolation, break-even, its file, and that it knows where it was measured."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from specjax import costs
from specjax.costs import CostTable

PASSES = {
    (1, 512, 1): 40.0, (1, 512, 4): 60.0, (1, 512, 8): 80.0,
    (1, 2048, 1): 50.0, (1, 2048, 4): 70.0, (1, 2048, 8): 90.0,
    (4, 512, 1): 100.0, (4, 512, 4): 420.0, (4, 512, 8): 900.0,
    (4, 2048, 1): 140.0, (4, 2048, 4): 500.0, (4, 2048, 8): 1000.0,
}  # fmt: skip
DRAFTS = {"lookup": {(1, 512): 2.0, (1, 2048): 4.0, (4, 512): 5.0, (4, 2048): 8.0}}
HERE = {"device": "cpu", "cores": 2}


def table(**changes) -> CostTable:
    cycles = {"eager_over_pass": 1.02}
    whole = CostTable(HERE, PASSES, DRAFTS, weight_bytes=500_000_000, bandwidth=12.5e9, cycles=cycles)
    return dataclasses.replace(whole, **changes)


@pytest.mark.parametrize(
    ("block", "batch", "context", "ms"),
    [
        (4, 1, 512, 60.0),  # measured
        (6, 1, 512, 70.0),  # between blocks
        (1, 2, 512, 60.0),  # a third of the way from batch 1 to 4
        (1, 1, 1280, 45.0),  # half of the way from 512 to 2048
        (1, 2, 1280, (45 + (120 - 45) / 3)),  # both
        (1, 1, 64, 40.0),  # never below the smallest measured
        (12, 1, 512, 100.0),  # past the last block: on with its slope
        (1, 7, 512, 160.0),  # past the last batch: on with its slope
    ],
)
def test_cost_of_a_pass(block, batch, context, ms):
    assert table().target_ms(block, batch, context) == pytest.approx(ms)


def test_past_the_last_point_costs_never_fall_and_a_single_point_holds_everywhere():
    falling = table(passes={(1, 512, 1): 50.0, (1, 512, 2): 45.0}, drafts={})
    assert falling.target_ms(16, 1, 512) == 45.0
    assert falling.target_ms(1, 8, 4096) == 50.0


def test_break_even_by_hand():
    assert table().break_even(8, 1, 512) == pytest.approx(80 / 40)
    assert table().break_even(8, 1, 512, table().draft_ms("lookup", 1, 512)) == pytest.approx(82 / 40)
    assert table().ceiling(1, 512) == pytest.approx(8 / 2)
    assert table().floor_ms == pytest.approx(40.0)


def test_batch_above_which_no_draft_pays():
    assert table().last_paying_batch(512) == 1  # at batch 4 a pass over 4 costs 4.2 passes, over 8 nine
    assert table().last_paying_batch(2048) == 4
    dear = {point: 40.0 * point[2] for point in PASSES}
    assert table(passes=dear).last_paying_batch(512) is None


def test_unmeasured_draft_and_holes_in_the_grid_are_refused():
    with pytest.raises(ValueError, match="no draft of 'medusa'.*--methods=medusa"):
        table().draft_ms("medusa", 1, 512)
    with pytest.raises(ValueError, match="every block at every batch size"):
        table(passes={point: ms for point, ms in PASSES.items() if point != (4, 512, 8)})


def test_file_keeps_everything_and_has_the_promised_keys(tmp_path):
    path = tmp_path / "runs" / "costs.json"
    table().save(path)
    assert CostTable.load(path) == table()
    found = json.loads(path.read_text())
    assert found["floor_ms"] == pytest.approx(40.0)
    assert found["target_ms"] == {"1": 40.0, "4": 60.0, "8": 80.0}
    assert found["schema_version"] == 1 and found["environment"] == HERE


def test_failed_save_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "costs.json"
    table().save(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        table(environment={"device": object()}).save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["costs.json"]


def test_missing_foreign_or_older_file_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "costs.json"
    with pytest.raises(FileNotFoundError, match="does not exist; measure one"):
        CostTable.load(path)
    for text in ('{"schema_version": 1', "[]", '{"schema_version": 1, "passes": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no cost table"):
            CostTable.load(path)
    table().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 0}))
    with pytest.raises(ValueError, match="schema_version 0"):
        CostTable.load(path)


def test_environment_names_device_dtype_and_target_and_tells_what_differs():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:1])
    here = costs.environment(mesh, jnp.bfloat16, "abc")
    assert here["dtype"] == "bfloat16" and here["target"] == "abc" and here["mesh"] == "data=1,model=1"
    assert table(environment=here).differences(here) == []
    elsewhere = table(environment={**here, "cores": 64}).differences(here)
    assert len(elsewhere) == 1 and elsewhere[0].startswith("cores 64, here ")
