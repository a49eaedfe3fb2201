"""Messages of a chat, and their file.

In: what the user and the model said. Out: messages for chat.py; a JSON file for /save and /load. Next: repl.py.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotcold.runtime.errors import HotcoldError

FORMAT = "hotcold-conversation"
VERSION = 1
MAX_FILE_BYTES = 16 << 20
ROLES = ("user", "assistant")


@dataclass
class Conversation:
    """`messages` holds {"role": "user" | "assistant", "content": text}; the system prompt stands apart."""

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def all_messages(self) -> list[dict[str, str]]:
        """Messages for the chat template, the system prompt first."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.messages

    def save(self, path: Path) -> None:
        """Write the conversation, whole or not at all.

        Replaces an earlier saved conversation, nothing else. Raises HotcoldError if the path holds something else or
        cannot be written.
        """
        if path.exists():
            try:
                read_conversation(path)
            except HotcoldError as error:
                raise HotcoldError(f"{path} exists and is not a saved conversation, so it is not replaced") from error
        data = {"format": FORMAT, "version": VERSION, "system": self.system, "messages": self.messages}
        text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
        try:
            handle, name = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise HotcoldError(f"cannot save the conversation to {path}: {error.strerror or error}") from error


def read_conversation(path: Path) -> Conversation:
    """Read a saved conversation. The file may come from anywhere: everything in it is checked.

    Raises HotcoldError that names what is wrong.
    """
    try:
        if not path.is_file():
            raise HotcoldError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise HotcoldError(f"cannot read {path}: {error.strerror or error}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise HotcoldError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB: not loaded")
    try:
        data = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise HotcoldError(f"{path} is not a saved conversation: not valid JSON in UTF-8") from error
    return _checked(data, path)


def _checked(data: Any, path: Path) -> Conversation:
    def bad(what: str) -> HotcoldError:
        return HotcoldError(f"{path} is not a saved conversation: {what}")

    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise bad(f'"format" must be "{FORMAT}"')
    if data.get("version") != VERSION:
        raise bad(f'"version" must be {VERSION}')
    system, messages = data.get("system"), data.get("messages")
    if not (system is None or _is_text(system)):
        raise bad('"system" must be text or null')
    if not isinstance(messages, list):
        raise bad('"messages" must be a list')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise bad(f'message {i} must have "role" and "content" and nothing else')
        if message["role"] not in ROLES:
            raise bad(f'message {i}: "role" must be one of {", ".join(ROLES)}')
        if not _is_text(message["content"]):
            raise bad(f'message {i}: "content" must be text')
    return Conversation(system, messages)


def _is_text(value: Any) -> bool:
    """A string that can be encoded: JSON can smuggle in half surrogate pairs."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
