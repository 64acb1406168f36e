"""Every block of Python in the README and the pages runs, in order, as a reader would type it; every command is one.

A page's blocks share their names. What a reader has before a page begins, such as a model, an optimizer and a loader,
stands in `reader`. A block that cannot run says why in a comment of the page: `<!-- not run: why -->`.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from typer._click.exceptions import MissingParameter

import shoal
from shoal.app import models
from shoal.app.cli import app
from shoal.engine.backend import backend

ROOT = Path(__file__).parents[2]
# Those of hosts are run by `make test-hosts`; figures name no calls; upstream.md shows faults of PyTorch.
PAGES = [
    ROOT / "README.md",
    *(
        path
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if not {"hosts", "figures"} & set(path.relative_to(ROOT).parts) and path.name != "upstream.md"
    ),
]
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z", re.DOTALL)


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group only of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks_of(page: Path) -> list[tuple[int, str, str]]:
    """Line, text, and why it is not run, of each block of Python."""
    text = page.read_text()
    document = Document(text, str(page))
    found = []
    for region in PythonCodeBlockParser()(document):
        before = text[: region.start]
        why = NOT_RUN.search(before)
        found.append((before.count("\n") + 1, str(region.parsed), why.group(1) if why else ""))
    return found


class Small(nn.Module):
    """Stands in for a reader's network: as few ops as have something to plan."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self._layers(3, 8), *self._layers(8, 8))
        self.last = nn.Linear(8, num_classes)

    @staticmethod
    def _layers(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x).mean((2, 3)))


def reader() -> dict[str, Any]:
    """What a reader of any page has."""
    model = Small()
    images, labels = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "shoal": shoal,
        "models": models,
        "resnet18": Small,
        "model": model,
        "network": Small(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "criterion": nn.CrossEntropyLoss(),
        "images": images,
        "labels": labels,
        "loader": [(images, labels)],
        "x": torch.randn(64),
        "DistributedDataParallel": DistributedDataParallel,
    }


@pytest.fixture(autouse=True)
def _backend_is_known() -> None:
    """As where Shoal is installed; run only from its sources, PyTorch does not find it by itself."""
    if "shoal" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(backend, name="shoal")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=name_of)
def test_the_blocks_of_a_page_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names = reader()
    with one_rank():
        for line, text, why in blocks_of(page):
            if not why:
                exec(compile("\n" * (line) + text, str(page), "exec"), names)


def test_what_is_not_run_says_why() -> None:
    whys = [why for page in PAGES for _, _, why in blocks_of(page) if why]
    assert all(len(why) > 10 for why in whys) and len(whys) < 10


def commands_of(page: Path) -> list[str]:
    """The lines of shell blocks, and the commands in backticks, that call `shoal`."""
    text = page.read_text()
    lines = chain.from_iterable(block.splitlines() for block in re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M))
    inline = re.findall(r"(?<!`)`((?:shoal|torchrun) [^`]+)`", text)
    found = (re.sub(r"\s+", " ", re.sub(r"\s#.*", "", line)).strip() for line in chain(lines, inline))
    return [line for line in found if re.match(r"(torchrun .*-m )?shoal\b", line)]


COMMANDS = [
    pytest.param(command, id=f"{name_of(page)}-{command}")
    for page in [*PAGES, *sorted((ROOT / "docs" / "hosts").glob("*.md")), ROOT / "CONTRIBUTING.md"]
    for command in dict.fromkeys(commands_of(page))
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_of_the_program(command: str) -> None:
    _, *words = shlex.split(command[command.index("shoal") :])
    program = typer.main.get_command(app)
    if not words:
        return
    chosen = program.commands[words[0]]  # type: ignore[attr-defined]
    if len(words) > 1:
        with suppress(MissingParameter):  # a sentence may name a command with the one option that it is about
            chosen.make_context(words[0], words[1:])  # raises where an option is unknown or has no such value


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.M))
    named = set()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        named |= set(re.findall(r"`make ([a-z0-9-]+)", page.read_text()))
        named |= set(re.findall(r"^make ([a-z0-9-]+)", page.read_text(), re.M))
    assert named <= targets


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= listed, pages - listed
    assert listed - pages == {"index.md", "contributing.md", "changelog.md"}  # made of files of the root


def test_headings_of_a_page_begin_with_one() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.M)]
        assert levels[0] == 1 and levels.count(1) == 1, page
        assert all(after <= before + 1 for before, after in pairwise(levels)), page


def test_blocks_parse() -> None:
    for page in PAGES:
        for _, text, _ in blocks_of(page):
            ast.parse(text)
