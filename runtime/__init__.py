"""hotcold.runtime: from a GGUF file to tokens. Read cli.py for the way in, engine.py for the way through.

    from hotcold.runtime import Model, Tokenizer, ChatTemplate

The names are loaded when they are first used: a command that needs no engine does not wait for the compiler.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotcold.runtime.api import Model
    from hotcold.runtime.chat import ChatTemplate
    from hotcold.runtime.errors import GGUFError, HotcoldError
    from hotcold.runtime.gpu.choose import GpuOptions
    from hotcold.runtime.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "GGUFError", "GpuOptions", "HotcoldError", "Model", "Tokenizer"]

_HOMES = {
    "Model": "hotcold.runtime.api",
    "ChatTemplate": "hotcold.runtime.chat",
    "GGUFError": "hotcold.runtime.errors",
    "GpuOptions": "hotcold.runtime.gpu.choose",
    "HotcoldError": "hotcold.runtime.errors",
    "Tokenizer": "hotcold.runtime.tokenizer",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
