"""What the documentation site has besides its pages: the command line's help, and the JSON of the results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).resolve().parent))

from site_links import BESIDE, dead_links, names_asked_for
from site_tables import with_labels

ROOT = Path(__file__).resolve().parents[1]
HELP = "<!-- help of every verb -->"
SCHEMAS = "<!-- JSON schema of every verb -->"
ASKED_FOR: dict[str, list[str]] = {}  # page of the site -> names that it has to document


def on_files(files: Any, config: Any) -> Any:
    """Add the JSON of the measurements and the examples, so that the pages can link to them."""
    for found in sorted(file for pattern in BESIDE for file in ROOT.glob(pattern)):
        files.append(File.generated(config, found.relative_to(ROOT).as_posix(), abs_src_path=str(found)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write the help of the command line where it is asked for, and point links to results into the site."""
    ASKED_FOR[page.file.dest_uri] = names_asked_for(markdown)
    if HELP in markdown:
        markdown = markdown.replace(HELP, command_line_reference())
    if SCHEMAS in markdown:
        markdown = markdown.replace(SCHEMAS, json_reference())
    # The root of the site is docs/: what lies beside that folder in the repository lies inside it here.
    above = "../" * (page.file.src_uri.count("/") + 1)
    for folder in (pattern.rpartition("/")[0] for pattern in BESIDE):
        markdown = markdown.replace(f"]({above}{folder}/", f"]({above.removeprefix('../')}{folder}/")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Mark tables of sentences, which phones show as lists."""
    return with_labels(html)


def on_post_build(config: Any) -> None:
    """Refuse a site with a link or picture that leads nowhere, or without a name that its reference asks for."""
    site = Path(config["site_dir"])
    if dead := dead_links(site):
        raise PluginError("dead links: " + "; ".join(dead))
    texts = {page: (site / page).read_text() for page in ASKED_FOR}
    if absent := [name for page, names in ASKED_FOR.items() for name in names if f'id="{name}"' not in texts[page]]:
        raise PluginError("not documented: " + ", ".join(absent))


def command_line_reference() -> str:
    """A section for each verb with what ``--help`` prints, as Markdown."""
    general = _help()
    verbs = re.findall(r"^  ([a-z][a-z-]+) ", general.partition("Commands:")[2], re.MULTILINE)
    if not verbs:
        raise RuntimeError("the command line's help names no verb")
    parts = [f"```text\n{general}\n```"]
    parts += [f"## {verb}\n\n```text\n{_help(verb)}\n```" for verb in verbs]
    return "\n\n".join(parts)


def json_reference() -> str:
    """A section for each verb with a table of the fields that it prints, as Markdown."""
    code = "import json; from cubin_runtime.cli.json_schema import PAYLOADS; print(json.dumps(PAYLOADS))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    parts = []
    for verb, payloads in json.loads(done.stdout).items():
        parts.append(f"## {verb}")
        for number, payload in enumerate(payloads):
            rows = [row for name, field in payload.items() for row in _fields(name, field)]
            beside = "\n\nor" if number else ""
            parts.append(f"{beside}\n\n| field | type | meaning |\n| --- | --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _fields(name: str, field: dict[str, Any]) -> list[str]:
    """The rows of a field and of those below it."""
    kinds = [one for one in field.get("anyOf", [field]) if one.get("type") != "null"]
    kind = " or ".join(dict.fromkeys(_kind(one) for one in kinds))
    null = " or null" if {"type": "null"} in field.get("anyOf", ()) else ""
    rows = [f"| `{name}` | {kind}{null} | {field.get('description', '')} |"]
    for one in kinds:
        inner = one.get("items", {}) if one.get("type") == "array" else one
        for below in inner.get("anyOf", [inner]):
            base = f"{name}[]" if one.get("type") == "array" else name
            for key, value in below.get("properties", {}).items():
                rows += [row for row in _fields(f"{base}.{key}", value) if row not in rows]
    return rows


def _kind(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    return {"array": "list", "object": "object", None: "any"}.get(field.get("type"), field.get("type", "any"))


def _help(*verb: str) -> str:
    command = [sys.executable, "-c", "from cubin_runtime.cli import main; raise SystemExit(main())", *verb, "--help"]
    environment = {**os.environ, "COLUMNS": "96", "TERMINAL_WIDTH": "96", "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return shown.stdout.strip()
