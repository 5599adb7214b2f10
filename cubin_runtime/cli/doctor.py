"""``doctor``: the settings, where each comes from, and what works on this machine."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .._version import KERNELS_VERSION, __version__
from . import options, output

if TYPE_CHECKING:
    from ..artifacts.library import Library
    from ..artifacts.pins.pin import Pin
    from ..config import Config


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("doctor")(doctor)


def doctor(
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
) -> None:
    """Show driver, devices, store, sources and pins, where each setting comes from, and what works on this machine."""
    config = options.make_config(store, source, pins, offline)
    driver = _driver()
    releases, codes = _releases(config, [d["number"] for d in driver["devices"]])
    report: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "settings": _settings(config, store, source, pins, offline),
        "store": _store(config.store),
        "driver": driver,
        "releases": releases,
    }
    report["will_work"] = _verdicts(config, driver, releases, report["store"]["writable"])
    if json:
        output.emit_json("doctor", report)
    else:
        _print(report)
    output.finish(codes)


def _settings(
    config: Config, store: Path | None, source: list[str] | None, pins: list[Path] | None, offline: bool
) -> list[dict[str, Any]]:
    sources = [_source(s) for s in config.sources] if config.sources else ["package", "then each pin's own"]
    files = [str(p) for p in config.pin_files]
    found = "user configuration folder" if files else "default"
    log = os.environ.get("CUBIN_RUNTIME_LOG", "")
    return [
        _setting("store", str(config.store), options.origin_of("CUBIN_RUNTIME_CACHE", store is not None)),
        _setting("sources", sources, options.origin_of("CUBIN_RUNTIME_SOURCES", bool(source))),
        _setting("pins", ["built-in", *files], options.origin_of("CUBIN_RUNTIME_PINS", bool(pins), found)),
        _setting("pin keys", _pin_keys(config), options.origin_of("CUBIN_RUNTIME_PIN_KEYS", False)),
        _setting("pin versions", _pin_versions(config), options.origin_of("XDG_STATE_HOME", False)),
        _setting("offline", config.offline, options.origin_of("CUBIN_RUNTIME_OFFLINE", offline)),
        _setting("lazy fetch", config.lazy_fetch, "follows offline" if config.offline else "default"),
        _setting("profile", config.profile, options.origin_of("CUBIN_RUNTIME_PROFILE", False)),
        _setting("record", str(config.record or ""), options.origin_of("CUBIN_RUNTIME_RECORD", False)),
        _setting("log", log, options.origin_of("CUBIN_RUNTIME_LOG", False)),
    ]


def _pin_keys(config: Config) -> list[str] | str:
    """Keys by name and place; a fault of theirs is told with the releases, which then cannot be read."""
    from ..artifacts.pins.signatures import load_keys
    from ..errors import CubinRuntimeError

    try:
        keys = load_keys(config.pin_keys)
    except CubinRuntimeError:
        return list(config.pin_keys)
    return [f"{key.name} ({key.origin})" for key in keys] or "none: pin files need no signature"


def _pin_versions(config: Config) -> str:
    """Where the newest version of each signed pin file is recorded, and whether that is possible."""
    from ..artifacts.pins.signed_statement import why_not_recorded

    if config.pin_state is None:
        return "not recorded: pin files need no signature"
    problem = why_not_recorded(config.pin_state)
    return f"{config.pin_state}{f': CANNOT be recorded, {problem}' if problem else ''}"


def _source(text: str) -> str:
    """A source without its secrets; why it is none is told with the releases, which then cannot be looked up."""
    from ..artifacts.library import parse_source
    from ..errors import UsageError

    try:
        return parse_source(text).label
    except UsageError:
        return "not a source"


def _setting(name: str, value: object, origin: str) -> dict[str, Any]:
    return {"name": name, "value": value, "from": origin}


def _store(root: Path) -> dict[str, Any]:
    """Whether the store is there and can be written, without writing to it."""
    problem = None
    try:
        os.stat(root)
    except FileNotFoundError:
        pass
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    nearest = next((p for p in (root, *root.parents) if os.path.exists(p)), Path("/"))
    try:
        free: int | None = shutil.disk_usage(nearest).free
    except OSError:
        free = None
    writable = problem is None and os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)
    facts = {"path": str(root), "exists": os.path.isdir(root), "writable": writable, "free_bytes": free}
    return {**facts, "problem": problem}


def _driver() -> dict[str, Any]:
    """libcuda and the devices it shows; a machine without them is an answer, not an error."""
    from ..errors import CubinRuntimeError
    from ..launch.driver import Driver

    try:
        driver = Driver()
        version = driver.version()
        facts = [driver.device(i) for i in range(driver.device_count())]
    except (CubinRuntimeError, OSError) as error:
        return {"present": False, "cuda": None, "devices": [], "problem": str(error)}
    devices = [
        {
            "ordinal": f.ordinal,
            "name": f.name,
            "number": f.capability[0] * 10 + f.capability[1],
            "multiprocessors": f.multiprocessors,
        }
        for f in facts
    ]
    cuda = f"{version // 1000}.{version % 1000 // 10}"
    problem = None if devices else "no device is visible"
    return {"present": True, "cuda": cuda, "devices": devices, "problem": problem}


def _releases(config: Config, devices: list[int]) -> tuple[list[dict[str, Any]], list[int]]:
    """Each pinned release as far as it is available locally without a network."""
    from dataclasses import replace

    from ..artifacts.library import Library
    from ..errors import CubinRuntimeError

    try:
        library = Library(replace(config, offline=True, lazy_fetch=False))
        return [_release(library, pin, devices) for pin in library.pins], []
    except CubinRuntimeError as error:
        return [{"name": "pins", "problem": str(error)}], [error.exit_code]


def _release(library: Library, pin: Pin, devices: list[int]) -> dict[str, Any]:
    from ..artifacts.releases.catalog import manifest_at_hand, open_catalog
    from ..artifacts.tables.kernel_filter import KernelFilter
    from ..artifacts.tables.native_kernels import BUILT_NOT_RUN, NativeKernel
    from ..errors import CubinRuntimeError

    found: dict[str, Any] = {
        "name": pin.name,
        "files": pin.files,
        "in_store": None,
        "known_abi": _known_abi(pin.abi),
        "launchable": False,
        "runs_on": {},
        "built_not_run": {},
        "problem": None,
    }
    try:
        manifest = manifest_at_hand(library, pin)
        there = library.store.present(set(manifest.digests.values()))
        found["in_store"] = sum(digest in there for digest in manifest.digests.values())
        catalog = open_catalog(library, pin, fetch=False)
        for number in devices:
            rows = [entry.row for entry in catalog.kept_by(KernelFilter(sm=number))]
            untried = sum(isinstance(row, NativeKernel) and row.status == BUILT_NOT_RUN for row in rows)
            found["runs_on"][str(number)] = len(rows)
            found["built_not_run"][str(number)] = untried
            found["launchable"] |= found["known_abi"] and len(rows) > 0
    except CubinRuntimeError as error:
        found["problem"] = str(error)
    return found


def _known_abi(abi: str | None) -> bool:
    from ..kernels.abi import ABIS

    return abi is not None and abi in ABIS


def _verdicts(config: Config, driver: dict[str, Any], releases: list[dict[str, Any]], writable: bool) -> list[str]:
    """Plain sentences: what will work here and what will not."""
    fetch = "yes, from the sources above, in that order"
    if config.offline:
        fetch = "no, offline is set and only local sources are read"
    if not writable:
        fetch = "no, the store cannot be written"
    said = [f"fetch: {fetch}", "verify, inspect, list: yes, they need no GPU"]
    said += [f"native kernels: {_kernels_verdict(r)}" for r in releases if r["name"] == f"hopper-{KERNELS_VERSION}"]
    if not driver["devices"]:
        return [*said, f"launch: no, {driver['problem'] or 'no device is visible'}"]
    for device in driver["devices"]:
        number = str(device["number"])
        where = f"launch on {device['name']} (sm_{number})"
        usable = [r for r in releases if r.get("known_abi") and r["runs_on"].get(number)]
        said += [f"{where}: {_launch_verdict(r, number)}" for r in usable]
        if not usable:
            said.append(f"{where}: no, no local release has a kernel for it")
    return said


def _kernels_verdict(release: dict[str, Any]) -> str:
    return f"no, {release['problem']}" if release["problem"] else f"yes, {release['name']} is available locally"


def _launch_verdict(release: dict[str, Any], number: str) -> str:
    count, untried = release["runs_on"][number], release["built_not_run"][number]
    if untried == count:
        return f"only when asked for by name, {count} kernels of {release['name']} were built but never run"
    built = f" ({untried} more were built but never run)" if untried else ""
    return f"yes, {count - untried} kernels of {release['name']}{built}"


def _print(report: dict[str, Any]) -> None:
    output.facts([(key, report[key]) for key in ("version", "python", "platform")])
    output.line()
    output.table(
        ("setting", "value", "from"),
        (
            (s["name"], ", ".join(s["value"]) if isinstance(s["value"], list) else s["value"], s["from"])
            for s in report["settings"]
        ),
    )
    output.line()
    output.facts(_machine_facts(report["store"], report["driver"]))
    output.line()
    output.table(
        ("release", "files", "in the store", "launchable", "problem"),
        (
            (
                r["name"],
                r.get("files", ""),
                "unknown" if r.get("in_store") is None else r["in_store"],
                _launchable(r, report["driver"]),
                r["problem"] or "none",
            )
            for r in report["releases"]
        ),
    )
    output.line()
    for sentence in report["will_work"]:
        output.line(sentence)
    sys.stdout.flush()


def _launchable(release: dict[str, Any], driver: dict[str, Any]) -> str:
    if release.get("launchable"):
        return "yes"
    if not release.get("known_abi"):
        return "no ABI"
    if not driver["devices"]:
        return "no device"
    return "unknown" if release["problem"] else "not on this device"


def _machine_facts(store: dict[str, Any], driver: dict[str, Any]) -> list[tuple[str, object]]:
    free = "unknown" if store["free_bytes"] is None else output.size(store["free_bytes"])
    state = store["problem"] or ("there" if store["exists"] else "not made yet")
    found: list[tuple[str, object]] = [
        ("store", f"{state}, {'writable' if store['writable'] else 'NOT writable'}, {free} free"),
        ("driver", f"CUDA {driver['cuda']}" if driver["present"] else f"none: {driver['problem']}"),
    ]
    for d in driver["devices"]:
        about = f"{d['name']}, sm_{d['number']}, {d['multiprocessors']} multiprocessors"
        found.append((f"device {d['ordinal']}", about))
    return found
