"""The one exception a user may see. In: nothing. Out: HotcoldError. Next: gguf_file.py."""


class HotcoldError(Exception):
    """What is wrong, where, what was found and what to do: one line, printed by the CLI without a traceback."""


class GGUFError(HotcoldError):
    """A GGUF file that cannot be trusted: the text names file, offset, field, what was found and what is allowed."""
