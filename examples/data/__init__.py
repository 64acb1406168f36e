"""Data sets of the papers, and where they lie: `shoal train --data examples.data.cifar10:open_cifar10`."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "SHOAL_DATA"
# Next to the project: a folder that several checkouts share.
DEFAULT = Path("..") / "shared" / "data"


def data_dir() -> Path:
    """The folder named by SHOAL_DATA, else `../shared/data` beside the working directory or beside this checkout.

    It need not exist: whoever reads a data set from it reports what is missing.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    beside_checkout = Path(__file__).resolve().parents[2] / DEFAULT
    return beside_checkout if beside_checkout.is_dir() and not DEFAULT.is_dir() else DEFAULT
