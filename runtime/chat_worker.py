"""Renders chat templates in a process of its own, which chat_process.py starts and may kill.

In: one JSON object a line on stdin (source, variables, limits). Out: one JSON object a line on stdout ({"text": ...} or
{"error": ...}). Next: back to chat_process.py.

Run as a script, so it imports nothing from the package. Templates come from strangers: the limits are there.
"""

from __future__ import annotations

import datetime
import json
import signal
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

try:
    import resource
except ImportError:  # Windows: only the parent's clock limits the work
    resource = None  # type: ignore[assignment]


class Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote, for training; here it is only its contents."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("contents"), [], [], body).set_lineno(line)

    def contents(self, caller: Any) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without underscore names, which lead into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a template's keyword
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} starts with an underscore")


class _Dict:
    """`dict` for templates: an object instead of the class, from which one could climb to other classes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own escapes HTML, which would change the text the model sees.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment chat templates are written for: transformers' options, filters and globals."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return env


def render(env: jinja2.Environment, source: str, variables: dict[str, Any], max_chars: int) -> str:
    """The rendered text. Raises whatever the template raises."""
    parts, n = [], 0
    for part in env.from_string(source).generate(**variables):
        n += len(part)
        if n > max_chars:
            raise jinja2.exceptions.TemplateError(f"the text is longer than {max_chars} characters")
        parts.append(part)
    return "".join(parts)


def _limit_memory(n_bytes: int) -> None:
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or hard > n_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (n_bytes, hard))


def _limit_time(seconds: float) -> None:
    """SIGPROF ends this process after so much computing (0: never). The clock would be unfair on a busy machine."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    line = getattr(error, "lineno", None)
    where = f"line {line}: " if line else ""
    name = "" if isinstance(error, jinja2.exceptions.TemplateError) and text else f"{type(error).__name__}: "
    return where + name + text


def main() -> None:
    env = environment()
    limited = False
    for line in sys.stdin:
        job = json.loads(line)
        if not limited:
            _limit_memory(job["max_bytes"])
            limited = True
        _limit_time(job["max_seconds"])
        # The template is a stranger's program: it may raise anything, and whatever it is becomes the answer.
        try:
            reply = {"text": render(env, job["source"], job["variables"], job["max_chars"])}
        except MemoryError:
            reply = {"error": "it needs too much memory"}
        except Exception as error:
            reply = {"error": _describe(error)}
        _limit_time(0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
