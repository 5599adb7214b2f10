from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cubin_runtime.config import Config, Network, user_pins_path
from cubin_runtime.errors import UsageError


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_empty_environment_gives_the_defaults(tmp_path: Path) -> None:
    config = Config.from_environment({})
    assert config == Config(tmp_path / "cache" / "cubin-runtime" / "store")


def test_paths_may_be_text_and_sources_paths() -> None:
    given = {"pin_files": ("/a.toml",), "record": "/recorded", "audit": "/audit", "sources": (Path("/tree"), "package")}
    config = Config("/store", **given)  # type: ignore[arg-type]
    assert (config.store, config.pin_files) == (Path("/store"), (Path("/a.toml"),))
    assert (config.record, config.audit, config.sources) == (Path("/recorded"), Path("/audit"), ("/tree", "package"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"store": None}, "store=None: expected a path"),
        ({"store": 3}, "store=3: expected a path"),
        ({"record": False}, "record=False: expected a path"),
        ({"sources": "https://host/x"}, "sources='https://host/x': expected a tuple of them"),
        ({"pin_files": Path("/a.toml")}, "pin_files=.*a.toml.*: expected a tuple of them"),
    ],
)
def test_what_is_no_path_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        Config(**{"store": "/store", **given})  # type: ignore[arg-type]


def test_relative_paths_start_where_the_configuration_came_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    config = Config(
        Path("store"), pin_files=(Path("a.toml"),), audit=Path("~/audit"), network=Network(ca_bundle=Path("ca.pem"))
    )
    assert (config.store, config.pin_files) == (tmp_path / "store", (tmp_path / "a.toml",))
    assert (config.audit, config.network.ca_bundle) == (Path("/home/me/audit"), tmp_path / "ca.pem")


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


def test_calls_are_recorded_where_it_says() -> None:
    config = Config.from_environment({"CUBIN_RUNTIME_RECORD": "/calls", "CUBIN_RUNTIME_PROFILE": "1"})
    assert (config.record, config.profile) == (Path("/calls"), True)


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


@pytest.mark.parametrize("value", [" : ", ""])
def test_pin_keys_that_name_no_key_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match="names no key"):
        Config.from_environment({"CUBIN_RUNTIME_PIN_KEYS": value})


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a home, in a folder where somebody planted pins; gives the folder."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for folder in ("~/.config/cubin-runtime", ".config/cubin-runtime", "cubin-runtime"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pins.toml").write_text("planted")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_home_no_pins_are_read_and_the_store_must_be_named(nobody: Path) -> None:
    assert Config.from_environment({"CUBIN_RUNTIME_CACHE": "/store"}) == Config(Path("/store"))
    with pytest.raises(UsageError, match="no home folder for the store: set CUBIN_RUNTIME_CACHE"):
        Config.from_environment({})
    with pytest.raises(UsageError, match="no home folder for user pins"):
        user_pins_path()


def test_without_a_home_there_is_no_place_for_the_versions_of_signed_pin_files(
    nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    environment = {"CUBIN_RUNTIME_CACHE": "/store", "CUBIN_RUNTIME_PIN_KEYS": "/etc/key.pub"}
    with pytest.raises(UsageError, match="set HOME or XDG_STATE_HOME"):
        Config.from_environment(environment)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert Config.from_environment(environment).pin_state == Path("/state/cubin-runtime/pin_versions.json")


@pytest.mark.parametrize("variable", ["HOME", "XDG_CONFIG_HOME"])
@pytest.mark.parametrize("value", [".", "~", ""])
def test_a_relative_home_is_none(nobody: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    assert Config.from_environment({"CUBIN_RUNTIME_CACHE": "/store"}).pin_files == ()


@pytest.mark.parametrize("name", ["CUBIN_RUNTIME_CACHE", "CUBIN_RUNTIME_PINS"])
def test_the_home_of_an_unknown_user_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} '~no-such-user/x': no home folder is known"):
        Config.from_environment({name: "~no-such-user/x"})


def test_a_relative_path_in_a_folder_that_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="the current folder does not exist any more"):
        Config.from_environment({"CUBIN_RUNTIME_CACHE": "here"})
    monkeypatch.chdir(tmp_path)


def test_a_home_that_may_not_be_looked_into_has_no_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *arguments: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.stat", refuse)
    assert Config.from_environment({}).pin_files == ()


def test_pins_of_a_home_whose_server_is_down_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object, **named: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setenv("XDG_CONFIG_HOME", "/gone")
    monkeypatch.setattr("os.stat", fail)
    config = Config.from_environment({"CUBIN_RUNTIME_CACHE": "/store"})
    assert config.pin_files == (Path("/gone/cubin-runtime/pins.toml"),)


def test_how_servers_are_reached_is_read() -> None:
    network = Config.from_environment(
        {
            "CUBIN_RUNTIME_CACHE": "/store",
            "CUBIN_RUNTIME_TIMEOUT": "2.5",
            "CUBIN_RUNTIME_RETRIES": "0",
            "CUBIN_RUNTIME_PROXY": "http://proxy:3128",
            "CUBIN_RUNTIME_CA_BUNDLE": "/ca.pem",
            "CUBIN_RUNTIME_CLIENT_CERT": "/me.pem",
            "CUBIN_RUNTIME_TOKENS": "Host.example=abc other=@/token",
        }
    ).network
    assert (network.timeout, network.retries, network.proxy) == (2.5, 0, "http://proxy:3128")
    assert (network.ca_bundle, network.client_cert) == (Path("/ca.pem"), Path("/me.pem"))
    assert network.tokens == (("host.example", "abc"), ("other", "@/token"))
    assert "abc" not in repr(network)


@pytest.mark.parametrize(
    ("name", "value"),
    [("TIMEOUT", "0"), ("TIMEOUT", "nan"), ("TIMEOUT", "inf"), ("RETRIES", "-1"), ("RETRIES", "1.5")],
)
def test_a_number_outside_its_domain_is_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"CUBIN_RUNTIME_{name}='{value}': expected"):
        Config.from_environment({"CUBIN_RUNTIME_CACHE": "/store", f"CUBIN_RUNTIME_{name}": value})


def test_the_file_of_a_token_may_lie_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = Config.from_environment({"CUBIN_RUNTIME_CACHE": "/store", "CUBIN_RUNTIME_TOKENS": "host=@~/token"})
    assert config.network.tokens == (("host", "@/home/me/token"),)


@pytest.mark.parametrize("value", ["secret", "=secret", "host=", "host=@"])
def test_tokens_without_host_are_refused_and_not_shown(value: str) -> None:
    with pytest.raises(UsageError, match="expected HOST=TOKEN") as caught:
        Config.from_environment({"CUBIN_RUNTIME_CACHE": "/store", "CUBIN_RUNTIME_TOKENS": value})
    assert "secret" not in str(caught.value)
