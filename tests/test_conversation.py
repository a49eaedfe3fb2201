"""conversation.py: a saved conversation comes back; a file from a stranger is checked; nothing else is overwritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotcold.runtime.conversation import FORMAT, MAX_FILE_BYTES, Conversation, read_conversation
from hotcold.runtime.errors import HotcoldError

TALK = [{"role": "user", "content": "hi\n“ü😀”"}, {"role": "assistant", "content": "yes"}]


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    Conversation("be brief", TALK).save(path)
    assert read_conversation(path) == Conversation("be brief", TALK)
    Conversation(None, []).save(path)  # an earlier conversation is replaced
    assert read_conversation(path) == Conversation(None, [])
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]


def test_the_system_prompt_comes_first_and_an_empty_one_not_at_all() -> None:
    assert Conversation("s", TALK).all_messages() == [{"role": "system", "content": "s"}, *TALK]
    assert Conversation("", TALK).all_messages() == TALK


@pytest.mark.parametrize("content", ["my thesis", "[]", '{"format": "other"}'])
def test_other_files_are_not_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text(content)
    with pytest.raises(HotcoldError, match="not replaced"):
        Conversation(None, TALK).save(path)
    assert path.read_text() == content


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(HotcoldError, match="nowhere"):
        Conversation(None, TALK).save(tmp_path / "nowhere" / "talk.json")


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(HotcoldError, match="No space left"):
        Conversation(None, TALK).save(tmp_path / "talk.json")
    assert list(tmp_path.iterdir()) == []


def saved(**changes: Any) -> dict[str, Any]:
    return {"format": FORMAT, "version": 1, "system": None, "messages": TALK} | changes


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ([], "format"), (saved(format="x"), "format"), (saved(version=2), "version"), (saved(system=3), "system"),
        (saved(messages={}), "messages"), (saved(messages=[3]), "message 0"),
        (saved(messages=[*TALK, {"role": "user"}]), "message 2"),
        (saved(messages=[{"role": "system", "content": "x"}]), "role"),
        (saved(messages=[{"role": ["user"], "content": "x"}]), "role"),
        (saved(messages=[{"role": "user", "content": None}]), "content"),
        (saved(messages=[{"role": "user", "content": "x", "extra": 1}]), "nothing else"),
        (saved(messages=[{"role": "user", "content": "\ud800"}]), "content"),
    ],
)  # fmt: skip
def test_wrong_content_is_named(tmp_path: Path, data: Any, what: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(data))
    with pytest.raises(HotcoldError, match=what):
        read_conversation(path)


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe", b"{", b"[" * 200_000, b'{"a":' * 100_000])
def test_what_is_not_json_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(raw)
    with pytest.raises(HotcoldError, match="not valid JSON"):
        read_conversation(path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(HotcoldError, match="larger than"):
        read_conversation(path)


def test_missing_files_and_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(HotcoldError, match="no such file"):
        read_conversation(tmp_path / "none.json")
    with pytest.raises(HotcoldError, match="not a file"):
        read_conversation(tmp_path)
