"""Chat templates: the checkpoint's own Jinja text, run in a sandbox, the same today and tomorrow."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Templates that print the day (Llama 3.x) get this one unless the caller sets another, so that a prompt's
# tokens do not change overnight and a draft is used on the prompts it was trained on.
TEMPLATE_DATE = datetime.datetime(2025, 1, 1)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant text for trainers; here it passes."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=8)
def _compile(template: str, date: datetime.datetime) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": date.strftime}
    return environment.from_string(template)


def render(
    template: str,
    messages: Sequence[Mapping],
    *,
    special: Mapping[str, str],
    template_args: Mapping,
    add_generation_prompt: bool,
    date: datetime.datetime,
) -> str:
    """Messages -> the text the model was trained to see. `special`: bos_token and the like, as variables.

    Raises ValueError in one sentence if the template does not parse or refuses the messages.
    """
    variables = {"tools": None, "documents": None} | dict(special) | dict(template_args)
    try:
        return _compile(template, date).render(
            variables, messages=messages, add_generation_prompt=add_generation_prompt
        )
    except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ValueError(f"the chat template does not take these messages (roles: {roles}): {error}") from error
