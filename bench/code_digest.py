"""What code a figure was measured with, folder by folder, so that a figure older than that can be told.

A digest is of what the code does: comments, docstrings and layout do not count.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import shoal

SOURCE = Path(shoal.__file__).parent
NATIVE = SOURCE.parents[1] / "csrc"
# What a step inside a budget runs through. How a page or a command looks changes no figure.
STEP = ("capture", "codecs", "core", "cost", "csrc", "engine", "kernels", "lowlevel", "memory", "offload", "planners")
MEASURED = (*STEP, "transforms", "distributed")
_NOT_IN_A_STEP = {"distributed"}
_OF_RANKS = ("allreduce", "link_lab", "train_link", "parallel_accuracy", "adaptive_precision", "adaptive_race")


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
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]  # a docstring, or something else that does nothing
    return ast.dump(tree)


def changed_since(theme: str, measured: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The folders that a figure's bench measures and that do something else by now.

    >>> changed_since("budgets", {"core": "a", "planners": "b", "distributed": "c"}, {"core": "a", "planners": "x"})
    ['planners']
    """
    counted = set(measured) if theme in _OF_RANKS else set(measured) - _NOT_IN_A_STEP
    return sorted(folder for folder in counted if measured[folder] != now.get(folder))
