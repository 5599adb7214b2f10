from __future__ import annotations

from pathlib import Path

import pytest

from cubin_runtime.config import Config
from cubin_runtime.errors import UsageError


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_empty_environment_gives_the_defaults(tmp_path: Path) -> None:
    config = Config.from_environment({})
    assert config == Config(tmp_path / "cache" / "cubin-runtime" / "store")


def test_each_variable_is_read() -> None:
    config = Config.from_environment(
        {
            "CUBIN_RUNTIME_CACHE": "/store",
            "CUBIN_RUNTIME_SOURCES": "package, /tree  https://host/x",
            "CUBIN_RUNTIME_PINS": "/a.toml:/b.toml",
            "CUBIN_RUNTIME_OFFLINE": "1",
        }
    )
    assert config == Config(
        Path("/store"),
        ("package", "/tree", "https://host/x"),
        (Path("/a.toml"), Path("/b.toml")),
        offline=True,
        lazy_fetch=False,
    )


def test_the_users_own_pins_come_first(tmp_path: Path) -> None:
    own = tmp_path / "config" / "cubin-runtime" / "pins.toml"
    own.parent.mkdir(parents=True)
    own.write_text("")
    assert Config.from_environment({"CUBIN_RUNTIME_PINS": "/a.toml"}).pin_files == (own, Path("/a.toml"))


@pytest.mark.parametrize("word", ["0", "", "no", "off", "FALSE"])
def test_words_for_no_leave_the_network_on(word: str) -> None:
    assert not Config.from_environment({"CUBIN_RUNTIME_OFFLINE": word}).offline


def test_a_word_that_is_neither_is_refused() -> None:
    with pytest.raises(UsageError, match="CUBIN_RUNTIME_OFFLINE='maybe': expected 1 or 0"):
        Config.from_environment({"CUBIN_RUNTIME_OFFLINE": "maybe"})


def test_a_relative_store_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Config.from_environment({"CUBIN_RUNTIME_CACHE": "here"}).store == tmp_path / "here"


def test_pin_keys_are_read() -> None:
    config = Config.from_environment({"CUBIN_RUNTIME_PIN_KEYS": "/etc/old.pub:/etc/new.pub"})
    assert config.pin_keys == ("/etc/old.pub", "/etc/new.pub")


def test_pin_keys_that_name_no_key_are_refused() -> None:
    with pytest.raises(UsageError, match="names no key"):
        Config.from_environment({"CUBIN_RUNTIME_PIN_KEYS": " : "})


def test_a_home_that_may_not_be_looked_into_has_no_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *arguments: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.stat", refuse)
    assert Config.from_environment({}).pin_files == ()
