"""Make nnU-Net's commands find Shoal's trainer and planners: `python -m shoal.hosts.nnunet install`, or `remove`.

nnU-Net looks for the classes that -tr and -pl name in the files of its own package; planners nowhere else. So `install`
writes two files of a few lines there, which import ours; where Shoal is not installed any more they do nothing.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from shoal.core.files import write_text
from shoal.errors import InputError

FILES = {
    "training/nnUNetTrainer/variants/shoal_trainer.py": ("trainer", "nnUNetTrainerShoal"),
    "experiment_planning/experiment_planners/shoal_planners.py": (
        "planner",
        "nnUNetPlannerShoal, nnUNetPlannerShoalResEncL, nnUNetPlannerShoalResEncM, nnUNetPlannerShoalResEncXL",
    ),
}


def main(arguments: list[str]) -> int:
    """Exit code 2 where it is called otherwise, or nnU-Net is not there."""
    if arguments not in (["install"], ["remove"]):
        print("usage: python -m shoal.hosts.nnunet install | remove", file=sys.stderr)
        return 2
    try:
        root = nnunet_folder()
        for name, (module, classes) in FILES.items():
            path = root / name
            if arguments == ["install"]:
                write_text(path, _text(module, classes))
            elif path.exists():
                path.unlink()
            print(f"{path} {'written' if path.exists() else 'is not there'}")
    except (InputError, OSError) as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2
    return 0


def nnunet_folder() -> Path:
    """Where nnU-Net's package is.

    Raises:
        InputError: it is not installed.
    """
    spec = find_spec("nnunetv2")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("nnU-Net is not installed: pip install nnunetv2")
    return Path(next(iter(spec.submodule_search_locations)))


def _text(module: str, classes: str) -> str:
    return (
        '"""Written by `python -m shoal.hosts.nnunet install`; `remove` takes it away."""\n\n'
        "from importlib.util import find_spec\n\n"
        'if find_spec("shoal") is not None:\n'
        f"    from shoal.hosts.nnunet.{module} import {classes}\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
