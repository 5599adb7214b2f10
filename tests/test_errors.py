"""Errors name the argument that they are of, and can be told with the caller's name for it."""

from __future__ import annotations

import pickle

import pytest

from cubin_runtime.compat.renaming import renamed
from cubin_runtime.errors import UsageError, WorkspaceError
from cubin_runtime.launch.workspace import Region, place_regions

SHAPE = UsageError("shape (1,), expected (2,)", argument="q")
BOUND = UsageError("expected at least 0", argument="max_seq_len", value=-1)
PLAIN = UsageError("q: no argument is given")


@pytest.mark.parametrize(
    ("error", "argument", "text"),
    [
        (SHAPE, "q", "q: shape (1,), expected (2,)"),
        (BOUND, "max_seq_len", "max_seq_len=-1: expected at least 0"),
        (PLAIN, "", "q: no argument is given"),
    ],
)
def test_the_message_begins_with_the_argument_and_its_value(error: UsageError, argument: str, text: str) -> None:
    assert (error.argument, str(error)) == (argument, text)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SHAPE, "query (Q): shape (1,), expected (2,)"),
        (BOUND, "max_seq_len=-1: expected at least 0"),
        (PLAIN, "q: no argument is given"),
    ],
)
def test_only_a_named_argument_is_renamed(error: UsageError, text: str) -> None:
    assert str(renamed(error, {"q": "query (Q)"})) == text


def test_an_error_is_renamed_again() -> None:
    assert str(renamed(renamed(SHAPE, {"q": "query"}), {"query": "Q"})) == "Q: shape (1,), expected (2,)"


def test_a_workspace_is_renamed() -> None:
    with pytest.raises(WorkspaceError, match=r"^scratch of 16 bytes") as caught:
        place_regions("scratch", 0, 16, [Region("partials", 32)])
    error = renamed(caught.value, {"scratch": "workspace_buffer"})
    assert isinstance(error, WorkspaceError)
    assert str(error).startswith("workspace_buffer of 16 bytes: 32 bytes are needed")


def test_an_error_of_another_process_is_the_same() -> None:
    copy = pickle.loads(pickle.dumps(BOUND))
    assert (copy.argument, str(copy)) == ("max_seq_len", "max_seq_len=-1: expected at least 0")
