"""``install`` on a made-up package tree: what it replaces, what it leaves, how it is undone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from cubin_runtime.compat import flashinfer as ours
from cubin_runtime.compat.flashinfer import installation

TREE = {
    "__init__": """
        from .cascade import merge_state as merge_state
        from .xqa import xqa as xqa
        from .xqa import xqa_mla
        from . import decode, prefill""",
    "xqa": """
        def xqa(q): return "xqa"
        def xqa_mla(q): return "xqa_mla" """,
    "mla/__init__": "from ._core import xqa_batch_decode_with_kv_cache_mla",
    "mla/_core": """
        def xqa_batch_decode_with_kv_cache_mla(query, novel=None): return "mla" """,
    "decode": """
        from .mla import xqa_batch_decode_with_kv_cache_mla as xqa_batch_decode_with_kv_cache_mla
        from .xqa import xqa
        def xqa_batch_decode_with_kv_cache(query): return xqa(query)
        class Wrapper:
            kept = staticmethod(xqa_batch_decode_with_kv_cache)""",
    "cascade": """
        def merge_state(v_a): return "merge_state"
        def wrapper(v): return merge_state(v)""",
    "prefill": "",
}


class StandsForModule:
    """As cffi puts into ``sys.modules``: of another type than its class says."""

    __class__ = property(lambda _: ModuleType)  # type: ignore[assignment]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package called flashinfer on the path; nothing of it stays."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("flashinfer", "client")}
    for name in before:
        del sys.modules[name]
    for name, source in TREE.items():
        file = tmp_path / "flashinfer" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = source.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
        file.write_text("\n".join(line[indent:] for line in lines) + "\n")
    (tmp_path / "client.py").write_text(
        "from flashinfer.decode import xqa_batch_decode_with_kv_cache as decode\n"
        "from cubin_runtime.compat.flashinfer import xqa_mla\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "stands_for_module", StandsForModule())
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("flashinfer", "client")]:
        del sys.modules[name]
    sys.modules.update(before)
    assert (installation._State.handles, installation._State.replacements) == (0, ())


@pytest.fixture
def peer(tree: Path) -> Any:
    return importlib.import_module("flashinfer")


def is_ours(function: Any, name: str) -> bool:
    """Whether a function runs our code."""
    return isinstance(function, FunctionType) and function.__code__ is getattr(ours, name).__code__


def test_the_functions_of_every_module_are_ours(peer: Any) -> None:
    with ours.install():
        assert is_ours(peer.xqa, "xqa")
        assert is_ours(sys.modules["flashinfer.xqa"].xqa, "xqa")
        assert is_ours(peer.decode.xqa, "xqa")
        assert is_ours(peer.decode.xqa_batch_decode_with_kv_cache, "xqa_batch_decode_with_kv_cache")
        assert is_ours(peer.mla._core.xqa_batch_decode_with_kv_cache_mla, "xqa_batch_decode_with_kv_cache_mla")
        assert is_ours(peer.cascade.wrapper.__globals__["merge_state"], "merge_state")


def test_undoing_gives_every_function_back(peer: Any) -> None:
    before = peer.xqa, peer.decode.xqa_batch_decode_with_kv_cache, peer.mla._core.xqa_batch_decode_with_kv_cache_mla
    ours.install().undo()
    after = peer.xqa, peer.decode.xqa_batch_decode_with_kv_cache, peer.mla._core.xqa_batch_decode_with_kv_cache_mla
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert peer.decode.xqa_batch_decode_with_kv_cache(None) == "xqa"


def test_a_module_that_imported_a_function_before_has_ours(peer: Any) -> None:
    client = importlib.import_module("client")
    with ours.install():
        assert is_ours(client.decode, "xqa_batch_decode_with_kv_cache")
    assert client.decode is peer.decode.xqa_batch_decode_with_kv_cache


def test_a_module_that_imports_a_function_meanwhile_has_the_peer_s_afterwards(peer: Any) -> None:
    with ours.install():
        client = importlib.import_module("client")
        assert is_ours(client.decode, "xqa_batch_decode_with_kv_cache")
    assert client.decode(None) == "xqa"


def test_who_imported_ours_keeps_ours(peer: Any) -> None:
    client = importlib.import_module("client")
    ours.install().undo()
    assert client.xqa_mla is ours.xqa_mla


def test_what_a_class_holds_stays(peer: Any) -> None:
    kept = peer.decode.Wrapper.kept
    with ours.install():
        assert peer.decode.Wrapper.kept is kept


def test_a_function_that_somebody_replaced_meanwhile_stays_so(peer: Any) -> None:
    with ours.install():
        peer.decode.xqa = other = lambda: None
    assert peer.decode.xqa is other


def test_the_handle_reports_places_and_what_either_side_lacks(peer: Any) -> None:
    with ours.install() as handle:
        assert handle.replaced["xqa"] == ("flashinfer.decode.xqa", "flashinfer.xqa", "flashinfer.xqa.xqa")
        assert sorted(handle.replaced) == [
            "merge_state",
            "xqa",
            "xqa_batch_decode_with_kv_cache",
            "xqa_batch_decode_with_kv_cache_mla",
            "xqa_mla",
        ]
        assert "append_paged_kv_cache" in handle.missing
        assert not set(handle.missing) & {*handle.replaced, "FP4Tensor", "Installed", "install"}
        assert handle.unknown == {"xqa_batch_decode_with_kv_cache_mla": ("novel",)}


def test_a_copy_of_ours_is_as_ours(peer: Any) -> None:
    with ours.install():
        for name in ("xqa", "merge_state"):
            installed, function = getattr(peer, name), getattr(ours, name)
            assert installed is not function
            for attribute in ("__defaults__", "__kwdefaults__", "__name__", "__module__", "__doc__", "__globals__"):
                assert getattr(installed, attribute) is getattr(function, attribute)
            assert vars(installed) == vars(function)


def test_handles_are_counted(peer: Any) -> None:
    outer = ours.install()
    first = peer.xqa
    inner = ours.install()
    assert (peer.xqa is first, inner.replaced == outer.replaced) == (True, True)
    outer.undo()
    outer.undo()
    assert peer.xqa is first
    inner.undo()
    assert peer.xqa(None) == "xqa"


def test_an_error_in_the_block_undoes_too(peer: Any) -> None:
    with pytest.raises(KeyError), ours.install():
        raise KeyError
    assert peer.xqa(None) == "xqa"


def test_threads_install_and_undo_at_once(peer: Any) -> None:
    wrong = []

    def work() -> None:
        for _ in range(10):
            with ours.install():
                if not is_ours(peer.xqa, "xqa"):
                    wrong.append(peer.xqa)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    assert wrong == []
    assert peer.xqa(None) == "xqa"


@pytest.mark.usefixtures("tree")
def test_a_module_that_a_version_lacks_is_no_error(tree: Path) -> None:
    (tree / "flashinfer" / "cascade.py").unlink()
    (tree / "flashinfer" / "__init__.py").write_text("from . import decode\n")
    with ours.install() as handle:
        assert "merge_state" in handle.missing
        assert "xqa" in handle.replaced


def test_a_module_that_cannot_be_imported_is_an_error(tree: Path) -> None:
    (tree / "flashinfer" / "prefill.py").write_text("import a_package_that_is_not_there\n")
    (tree / "flashinfer" / "__init__.py").write_text("")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        ours.install()


def test_without_flashinfer_there_is_nothing_to_install_on(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match="flashinfer"):
        ours.install()
