"""Ranks of the link lab forked from the server of `tests.ranks`, which has imported torch and shoal already.

`bench.link_lab.Lab.run` starts each rank again; `tests.bench.test_link_lab` runs that.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import traceback
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.link_lab import Lab, LabError
from tests.ranks import forked

_CLONE_NEWNET = 0x40000000


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lab's ranks are forked."""
    monkeypatch.setattr(Lab, "run", _run)


def _run(lab: Lab, module: str, config: Mapping[str, Any], *, timeout_seconds: float = 600.0) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, namespace in enumerate(lab.namespaces):
            environment = {**lab._environment(rank, Path(folder)), "SHOAL_LAB_CONFIG": json.dumps(config)}
            ranks.append(forked(_rank, namespace, environment, module))
        try:
            for process in ranks:
                if not wait([process.sentinel], timeout_seconds) or process.exitcode:
                    raise LabError(f"a rank of {module} ended with status {process.exitcode}")
            return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(lab.ranks)]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _rank(namespace: str, environment: dict[str, str], module: str) -> None:
    try:
        descriptor = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
        torch.set_num_threads(1)
        os.environ.update(environment, SHOAL_LAB_PARENT=str(os.getppid()))
        import_module(module).main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
