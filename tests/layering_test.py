"""The order of the house: who imports whom, where partition specs live, how long files get, what an import does."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = [
    "sharding", "telemetry", "checkpoints", "models", "loading", "costs", "cache", "trees", "sampling", "drafters",
    "selector", "verify", "methods", "decode", "bench",
    "train_drafts.data", "train_drafts.packing", "train_drafts.losses", "train_drafts.tasks", "train_drafts.step",
    "train_drafts.features", "train_drafts.material", "train_drafts.trainer", "train_drafts.evaluate",
    "train_drafts.record", "train_drafts.distill", "train_drafts.loop", "launch",
]  # fmt: skip
FILES = sorted(p for folder in ("specjax", "train_drafts", "launch") for p in (ROOT / folder).rglob("*.py"))


def layer(module: str) -> str | None:
    """`specjax.decode.loop` -> decode, `train_drafts.data` -> itself; None for a package and for what is not ours."""
    root, *below = module.split(".")
    if root == "launch":
        return root
    if root not in ("specjax", "train_drafts") or not below:
        return None
    return below[0] if root == "specjax" else f"{root}.{below[0]}"


def imports(path: Path) -> list[tuple[int, str]]:
    """Every (line, module) that a file imports, names of packages resolved to their modules."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; name the module"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def own_layer(path: Path) -> str | None:
    return layer(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def test_every_file_is_in_a_known_layer():
    assert {own_layer(path) for path in FILES} - {None} <= set(ORDER)


def test_imports_go_only_to_earlier_layers():
    wrong = []
    for path in FILES:
        own = own_layer(path)
        for line, module in imports(path):
            other = layer(module)
            if own is not None and other in ORDER and ORDER.index(other) > ORDER.index(own):
                wrong.append(f"{path.relative_to(ROOT)}:{line} ({own}) imports {module}")
    assert not wrong, "\n".join(wrong)


def test_drafters_and_verifiers_do_not_know_each_other():
    for path in FILES:
        banned = {"drafters": "verify", "verify": "drafters"}.get(own_layer(path))
        assert not [module for _, module in imports(path) if banned and layer(module) == banned], path


def test_partition_specs_are_written_in_one_file():
    for path in FILES:
        if own_layer(path) == "sharding":
            continue
        source = ast.parse(path.read_text())
        names = {module.rsplit(".", 1)[-1] for _, module in imports(path)}
        used = {
            node.attr
            for node in ast.walk(source)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jax"
        }
        assert not {"PartitionSpec", "P"} & (names | used), path


def test_runtime_code_does_not_need_test_extras():
    for path in FILES:
        roots = {module.split(".")[0] for _, module in imports(path)}
        assert not roots & {"torch", "transformers", "tensorflow", "pickle", "argparse", "yaml"}, path


@pytest.mark.parametrize("folder", ["specjax", "train_drafts", "launch", "configs", "tests"])
def test_no_file_is_longer_than_400_lines(folder):
    long = [path for path in (ROOT / folder).rglob("*.py") if len(path.read_text().splitlines()) > 400]
    assert not long


def test_importing_starts_no_backend():
    """So that a user can still choose platform, devices and flags, and nothing is allocated."""
    code = (
        "import importlib, pkgutil, specjax, train_drafts\n"
        "for package in (specjax, train_drafts):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
