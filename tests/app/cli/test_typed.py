"""Messages of the command line are about what was typed, and flags without effect are refused."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.app.cli.typed import in_flags


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2 and done.stdout == "", done.output
    return done.stderr.removeprefix("shoal: ").splitlines()[0]


TRAIN, PLAN, FRONTIER = (
    ("train", "--budget", "1GiB"),
    ("plan", "--model", "resnet18"),
    ("frontier", "--model", "resnet18"),
)


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        ((*TRAIN, "--rehearse", "x"), "--rehearse x is not a preset;"),
        (("train", "--budget", "2 much"), "--budget '2 much' is not a size;"),
        ((*TRAIN, "--host-budget", "-1"), "--host-budget -1 is not a size;"),
        ((*TRAIN, "--offload-to", "none", "--rehearse", "p100-nvlink"), "--rehearse p100-nvlink is for what"),
        ((*TRAIN, "--batch", "0"), "--batch 0: it must be at least 1"),
        ((*TRAIN, "--codec", "linear", "--planner", "chain", "--allow", "encode"), "--allow encode"),
        ((*TRAIN, "--split", "2"), "--split 2.0: expected a share"),
        ((*PLAN, "--hardware", "x"), "--hardware x is not a preset;"),
        ((*PLAN, "--budget", "1GiB", "--split", "1", "--grid", "99x1", "--image", "64"), "--grid 99x1 is finer than"),
        ((*FRONTIER, "--points", "1"), "--points 1: expected an int"),
        (("hardware", "--device", "tpu"), "--device tpu is not a device;"),
        (("hardware", "--device", "cpu", "--folder", "nowhere"), "--folder nowhere is not a folder"),
    ],
)
def test_a_message_names_the_flag_that_was_typed(arguments: tuple[str, ...], begins: str) -> None:
    assert said(*arguments).startswith(begins)


def test_code_and_variables_of_the_environment_stay_as_they_are() -> None:
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    said = (
        "SHOAL_BUDGET='x' or shoal.compile(model, budget='2GiB') or offload_to=None, budget='2 GiB', host_budget= too"
    )
    assert in_flags(said, command.context_class(command, info_name="train")) == (
        "SHOAL_BUDGET='x' or shoal.compile(model, budget='2GiB') or --offload-to none, --budget '2 GiB', "
        "--host-budget too"
    )


@pytest.mark.parametrize(
    ("arguments", "flag", "give"),
    [
        *(((*TRAIN, *typed), typed[0], "--split too") for typed in (("--grid", "2x2"), ("--halo", "exact"))),
        *(((*PLAN, *typed), typed[0], "--split too") for typed in (("--grid", "3x3"), ("--stochastic", "0.2"))),
        ((*TRAIN, "--momentum", "0.5", "--optimizer", "adamw"), "--momentum", "--optimizer sgd"),
        *(
            ((*command, "--codec", "linear"), "--codec", "--allow exact,encode too")
            for command in (TRAIN, PLAN, FRONTIER)
        ),
        *(
            (("train", "--planner", "none", *typed), typed[0], "another --planner than none")
            for typed in (
                ("--kernels", "eager"),
                ("--host-budget", "1GiB"),
                ("--budget-of", "allocated"),
                ("--allow", "exact"),
                ("--codec", "linear"),
            )
        ),
    ],
)
def test_a_flag_that_has_no_effect_is_refused(arguments: tuple[str, ...], flag: str, give: str) -> None:
    assert said(*arguments).startswith(f"{flag} has no effect here; give {give}")
