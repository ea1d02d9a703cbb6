"""The only place where a method is a string."""

import difflib

from specjax.drafters.base import Drafter
from specjax.drafters.eager import Eager
from specjax.drafters.lookup import Lookup
from specjax.verify.base import Verifier
from specjax.verify.target_first import TargetFirst

DRAFTERS = {"eager": Eager, "lookup": Lookup}


def build(name: str, draft: str | None = None) -> tuple[Drafter, Verifier]:
    """A method's name -> its drafter and verifier.

    Raises ValueError if the method is unknown or takes no trained draft.
    """
    if name not in DRAFTERS:
        near = difflib.get_close_matches(name, DRAFTERS, 1)
        hint = f"did you mean {near[0]!r}" if near else f"choose one of {', '.join(DRAFTERS)}"
        raise ValueError(f"method {name!r} is unknown; {hint}")
    if draft is not None:
        raise ValueError(f"method {name!r} needs no trained draft, but {draft!r} was given; leave it out")
    drafter = DRAFTERS[name]()
    return drafter, TargetFirst(drafter.depth)
