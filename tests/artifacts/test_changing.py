"""The lock beside a user's file: held by one process at a time, never for ever, and left out where none works."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cubin_runtime.artifacts.atomic_write import changing

HOLD = "import sys; from pathlib import Path; from cubin_runtime.artifacts.atomic_write import changing\n"
HOLD += "with changing(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "home" / "pins.toml"


def test_another_process_waits_until_it_is_free(file: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(TimeoutError, match="another process is changing it"), changing(file, 0.1):
            pass
        holder.communicate("")
    with changing(file, 0.1):
        pass


def test_the_lock_is_the_user_s_own_file_and_stays(file: Path) -> None:
    with changing(file):
        pass
    assert (file.with_name(".pins.toml.lock").stat().st_mode & 0o777, file.exists()) == (0o600, False)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_locks_do_not_work_nobody_waits(file: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    begin = time.monotonic()
    with changing(file):
        file.write_text("changed")
    assert time.monotonic() - begin < 5
    assert file.read_text() == "changed"


def test_a_link_in_the_place_of_the_lock_is_not_followed(file: Path, tmp_path: Path) -> None:
    file.parent.mkdir()
    file.with_name(".pins.toml.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"symbolic link|ELOOP"), changing(file):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_an_error_inside_frees_it(file: Path) -> None:
    with pytest.raises(KeyError), changing(file):
        raise KeyError
    with changing(file, 0.1):
        pass
