"""The only place where a method is a string: NAME[:OPTION...], with the folder of its trained draft where it has one.

medusa:treeN      the best tree of N nodes, root included, by the path frequencies that the draft was calibrated with
medusa:chainN     N nodes in a row, root included
medusa:typical    typical acceptance: more tokens per cycle, but not the target's law
eagle:treeN       the N most probable nodes, root included, of a tree that grows at most `depth` deep ...
eagle:depthN      (5) ... from
eagle:widthN      (4) guesses at each level, and that many guesses after each
eagle:chainN      N nodes in a row, root included
eagle:fixed       with a cost table too, always all levels and all nodes; else as few of them as pay by the table
eagle:coupled     at temperature, guesses by the noise of the target's own draw instead of the most probable ones
eagle:rejection   guesses drawn from the layer's law, in a tree of those sizes whose shape is fixed, and verified by
                  rejection without replacement: the target's law, but not eager's text of the same seed
medusa+lookup     with the same options but `typical` and `rejection`: what lookup copies stands in the same tree, which
eagle+lookup      does not grow; after a long match nothing is drafted, and 15 tokens are copied, or as many as it has
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax import trees
from specjax.costs import HOW_TO_MEASURE, CostTable
from specjax.drafters import eagle, eagle_drawn, medusa, merged, prices
from specjax.drafters.base import Drafter
from specjax.drafters.eager import Eager
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_drawn import DrawnEagle
from specjax.drafters.lookup import Lookup
from specjax.drafters.medusa import Medusa
from specjax.drafters.prices import Prices
from specjax.loading import shipped
from specjax.loading.drafts import MedusaDraft, check_draft, load_draft
from specjax.loading.eagle import EagleDraft, load_eagle
from specjax.telemetry import say
from specjax.trees import Path
from specjax.verify.base import Verifier
from specjax.verify.rejection import Rejection
from specjax.verify.target_first import TargetFirst
from specjax.verify.typical import Typical

UNTRAINED = {"eager": Eager, "lookup": Lookup}
VERIFIERS = {"typical": Typical, "rejection": Rejection}
OPTIONS = {
    "eager": (),
    "lookup": (),
    "medusa": ("treeN", "chainN", "typical"),
    "eagle": ("treeN", "chainN", "depthN", "widthN", "fixed", "coupled", "rejection"),
}
OPTIONS |= {
    f"{learned}+lookup": tuple(option for option in OPTIONS[learned] if option not in VERIFIERS)
    for learned in ("medusa", "eagle")
}
NUMBERED = re.compile(r"(tree|chain|depth|width)(\d+)")
EAGLE_NODES, EAGLE_DEPTH, EAGLE_WIDTH = 16, 5, 4
EAGLE_BLOCKS = (4, 8, 16, 32, 64, 128)  # each that a plan can choose is one more target pass to compile


def check(name: str, draft: str | None = None) -> None:
    """Raises ValueError if a method's name is unknown, its options do not fit, or it does not go with its draft."""
    kind, *options = name.split(":")
    if kind not in OPTIONS:
        near = difflib.get_close_matches(kind, OPTIONS, 1)
        hint = f"did you mean {near[0]!r}" if near else f"choose one of {', '.join(OPTIONS)}"
        raise ValueError(f"method {kind!r} is unknown; {hint}")
    if "rejection" in options and "rejection" not in OPTIONS[kind] and "+" not in kind:
        raise ValueError(
            f"{name!r} would not keep the target's law: rejection needs guesses that are drawn from a law that is "
            f"known, all of which are verified, and {kind} does not draw; leave it out, or use eagle:rejection"
        )
    for option in options:
        if "+" in kind and option in VERIFIERS:
            raise ValueError(
                f"{option!r} of {name!r} does not go with copied tokens, which need target-first verification; "
                f"leave out {option!r} or '+lookup'"
            )
        number = NUMBERED.fullmatch(option)
        if (f"{number[1]}N" if number else option) not in OPTIONS[kind]:
            takes = f"it takes {', '.join(OPTIONS[kind])}" if OPTIONS[kind] else "it takes none"
            raise ValueError(f"method {kind!r} has no option {option!r}; {takes}")
        if number and int(number[2]) < (2 if number[1] in ("tree", "chain") else 1):
            raise ValueError(f"{option!r} of {name!r} leaves no node for a draft token; give more")
    given = [option.rstrip("0123456789") for option in options]
    if len(set(given)) < len(given) or ("chain" in given and set(given) & {"tree", "depth", "width"}):
        raise ValueError(f"method {name!r} names a tree or an option twice; give each once")
    if "rejection" in options and set(options) & {"fixed", "coupled"}:
        raise ValueError(f"{name!r} draws a tree whose shape is fixed; leave out 'fixed' and 'coupled', or 'rejection'")
    if kind in UNTRAINED and draft is not None:
        raise ValueError(f"method {name!r} needs no trained draft, but {draft!r} was given; leave it out")


def build(
    name: str,
    target,
    draft: str | None = None,
    *,
    costs: CostTable | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> tuple[Drafter, Verifier]:
    """A method's name -> its drafter and verifier for `target` (a `decode.target.Target`).

    `draft`: the folder of its trained draft (None: the one that is shipped for the target); `costs`: prices that choose
    a tree where the name does not; `template_args`: the chat template's variables in use. Raises ValueError or
    FileNotFoundError as `check` does, and if there is no draft, or it cannot be read or was trained for another target.
    """
    check(name, draft)
    kind, *options = name.split(":")
    learned, _, copying = kind.partition("+")
    if kind in UNTRAINED:
        drafter = UNTRAINED[kind]()
    else:
        build_drafter = {"medusa": _medusa, "eagle": _eagle}[learned]
        drafter = build_drafter(options, target, draft or shipped.find(learned, target), costs, template_args)
    drafter = merged.with_lookup(drafter) if copying else drafter
    verifier = next((VERIFIERS[option] for option in options if option in VERIFIERS), TargetFirst)
    return drafter, verifier(drafter.depth)


def fastest_tree(frequency: np.ndarray, costs: CostTable, draft_ms: float | None = None) -> int:
    """Of the best trees as large as the block sizes measured, the nodes, root included, of the one of most tokens per
    second at batch 1 and the smallest context measured; a line says so if even that one is slower than eager.

    frequency [paths]: how often each path is right, the highest first (see `trees.ranked`); draft_ms: what a draft
    takes (None: as the table has it, and nothing if it has none). Raises ValueError if the table has no block that a
    tree fits.
    """
    context = costs.contexts[0]
    if draft_ms is None:
        priced = [method for method in costs.drafts if method.split(":")[0] == "medusa"]
        draft_ms = costs.draft_ms(priced[0], 1, context) if priced else 0.0
    sizes = [size for size in costs.blocks if 1 < size <= len(frequency) + 1]
    if not sizes:
        raise ValueError(f"the cost table has no block that a draft tree fits; measure more: {HOW_TO_MEASURE}")

    def speedup(nodes: int) -> float:
        return trees.expected_tokens(frequency[: nodes - 1]) / costs.break_even(nodes, 1, context, draft_ms)

    best = max(sizes, key=speedup)
    if speedup(best) <= 1:
        say(f"warning: by the cost table no medusa tree pays here; the best has {best} nodes")
    return best


def _medusa(options: list[str], target, folder: str, costs: CostTable | None, template_args) -> Medusa:
    draft = load_draft(folder)
    _check(draft, target, template_args)
    return medusa.from_draft(draft, _paths(options, draft, costs), target)


def _eagle(options: list[str], target, folder: str, costs: CostTable | None, template_args) -> Eagle | DrawnEagle:
    draft = load_eagle(folder)
    _check(draft, target, template_args)
    nodes, depth, width = _eagle_sizes(options)
    if "rejection" in options:
        return eagle_drawn.from_draft(draft, target, nodes=nodes, depth=depth, width=width)
    priced = None if "fixed" in options else _eagle_prices(costs, nodes, width)
    coupled = "coupled" in options
    return eagle.from_draft(draft, target, nodes=nodes, depth=depth, width=width, prices=priced, coupled=coupled)


def _eagle_sizes(options: list[str]) -> tuple[int, int, int]:
    """Nodes, depth and width of an eagle tree."""
    given = {found[1]: int(found[2]) for found in map(NUMBERED.fullmatch, options) if found}
    if "chain" in given:
        return given["chain"], given["chain"] - 1, 1
    nodes = given.get("tree", EAGLE_NODES)
    depth, width = (min(size, nodes - 1) for size in (EAGLE_DEPTH, EAGLE_WIDTH))
    return nodes, given.get("depth", depth), given.get("width", width)


def _eagle_prices(costs: CostTable | None, nodes: int, width: int) -> Prices | None:
    """The prices of a level and of the blocks up to `nodes`, by the measured eagle draft whose width is nearest; a line
    says so if the table has none."""
    if costs is None:
        return None
    sizes = {name: _eagle_sizes(name.split(":")[1:]) for name in costs.drafts if name.split(":")[0] == "eagle"}
    if not sizes:
        say(f"the cost table has no eagle draft, so its depth is fixed; {HOW_TO_MEASURE} --methods=eagle=DIR")
        return None
    nearest = min(sizes, key=lambda name: abs(sizes[name][2] - width))
    blocks = (1, *(size for size in EAGLE_BLOCKS if size < nodes and size in costs.blocks), nodes)
    return prices.from_table(costs, nearest, sizes[nearest][1], blocks)


def _check(draft: MedusaDraft | EagleDraft, target, template_args) -> None:
    check_draft(
        draft,
        name=target.name,
        fingerprint=target.fingerprint,
        width=target.config.width,
        vocab_size=target.config.vocab_size,
        tokenizer=target.tokenizer.fingerprint,
        template_args=dict(template_args or {}),
    )


def _paths(options: list[str], draft: MedusaDraft, costs: CostTable | None) -> tuple[Path, ...]:
    """The tree that the options name, else the fastest by the cost table, else the draft's own."""
    for shape in filter(None, map(NUMBERED.fullmatch, options)):
        nodes = int(shape[2])
        if shape[1] == "chain":
            return trees.chain(nodes - 1)
        if nodes > (most := len(draft.paths) + 1):
            raise ValueError(f"{shape[0]!r} is too large, the draft's paths make {most} nodes; give tree{most} or less")
        return draft.paths[: nodes - 1]
    return draft.paths[: (draft.nodes if costs is None else fastest_tree(draft.frequency, costs)) - 1]
