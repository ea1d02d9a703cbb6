"""Config files from the library's dataclasses."""

import dataclasses
import typing

from ml_collections import ConfigDict, config_dict


def from_dataclass(kind: type) -> ConfigDict:
    """The defaults of dataclass `kind` as a config; an optional field that is unset keeps its type as a placeholder."""
    types = typing.get_type_hints(kind)

    def value(name: str, default):
        return config_dict.placeholder(typing.get_args(types[name])[0]) if default is None else default

    return ConfigDict({f.name: value(f.name, getattr(kind(), f.name)) for f in dataclasses.fields(kind)})
