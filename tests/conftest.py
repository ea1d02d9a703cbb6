"""Eight CPU devices, a persistent compilation cache, and the --slow switch for every test."""

import os

# Before JAX is imported: eight fake devices share few cores, so a collective may have to wait long for its partners.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
        "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
    ]
)

import jax
import pytest

from specjax.decode.programs import keep_compiled_programs

jax.config.update("jax_num_cpu_devices", 8)
keep_compiled_programs()


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: takes minutes; run with --slow"))
