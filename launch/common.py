"""What the launch scripts share: the flags that open a target, the device in use, and errors in one sentence."""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags
from ml_collections import ConfigDict, config_flags

import launch
import specjax
import train_drafts
from specjax import methods
from specjax.costs import cores
from specjax.decode.engine import Engine
from specjax.decode.setup import Setup

CONFIG = config_flags.DEFINE_config_file(
    "config",
    "configs/smollm2.py",
    lock_config=True,
    help_string="File in configs/; --config.FIELD=VALUE sets a field of it.",
)
_WHERE_UNSET = "Unset: the config's value holds."
OVERRIDES = {
    "target": flags.DEFINE_string("target", None, f"Hugging Face folder or .gguf file. {_WHERE_UNSET}"),
    "tokenizer": flags.DEFINE_string("tokenizer", None, f"tokenizer.json or its folder. {_WHERE_UNSET}"),
    "dtype": flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], f"Weights and cache. {_WHERE_UNSET}"),
    "mesh": flags.DEFINE_string("mesh", None, f"Devices, like data=2,model=4. {_WHERE_UNSET}"),
    "max_context": flags.DEFINE_integer("max_context", None, f"Most tokens of prompt and output. {_WHERE_UNSET}"),
    "cost_table": flags.DEFINE_string("cost_table", None, f"File written by launch.costs. {_WHERE_UNSET}"),
    "template_args": flags.DEFINE_string(
        "template_args", None, f'Chat template variables as JSON, like {{"enable_thinking": false}}. {_WHERE_UNSET}'
    ),
}


def setup(config: ConfigDict) -> Setup:
    """The config's fields, with the flags that were given in their place.

    Raises ValueError if --template_args is no JSON object.
    """
    given = {name: flag.value for name, flag in OVERRIDES.items() if flag.value is not None}
    if "template_args" in given:
        given["template_args"] = _json_object("--template_args", given["template_args"])
    return Setup(**(config.to_dict() | given))


def flags_of(setup: Setup, *names: str) -> list[str]:
    """The flags that open the same target again: of `names` (default: all) those that are not at their default."""
    values = {name: (getattr(setup, name), getattr(Setup(), name)) for name in names or OVERRIDES}
    given = {name: value for name, (value, default) in values.items() if value != default}
    if "template_args" in given:
        given["template_args"] = json.dumps(given["template_args"])
    return [f"--{name}={value}" for name, value in given.items()]


def parse_methods(text: str) -> list[tuple[str, str | None]]:
    """`"eager,medusa:tree8=DIR"` -> `[("eager", None), ("medusa:tree8", "DIR")]`.

    Raises ValueError if a method is unknown, named twice, or does not go with its options or its draft.
    """
    entries = []
    for part in text.split(","):
        name, _, draft = part.strip().partition("=")
        methods.check(name, draft or None)
        if name in dict(entries):
            raise ValueError(f"method {name!r} is named twice in {text!r}; name it once")
        entries.append((name, draft or None))
    return entries


def device_line(engine: Engine) -> str:
    """The devices in use, those that are not, the cores of the host and the version of JAX, in one line."""
    used = engine.target.mesh.devices
    idle = len(jax.devices()) - used.size
    more = f", {idle} more idle (--mesh=data=N,model=M takes N x M)" if idle else ""
    return f"device: {used.size} x {used.flat[0].device_kind}{more} ({cores()} host cores), jax {jax.__version__}"


def numbers(flag: flags.FlagHolder, kind: type) -> list:
    """`--temperature=0,1` -> [0.0, 1.0]; ValueError names the flag if an entry is no `kind`."""
    try:
        return [kind(text) for text in flag.value]
    except ValueError as error:
        raise ValueError(f"--{flag.name}={','.join(flag.value)} must be numbers separated by commas") from error


def check_writable(path: str | Path) -> None:
    """Raises OSError in one sentence, before anything is measured, if `path` cannot become a file."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}); choose another place") from error


def main(function: Callable[[], None]) -> None:
    """Parse the flags and run `function`. Bad input ends it with one sentence and exit code 1; a fault of the
    program keeps its traceback."""

    def run(arguments: list[str]) -> None:
        if len(arguments) > 1:
            raise ValueError(f"{arguments[1]!r} is no flag; flags are spelt --name=value")
        function()

    try:
        app.run(run, flags_parser=_parse)
    except (ValueError, OSError) as error:
        if not isinstance(error, OSError) and not _refused_by_us(error):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)


def _parse(arguments: list[str]) -> list[str]:
    try:
        return app.parse_flags_with_usage(arguments)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"a --config.FIELD=VALUE does not fit the config ({error}); see its file") from error


def _refused_by_us(error: Exception) -> bool:
    """Whether this project's own code raised it: NumPy and JAX raise ValueError where a program is at fault."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    homes = [Path(package.__file__).resolve().parent for package in (specjax, train_drafts, launch)]
    return any(home in raised_in.parents for home in homes)


def _json_object(name: str, text: str) -> dict:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f'{name} is no JSON ({error}); give an object like {{"enable_thinking": false}}') from error
    if not isinstance(value, dict):
        raise ValueError(f'{name} is {text}; give a JSON object like {{"enable_thinking": false}}')
    return value
