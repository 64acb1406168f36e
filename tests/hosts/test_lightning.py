"""Lightning's Trainer inside a budget: a whole module, a part of it, by the callback and by hand; its batch finder."""

from __future__ import annotations

import doctest
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shoal.errors import BudgetError, InputError
from tests.hosts import page
from tests.hosts.laws import holds_to, loader, network

lightning = pytest.importorskip("lightning", reason="lightning is not installed: make test-hosts")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from shoal.hosts import lightning as ours  # noqa: E402
from shoal.hosts.lightning import ShoalBudget  # noqa: E402
from tests.raising import raising  # noqa: E402

WHOLE, PART, BY_HAND, FINDER = (page.block("lightning.md", number) for number in range(4))


class Whole(LightningModule):
    """Its training step calls itself."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.net = network()
        self.batch_size = batch_size

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        return loader(self.batch_size)


class Part(Whole):
    """Its training step calls a submodule."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


class Halting(Whole):
    """Its forward pass is two graphs."""

    def forward(self, x: torch.Tensor) -> Any:
        half = self.net[:6](x)
        torch._dynamo.graph_break()
        return self.net[6:](half)


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **more,
    }


@pytest.mark.parametrize(
    ("module", "code"),
    [(Whole, WHOLE), (Halting, WHOLE), (Part, PART), (Part, BY_HAND)],
    ids=["whole module", "two graphs", "submodule", "submodule by hand"],
)
def test_it_trains_inside_the_budget_as_plain_pytorch_does(module: type[Whole], code: str, tmp_path: Path) -> None:
    batches = loader()

    def train(budget: int | None) -> nn.Module:
        made = module()
        page.run(code, budget, module=made, batches=batches, settings=settings(tmp_path))
        return made

    holds_to(0.7, train)


def test_a_whole_module_compiled_by_hand_trains_likewise(tmp_path: Path) -> None:
    batches = loader()
    code = BY_HAND.replace("module.net", "module")
    assert code != BY_HAND

    def train(budget: int | None) -> nn.Module:
        made = Whole()
        page.run(code, budget, module=made, batches=batches, settings=settings(tmp_path))
        return made

    holds_to(0.7, train)


def test_the_peak_goes_to_the_trainers_loggers(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    module = Whole()
    more = settings(tmp_path, logger=logger)
    page.run(WHOLE, 2**21, module=module, batches=loader(), settings=more)
    logger.save()
    text = Path(logger.log_dir, "metrics.csv").read_text()
    assert str(module.shoal.measured_peak_bytes) in text and "shoal/measured_peak_bytes" in text


def test_lightnings_batch_finder_finds_the_largest_batch_inside_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial calls one compiled module with a batch of another size; `fits` compiles one for that batch alone.

    Bit for bit, in which a batch is refused in a second, not after all forms. That those of a later size are the same
    is tested with the search.
    """
    monkeypatch.setenv("SHOAL_ALLOW", "bitwise")
    module = Whole()
    found = page.run(FINDER, 2**20, module=module, settings=settings(tmp_path))["largest"]
    assert 1 <= found < 24 and module.batch_size == found

    def fits(batch: int) -> bool:
        trainer = Trainer(max_steps=2, callbacks=[ShoalBudget(2**20)], **settings(tmp_path))
        try:
            trainer.fit(Whole(batch))
        except BudgetError:
            return False
        return True

    assert fits(found) and not fits(found + 1)


def test_where_not_even_one_image_fits_the_finder_gets_the_budgets_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_ALLOW", "bitwise")  # refused in a second, not after all forms
    code = FINDER.replace("binsearch", "power").replace("init_val=8", "init_val=2")
    with raising(BudgetError, "58.59 KiB"):
        page.run(code, 60_000, module=Whole(), settings=settings(tmp_path))


def test_a_training_step_that_never_calls_what_is_compiled_is_refused(tmp_path: Path) -> None:
    with raising(InputError, "training_step", "self(...)"):
        page.run(WHOLE, 2**21, module=Part(), batches=loader(), settings=settings(tmp_path))


def test_an_unknown_part_is_refused_before_anything_runs(tmp_path: Path) -> None:
    trainer = Trainer(max_steps=1, callbacks=[ShoalBudget("2GiB", part="nett")], **settings(tmp_path))
    with raising(InputError, "part='nett'"):
        trainer.fit(Whole())


@pytest.fixture
def process_group() -> Iterator[None]:
    """Lightning makes one and leaves it, and names its ranks in the environment."""
    before = dict(os.environ)
    yield
    torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("process_group")
def test_a_strategy_that_wraps_the_module_takes_a_part_and_refuses_the_whole(tmp_path: Path) -> None:
    more = settings(tmp_path, strategy="ddp", devices=1)
    part = Part()
    page.run(PART, 2**21, module=part, batches=loader(), settings=more)
    assert part.net.shoal.measured_peak_bytes <= 2**21
    with raising(InputError, "training_step"):
        page.run(WHOLE, 2**21, module=Whole(), batches=loader(), settings=more)


def test_an_optimizer_among_the_options_is_refused() -> None:
    with raising(InputError, "configure_optimizers"):
        ShoalBudget("2GiB", optimizer=torch.optim.SGD(network().parameters()))


def test_the_training_step_is_the_modules_own_again(tmp_path: Path) -> None:
    module = Whole()
    page.run(WHOLE, 2**21, module=module, batches=loader(), settings=settings(tmp_path))
    assert "training_step" not in vars(module)


def test_the_examples_of_the_callback_print_what_they_say() -> None:
    assert doctest.testmod(ours).failed == 0
