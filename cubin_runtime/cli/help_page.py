"""The help page of a verb: the values' names without their Python types, and options in groups."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

_OPTIONS = "Options"


class Verb(TyperCommand):
    """A verb whose help shows options by their ``rich_help_panel``, those without one last."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line, as ``[PIN-or-PATH...]`` or ``FILE...``."""
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(_name(one) if one.required else f"[{_name(one)}]" for one in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each group of options under its name."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                groups["Arguments"].append((_name(param), record[1].removesuffix("[required]").rstrip()))
            else:
                groups.setdefault(getattr(param, "rich_help_panel", None) or _OPTIONS, []).append(record)
        groups[_OPTIONS] = groups.pop(_OPTIONS)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _name(argument: Any) -> str:
    """The name of an argument's value, with dots where there may be several."""
    name = str(argument.metavar or argument.name.upper()).strip("[].")
    return f"{name}..." if argument.nargs != 1 else name
