"""``doctor``: the settings, where each comes from, and what works on this machine."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._version import __version__
from . import completion, options, output
from .doctor_tasks import TASKS, failed_requirements, sentence, tasks_of

if TYPE_CHECKING:
    from ..artifacts.library import Library
    from ..artifacts.pins.pin import Pin
    from ..config import Config
    from ..errors import CubinRuntimeError


def doctor(
    check: Annotated[
        bool,
        typer.Option("--check", help="Ask every source, for 2 s at most, and write a file in the store."),
    ] = False,
    require: Annotated[
        list[str] | None,
        options.option(
            "--require",
            f"Fail unless this works: {', '.join(TASKS)}, fetch:RELEASE; implies --check.",
            "TASK",
            autocompletion=completion.tasks,
        ),
    ] = None,
    store: options.StoreOption = None,
    source: options.SourceOption = None,
    pins: options.PinsOption = None,
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
) -> None:
    """Show what works on this machine, and the next steps.

    Driver, devices, store, sources and pins, and where each setting comes from. What was not tried is called "not
    tried"; each "no" comes with the next step.
    """
    config, problem, only_store = _configured(store, source, pins, offline)
    errors = [] if problem is None else [problem]
    check = check or bool(require)
    driver = _driver()
    library, pins_problem = _library(config)
    if pins_problem is not None and problem is None:
        errors.append(pins_problem)
    releases = [_release(library, pin, [d["number"] for d in driver["devices"]]) for pin in library.pins]
    report: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "settings": _settings(config, store, source, pins, offline),
        "offline": config.offline,
        "pins": {
            "problem": None if pins_problem is None else str(pins_problem),
            "releases": len(releases),
            "signed": len(config.pin_files) if config.pin_keys else 0,
        },
        "settings_problem": None if problem is None or only_store else str(problem),
        "store": _store(library, problem, write=check),
        "sources": _sources(library, network=check),
        "accelerator": _accelerator(),
        "driver": driver,
        "releases": releases,
    }
    report["tasks"] = tasks_of(report)
    failed = failed_requirements(require or (), report["tasks"])
    shown = [output.error_of(error) for error in errors]
    shown += [output.error_object(code, "RequirementError", message) for code, message in failed]
    if json:
        for one in report["tasks"]:
            del one["code"]
        output.emit_json("doctor", report, shown)
    else:
        _print(report)
    for one in shown:
        output.error_line(one["message"])
    output.finish(one["code"] for one in shown)


def _configured(
    store: Path | None, source: list[str] | None, pins: list[Path] | None, offline: bool
) -> tuple[Config, CubinRuntimeError | None, bool]:
    """The configuration, the error if it is invalid, and whether that is of the store alone.

    An invalid one is replaced by one with which the rest can still be shown.
    """
    from ..config import Config
    from ..errors import CubinRuntimeError

    nowhere = Path("/nonexistent/cubin-runtime")
    try:
        return options.make_config(store, source, pins, offline), None, False
    except CubinRuntimeError as error:
        with suppress(CubinRuntimeError):
            return options.make_config(nowhere, source, pins, offline), error, True
        return Config(store=nowhere, offline=True, lazy_fetch=False), error, False


def _library(config: Config) -> tuple[Library, CubinRuntimeError | None]:
    """The library; where pins or sources cannot be read, one with the built-in pins alone, and the error."""
    from ..artifacts.library import Library
    from ..errors import CubinRuntimeError

    try:
        return Library(config), None
    except CubinRuntimeError as error:
        return Library(replace(config, pin_files=(), pin_keys=(), pin_state=None, sources=None, offline=True)), error


def _sources(library: Library, *, network: bool) -> list[dict[str, Any]]:
    from ..artifacts.releases.source_trial import try_sources

    return [asdict(trial) for trial in try_sources(library, network=network)]


def _accelerator() -> dict[str, Any]:
    """Return whether the C extension of launches is installed and fits."""
    from importlib.metadata import PackageNotFoundError, version

    from ..launch.accelerator import accelerator

    try:
        installed: str | None = version("cubin-runtime-accelerator")
    except PackageNotFoundError:
        installed = None
    if accelerator() is not None:
        return {"installed": True, "version": installed or "unknown", "problem": None}
    problem = (
        "it is not installed" if installed is None else f"version {installed} does not fit this version of the package"
    )
    return {"installed": False, "version": installed, "problem": problem}


def _settings(
    config: Config, store: Path | None, source: list[str] | None, pins: list[Path] | None, offline: bool
) -> list[dict[str, Any]]:
    sources = [_source(s) for s in config.sources] if config.sources else ["package", "then each pin's own"]
    files = [str(p) for p in config.pin_files]
    origin = "user configuration folder" if files else "default"
    log = os.environ.get("CUBIN_RUNTIME_LOG", "")
    return [
        _setting("store", str(config.store), options.origin_of("CUBIN_RUNTIME_CACHE", store is not None)),
        _setting("sources", sources, options.origin_of("CUBIN_RUNTIME_SOURCES", bool(source))),
        _setting("pins", ["built-in", *files], options.origin_of("CUBIN_RUNTIME_PINS", bool(pins), origin)),
        _setting("pin keys", _pin_keys(config), options.origin_of("CUBIN_RUNTIME_PIN_KEYS", False)),
        _setting("pin versions", _pin_versions(config), options.origin_of("XDG_STATE_HOME", False)),
        _setting("offline", config.offline, options.origin_of("CUBIN_RUNTIME_OFFLINE", offline)),
        _setting("lazy fetch", config.lazy_fetch, "follows offline" if config.offline else "default"),
        _setting("profile", config.profile, options.origin_of("CUBIN_RUNTIME_PROFILE", False)),
        _setting("record", str(config.record or ""), options.origin_of("CUBIN_RUNTIME_RECORD", False)),
        _setting("audit", str(config.audit or ""), options.origin_of("CUBIN_RUNTIME_AUDIT", False)),
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
    """Check where the newest version of each signed pin file is recorded, and whether that is possible."""
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


def _store(library: Library, unset: CubinRuntimeError | None, *, write: bool) -> dict[str, Any]:
    """Return whether the store is there and can be written; with ``write`` an existing one is written to."""
    from ..errors import CubinRuntimeError

    root = library.store.root
    facts: dict[str, Any] = {"path": str(root), "exists": False, "writable": False, "free_bytes": None}
    if unset is not None:
        return {**facts, "path": None, "problem": str(unset)}
    try:
        os.stat(root)
    except FileNotFoundError:
        pass
    except OSError as error:
        facts["problem"] = f"cannot be read: {error.strerror}"
    nearest = next((p for p in (root, *root.parents) if os.path.exists(p)), Path("/"))
    with suppress(OSError):
        facts["free_bytes"] = shutil.disk_usage(nearest).free
    facts["exists"] = os.path.isdir(root)
    facts["writable"] = (
        facts.get("problem") is None and os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)
    )
    if facts["writable"] and write and facts["exists"]:
        try:
            library.store.check_writable()
        except CubinRuntimeError as error:
            facts.update(writable=False, problem=str(error))
    return {"problem": None, **facts}


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


def _release(library: Library, pin: Pin, devices: list[int]) -> dict[str, Any]:
    from ..artifacts.library import hint
    from ..artifacts.releases.catalog import manifest_at_hand, open_catalog
    from ..artifacts.tables.kernel_filter import KernelFilter
    from ..artifacts.tables.native_kernels import BUILT_NOT_RUN, NativeKernel
    from ..errors import CubinRuntimeError

    record: dict[str, Any] = {
        "name": pin.name,
        "files": pin.files or None,
        "bytes": pin.bytes or None,
        "in_store": None,
        "missing_bytes": pin.bytes or None,
        "install": hint(pin) or None,
        "known_abi": _known_abi(pin.abi),
        "launchable": False,
        "runs_on": {},
        "built_not_run": {},
        "problem": None,
    }
    try:
        manifest = manifest_at_hand(library, pin)
        there = library.store.present(set(manifest.digests.values()))
        record["in_store"] = sum(digest in there for digest in manifest.digests.values())
        record["files"] = len(manifest.digests)
        record["missing_bytes"] = pin.estimate(len(manifest.digests) - record["in_store"]) if pin.bytes else None
        catalog = open_catalog(library, pin, fetch=False)
        for number in devices:
            rows = [entry.row for entry in catalog.kept_by(KernelFilter(sm=number))]
            untried = sum(isinstance(row, NativeKernel) and row.status == BUILT_NOT_RUN for row in rows)
            record["runs_on"][str(number)] = len(rows)
            record["built_not_run"][str(number)] = untried
            record["launchable"] |= record["known_abi"] and len(rows) > 0
    except CubinRuntimeError as error:
        record["problem"] = str(error)
    return record


def _known_abi(abi: str | None) -> bool:
    from ..kernels.abi import ABIS

    return abi is not None and abi in ABIS


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
    output.facts(_machine_facts(report))
    output.line()
    output.table(
        ("release", "files", "in the store", "launchable", "problem"),
        (
            (
                r["name"],
                "unknown" if r["files"] is None else r["files"],
                "unknown" if r["in_store"] is None else r["in_store"],
                _launchable(r, report["driver"]),
                r["problem"] or "none",
            )
            for r in report["releases"]
        ),
    )
    output.line()
    for one in report["tasks"]:
        output.paragraph(sentence(one))
    sys.stdout.flush()


def _launchable(release: dict[str, Any], driver: dict[str, Any]) -> str:
    if release["launchable"]:
        return "yes"
    if not release["known_abi"]:
        return "no: its parameter layout is unknown"
    if not driver["devices"]:
        return "no: there is no device"
    return "unknown" if release["problem"] else "no: no kernel for this device"


def _machine_facts(report: dict[str, Any]) -> list[tuple[str, object]]:
    store, driver = report["store"], report["driver"]
    free = "unknown" if store["free_bytes"] is None else output.size(store["free_bytes"])
    state = store["problem"] or ("exists" if store["exists"] else "does not exist yet")
    facts: list[tuple[str, object]] = [
        ("store", f"{state}, {'writable' if store['writable'] else 'not writable'}, {free} free"),
        ("driver", f"CUDA {driver['cuda']}" if driver["present"] else f"none: {driver['problem']}"),
    ]
    accelerator = report["accelerator"]
    facts.insert(1, ("accelerator", accelerator["version"] if accelerator["installed"] else accelerator["problem"]))
    for d in driver["devices"]:
        about = f"{d['name']}, sm_{d['number']}, {d['multiprocessors']} multiprocessors"
        facts.append((f"device {d['ordinal']}", about))
    return facts
