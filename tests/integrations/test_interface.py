"""Plug-ins beside engines whose interface does not fit: one warning, and the engine goes on."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from cubin_runtime.integrations import sglang, vllm
from cubin_runtime.integrations.interface import register_safely, require


def test_what_is_there() -> None:
    require({"json": ("loads", "dumps"), "os.path": ()})


def test_all_that_is_missing_is_named() -> None:
    with pytest.raises(ImportError, match=r"the interface lacks json\.absent, no_such_engine \(.*\), os\.gone"):
        require({"json": ("loads", "absent"), "no_such_engine": ("name",), "os": ("gone",)})


def test_whatever_registering_raises_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise TypeError("other arguments")

    register_safely("no-such-engine", fail)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "cubin_runtime adds no attention backend to no-such-engine of an unknown version: TypeError: other arguments"
    )


@pytest.mark.parametrize("plugin", [vllm, sglang])
def test_an_engine_with_another_interface_goes_on(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = plugin.__name__.rpartition(".")[2]
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # a package without the modules that are asked for
    plugin.register()
    (record,) = caplog.records
    assert "the interface lacks" in record.getMessage()


def test_without_transformers_the_error_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from cubin_runtime.integrations.transformers import register

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers.*; pip install 'transformers>=5,<6'"):
        register()
