"""The program is a user of the library: it imports what anyone could, by its public name where there is one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import shoal
import shoal.app
import shoal.codecs
import shoal.distributed

PUBLIC = {name: package for package in (shoal, shoal.codecs, shoal.distributed) for name in package.__all__}


def imported() -> Iterator[tuple[str, str, str]]:
    """File, module and name of everything that the program imports from the library."""
    for path in Path(str(shoal.app.__file__)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shoal":
                for alias in node.names:
                    yield path.name, node.module, alias.name


def test_nothing_private_is_imported() -> None:
    for file, module, name in imported():
        assert not any(part.startswith("_") for part in (*module.split("."), name)), f"{file}: {module}.{name}"


def test_what_has_a_public_name_is_imported_by_it() -> None:
    for file, module, name in imported():
        if name in PUBLIC and not module.startswith(("shoal.app", "shoal.errors")):
            assert module == PUBLIC[name].__name__, f"{file}: take {name} from {PUBLIC[name].__name__}"
