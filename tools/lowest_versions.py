"""Print a pip constraint for each dependency at the lowest version that pyproject.toml allows."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main() -> None:
    """One line each, markers kept; the extras that the package itself imports count too."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["signing"]):
        wanted, _, marker = requirement.partition(";")
        name, lowest = re.fullmatch(r"\s*([\w.-]+)\s*>=\s*([\w.]+)\s*(?:,.*)?", wanted).groups()
        print(f"{name}=={lowest}" + (f" ;{marker}" if marker else ""))


if __name__ == "__main__":
    main()
