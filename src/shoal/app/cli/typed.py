"""What was typed on the command line: flags without effect are refused, and messages name flags instead of keywords."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import typer

from shoal.core.means import means_of
from shoal.errors import InputError

_FLAG_OF = {"depth": "split", "first": "batch", "patch": "image"}
"""Keywords of the library that a command calls by another name."""
_CODE = re.compile(r"(\w\([^()]*\))")  # a call in Python, which is typed as it stands


class _Need(NamedTuple):
    """A flag that has no effect alone.

    Attributes:
        flag: its parameter.
        is_met: of the command's parameters, whether the flag has an effect.
        give: what to type with it.
    """

    flag: str
    is_met: Callable[[dict[str, Any]], bool]
    give: str


def _encodes(given: dict[str, Any]) -> bool:
    return "allow" not in given or "encode" in means_of(given["allow"] or os.environ.get("SHOAL_ALLOW") or "exact")


def _plans(given: dict[str, Any]) -> bool:
    return given.get("planner") != "none"


_NEEDS = (
    *(
        _Need(flag, lambda given: given["split"] is not None, "--split too, such as --split 0.5")
        for flag in ("grid", "stochastic", "halo")
    ),
    _Need("kernels", _plans, "another --planner than none"),
    _Need("host_budget", _plans, "another --planner than none"),
    _Need("budget_of", _plans, "another --planner than none"),
    _Need("allow", _plans, "another --planner than none"),
    _Need("codec", _plans, "another --planner than none"),
    _Need("codec", _encodes, "--allow exact,encode too"),
    _Need("momentum", lambda given: given["optimizer"] == "sgd", "--optimizer sgd"),
)


def reject_without_effect(ctx: typer.Context) -> None:
    """Refuse flags that were typed and need another one.

    Raises:
        InputError: one has no effect; with what to type.
    """
    for need in _NEEDS:
        source = ctx.get_parameter_source(need.flag) if need.flag in ctx.params else None
        if source is not None and source.name == "COMMANDLINE" and not need.is_met(ctx.params):
            raise InputError(f"{_flags(ctx)[need.flag]} has no effect here; give {need.give}, or leave it out")


def in_flags(message: str, ctx: typer.Context) -> str:
    """A message of the library about `keyword=value` as one about the flag of this command, where it has one."""
    flags = _flags(ctx)
    names = "|".join((*flags, *(name for name, param in _FLAG_OF.items() if param in flags)))
    value = r"'(?P<text>[^']*)'|\((?P<several>[^()]*)\)|(?P<bare>[^\s,;:()']*)"
    keyword = re.compile(rf"(?<![\w.\-])(?P<name>{names})=(?:{value})")

    def typed(found: re.Match[str]) -> str:
        flag = flags.get(_FLAG_OF.get(found["name"], found["name"]), "")
        if found["text"] is not None:
            given = found["text"] if re.fullmatch(r"[^\s]+", found["text"]) else f"'{found['text']}'"
        elif found["several"] is not None:
            given = "x".join(found["several"].replace(" ", "").strip(",").split(","))
        else:
            given = found["bare"].lower() if found["bare"] in ("None", "True") else found["bare"]
        return f"{flag} {given}".rstrip()

    parts = _CODE.split(message)  # code at odd places
    return "".join(part if place % 2 else keyword.sub(typed, part) for place, part in enumerate(parts))


def _flags(ctx: typer.Context) -> dict[str, str]:
    """The flag of every parameter of the command."""
    named = {param.name: [text for text in param.opts if text.startswith("--")] for param in ctx.command.params}
    return {str(name): flags[0] for name, flags in named.items() if flags}
