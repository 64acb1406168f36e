"""The command line: parse, call, print.

Exit codes: 0 done, 2 an argument, a file, the data or the budget is wrong (one line names what and what to do),
3 out of memory, 130 interrupted with a checkpoint to resume from (143 after SIGTERM).

Imports all of the library and of `app`.
"""

from shoal.app.cli import doctor, env, frontier, hardware, plan, train
from shoal.app.cli.console import app

__all__ = ["app", "doctor", "env", "frontier", "hardware", "main", "plan", "train"]


def main() -> None:
    """What the console script `shoal` runs."""
    app()
