"""A machine whose figures cannot be is refused where it is made, and when it is read."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from shoal.core import presets
from shoal.core.hardware import Device, Hardware, Link, MeasuredLink
from shoal.core.records import read_record
from shoal.errors import InputError
from tests.engine.compile.wrong_values import WRONG, is_readable
from tests.raising import raising

ABSENT = object()
LINK = ("bus", 1e9, 2e9, 1e-6)
DEVICE = ("gpu", 2**30, 1e12, 1e11, 1e-6)


def test_a_link_that_cannot_be_says_what_is_wrong_with_it() -> None:
    with raising(InputError, "'bus'", "to_host_bytes_per_second=0", "0.001"):
        Link("bus", 0, 1e9, 0.0)
    with raising(InputError, "'gpu'", "launch_seconds=nan"):
        Device("gpu", 1, 1e9, 1e9, float("nan"))


@pytest.mark.parametrize(
    ("kind", "given"),
    [(Link, LINK), (Device, DEVICE), (MeasuredLink, (*LINK, 1e-6, 1e-6))],
    ids=str,
)
def test_any_figure_can_be_or_is_refused_in_one_line(kind: Any, given: tuple[Any, ...]) -> None:
    for place in range(1, len(given)):
        for value in WRONG:
            try:
                made = kind(*given[:place], value, *given[place + 1 :])
            except InputError as error:
                assert is_readable(error)
            else:
                assert 0 <= float(list(vars(made).values())[place]) <= 1e24


def test_a_machine_survives_json_and_a_damaged_one_is_refused() -> None:
    machine = presets.get("p100-nvlink")
    whole = json.loads(json.dumps(asdict(machine)))
    assert read_record(Hardware, whole, "hardware") == machine
    for section in (None, "device", "link"):
        for key in whole if section is None else whole[section]:
            for value in (*WRONG, ABSENT):
                damaged = json.loads(json.dumps(whole))
                at = damaged if section is None else damaged[section]
                at[key] = value
                if value is ABSENT:
                    del at[key]
                try:
                    assert isinstance(read_record(Hardware, damaged, "hardware"), Hardware)
                except InputError as error:
                    assert is_readable(error)
