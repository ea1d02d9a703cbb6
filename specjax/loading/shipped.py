"""Drafts that come with specjax, for targets that people try first; `specjax/shipped/README.md` is their model card.

specjax/shipped/NAME OF THE TARGET/METHOD/config.json and its weights in int8
"""

import importlib.resources
from pathlib import Path

from specjax.loading.draft_files import CONFIG
from specjax.loading.huggingface import read_json


def find(method: str, target) -> Path:
    """The folder of the draft of a method that was trained for the very weights of `target` (a `decode.target.Target`).

    Raises ValueError if none is shipped.
    """
    for config in _configs(method):
        if read_json(config)["specjax"]["target"]["fingerprint"] == target.fingerprint:
            return config.parent
    names = ", ".join(config.parent.parent.name for config in _configs(method)) or "no target"
    raise ValueError(
        f"no {method} draft is shipped for {target.name} with weights {target.fingerprint} (only for {names}); "
        f"train one and name its folder by {method}=DIR"
    )


def _configs(method: str) -> list[Path]:
    with importlib.resources.as_file(importlib.resources.files("specjax") / "shipped") as folder:
        return sorted(folder.glob(f"*/{method}/{CONFIG}"))
