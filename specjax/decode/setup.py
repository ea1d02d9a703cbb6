"""Everything it takes to open a target: what `specjax.load` and every launch script share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.costs import CostTable, environment
from specjax.decode.engine import Engine
from specjax.decode.target import Target, load_target
from specjax.telemetry import say


@dataclasses.dataclass(frozen=True)
class Setup:
    """Which target, and how it is run.

    `target`: a Hugging Face folder or GGUF file (None: the installed SmolLM2); `tokenizer`: a tokenizer.json or
    its folder, where the target has none; `mesh`: like "data=2,model=4"; `max_context`: most tokens a text may
    have (None: the target's own limit); `chunk`: prompt tokens per prefill pass; `template_args`: variables for
    the chat template; `cost_table`: a file written by `launch.costs`.
    """

    target: str | None = None
    tokenizer: str | None = None
    dtype: str = "float32"
    mesh: str = ""
    max_context: int | None = None
    chunk: int = 128
    template_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cost_table: str | None = None

    def open(self, method: str = "eager", draft: str | None = None) -> Engine:
        """Load the target and give its engine for `method`, whose trained draft, if it has one, is in `draft`.

        Raises ValueError or FileNotFoundError in one sentence.
        """
        target = load_target(self.target, mesh=self.mesh, dtype=self.dtype, tokenizer=self.tokenizer)
        room, limit = self.max_context, target.config.max_context
        if room is not None and room > limit:
            say(
                f"max_context {room} is beyond the {limit} tokens that {target.name} was made for; "
                f"going on with {limit}"
            )
            room = limit
        return Engine(
            target,
            method,
            draft,
            max_context=room,
            chunk=self.chunk,
            template_args=self.template_args,
            costs=self.costs(target),
        )

    def costs(self, target: Target) -> CostTable | None:
        """The cost table, if one was given; a line says so if it was not measured with `target` in this environment.

        Raises ValueError or FileNotFoundError if the file is no cost table.
        """
        if self.cost_table is None:
            return None
        table = CostTable.load(self.cost_table)
        if differences := table.differences(environment(target.mesh, target.dtype, target.fingerprint)):
            say(f"warning: {self.cost_table} was measured elsewhere ({'; '.join(differences)}); run launch.costs here")
        return table
