"""Lossless speculative decoding on JAX: `specjax.load(...)`, then `engine.generate(...)`."""

from specjax.decode.conversation import Conversation
from specjax.decode.engine import Engine
from specjax.decode.request import GenerationStats, Result, Sampling
from specjax.decode.target import Target, load_target


def load(
    target=None, draft=None, method: str = "eager", *, mesh: str = "", dtype: str = "float32", max_context: int | None = None
) -> Engine:
    """Open a target (a Hugging Face folder or GGUF file; default: the installed SmolLM2) and return its Engine.

    `method` names how to draft, `draft` the folder of a trained draft; `mesh` is like "data=2,model=4";
    `dtype` float32 or bfloat16. Raises ValueError or FileNotFoundError in one sentence.
    """
    return Engine(load_target(target, mesh=mesh, dtype=dtype), method, draft, max_context=max_context)


__all__ = ["Conversation", "Engine", "GenerationStats", "Result", "Sampling", "Target", "load", "load_target"]
