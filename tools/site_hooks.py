"""What the documentation site has besides its pages: the command line's help, and the JSON of the results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
HELP = "<!-- help of every verb -->"
RESULTS = "benchmarks/results"


def on_files(files: Any, config: Any) -> Any:
    """Add the JSON of the measurements, so that the pages can link to it."""
    for result in sorted((ROOT / RESULTS).glob("*.json")):
        files.append(File.generated(config, f"results/{result.name}", abs_src_path=str(result)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write the help of the command line where it is asked for, and point links to results into the site."""
    if HELP in markdown:
        markdown = markdown.replace(HELP, command_line_reference())
    here = os.path.dirname(page.file.src_uri)
    to_results = os.path.relpath("results", here or ".")
    to_root = os.path.relpath(RESULTS, os.path.join("docs", here))
    return markdown.replace(f"]({to_root}/", f"]({to_results}/")


def command_line_reference() -> str:
    """A section for each verb with what ``--help`` prints, as Markdown."""
    general = _help()
    verbs = re.findall(r"^  ([a-z][a-z-]+) ", general.partition("Commands:")[2], re.MULTILINE)
    if not verbs:
        raise RuntimeError("the command line's help names no verb")
    parts = [f"```text\n{general}\n```"]
    parts += [f"## {verb}\n\n```text\n{_help(verb)}\n```" for verb in verbs]
    return "\n\n".join(parts)


def _help(*verb: str) -> str:
    command = [sys.executable, "-c", "from cubin_runtime.cli import main; raise SystemExit(main())", *verb, "--help"]
    environment = {**os.environ, "COLUMNS": "96", "TERMINAL_WIDTH": "96", "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return shown.stdout.strip()
