"""Lossless speculative decoding on JAX: `specjax.load(...)`, then `engine.generate(...)`."""

from collections.abc import Mapping
from typing import Any

from specjax.decode.conversation import Conversation
from specjax.decode.engine import Engine
from specjax.decode.request import GenerationStats, Result, Sampling
from specjax.decode.setup import Setup
from specjax.decode.target import Target, load_target


def load(
    target: str | None = None,
    draft: str | None = None,
    method: str = "eager",
    *,
    mesh: str = "",
    dtype: str = "float32",
    max_context: int | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> Engine:
    """Open a target (a Hugging Face folder or GGUF file; default: the installed SmolLM2) and return its Engine.

    `method` names how to draft, `draft` the folder of a trained draft; `mesh` is like "data=2,model=4";
    `dtype` float32 or bfloat16; `max_context` the most tokens a text may have; `template_args` variables for the
    chat template. Raises ValueError or FileNotFoundError in one sentence.
    """
    setup = Setup(target, dtype=dtype, mesh=mesh, max_context=max_context, template_args=template_args or {})
    return setup.open(method, draft)


__all__ = ["Conversation", "Engine", "GenerationStats", "Result", "Sampling", "Setup", "Target", "load", "load_target"]
