"""What code a figure was measured with, folder by folder, so that a figure older than that can be told.

A digest is of what the code does: comments, docstrings and layout do not count. Nothing but Python's own library is
imported here: the site is built where there is no torch, and says then what is older than the code it is built of.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, NATIVE = ROOT / "src" / "shoal", ROOT / "csrc"
# What a step inside a budget runs through. How a page or a command looks changes no figure.
STEP = (
    *("capture", "codecs", "core", "cost", "csrc", "engine", "graph", "kernels", "lowlevel", "memory", "offload"),
    *("planners", "rewrites"),
)
MEASURED = (*STEP, "transforms", "distributed")
# What a bench measures, where that is not a step inside a budget.
# Nothing runs: simulated, or planned on the meta device.
_PLANS = ("capture", "core", "cost", "graph", "planners", "rewrites")
_OF_RANKS = ("distributed", "codecs", "csrc")
_MEASURES = {
    "allreduce": _OF_RANKS,
    "parallel_accuracy": _OF_RANKS,
    "train_link": (*_OF_RANKS, *STEP),
    "adaptive_precision": (*_OF_RANKS, "offload"),
    "adaptive_race": (*_OF_RANKS, "offload"),
    "codecs": ("codecs", "csrc", "lowlevel"),
    "norm_conv": ("kernels", "csrc", "lowlevel"),
    "norm_sweeps": ("kernels", "csrc", "lowlevel"),
    "batchnorm": ("kernels", "transforms", "csrc", "lowlevel", "memory"),
    "inverted_batchnorm": ("kernels", "transforms", "csrc", "lowlevel"),
    "arena": ("memory", "csrc", "lowlevel"),
    "layout": ("memory", "csrc"),
    "hmms": _PLANS,
    "nnunet_presets": _PLANS,
    "order": _PLANS,
    "ablation": _PLANS,
    "techniques": (*_PLANS, "engine", "transforms"),
    "split_memory": (*_PLANS, "transforms"),
    "split_cost": ("transforms",),
    "split_accuracy": ("transforms",),
}


@cache
def code_digests() -> dict[str, str]:
    """A digest of each folder of `MEASURED`; those that are not here are left out."""
    found = {}
    for name in MEASURED:
        folder, pattern = (NATIVE, "*.[ch]*") if name == "csrc" else (SOURCE / name, "*.py")
        files = sorted(folder.rglob(pattern)) if folder.is_dir() else []
        if files:
            texts = (f"{file.relative_to(folder)}\n{meaning(file.read_text(), file.suffix)}" for file in files)
            found[name] = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
    return found


def meaning(text: str, suffix: str) -> str:
    """A source file without comments, docstrings and layout.

    >>> documented = "def f(x):\\n    '''Twice.'''\\n    return 2 * x  # so\\n"
    >>> meaning(documented, ".py") == meaning("def f(x): return 2*x", ".py")
    True
    >>> meaning("int a;  // one\\n", ".cpp") == meaning("int a;", ".cpp")
    True
    """
    if suffix != ".py":
        return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).split())
    parts: list[str] = []
    _tell(ast.parse(text), parts.append)
    return " ".join(parts)


def _tell(node: ast.AST, tell: Callable[[str], None]) -> None:
    """What `ast.dump` says, but for what some versions of Python leave out: fields that are empty, and docstrings."""
    tell(f"{type(node).__name__}(")
    for name in node._fields:
        value = getattr(node, name, None)
        if value is None or value == [] or name == "kind":
            continue
        tell(name)
        if isinstance(value, ast.AST):
            _tell(value, tell)
        elif isinstance(value, list):
            for number, one in enumerate(value):
                if isinstance(one, ast.AST):
                    if number or name != "body" or not _does_nothing(one):
                        _tell(one, tell)
                else:
                    tell(ascii(one))
        else:
            tell(ascii(value))
    tell(")")


def _does_nothing(statement: ast.AST) -> bool:
    """A docstring, or another constant."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def changed_since(theme: str, measured: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The folders that a figure's bench measures and that do something else by now.

    >>> changed_since("budgets", {"core": "a", "planners": "b", "distributed": "c"}, {"core": "a", "planners": "x"})
    ['planners']
    """
    counted = set(measured) & set(_MEASURES.get(theme, STEP))
    return sorted(folder for folder in counted if measured[folder] != now.get(folder))


def age(theme: str, measured: Mapping[str, str] | None, now: Mapping[str, str]) -> str:
    """What a page says of how old a figure is."""
    if measured is None:
        return "**Older than the code**: it was measured before a digest of the code was noted beside a figure."
    changed = changed_since(theme, measured, now)
    if not changed:
        return "What it measures has not changed since."
    return f"**Older than the code**: {', '.join(f'`{name}`' for name in changed)} changed since."


def theme_of(path: Path) -> str:
    """The bench that wrote a file.

    >>> theme_of(Path("one_plan_amd-epyc_2026-11-24.json")), theme_of(Path("budgets-unet_amd-epyc_2026-11-21.json"))
    ('one_plan', 'budgets')
    """
    return re.sub(r"_[^_]+_\d{4}-\d{2}-\d{2}$", "", path.stem).partition("-")[0]


_AGE = re.compile(r"^(`figures/(\S+\.json)`, [\d-]+\. ).*$", re.MULTILINE)


def aged(text: str, figures: Path) -> str:
    """A page whose lines about the age of its figures are as of now."""

    def of(match: re.Match[str]) -> str:
        path = figures / match.group(2)
        measured = json.loads(path.read_text())["conditions"].get("code")
        return match.group(1) + age(theme_of(path), measured, code_digests())

    return _AGE.sub(of, text)
