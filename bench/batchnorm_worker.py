"""A process that measures one network under the malloc it was started with; see `bench.batchnorm`.

Malloc and OpenMP are set from the environment when a process starts. One line of JSON comes in, an `Asked`; lines of
JSON go out: `{"tell": ...}` for each thing that is about to run, then `{"result": ...}`, `{"wrong": ...}` where a
contender trains otherwise than eager, or `{"input": ...}` where what was asked for cannot be.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import redirect_stdout
from typing import Any

from bench.batchnorm_contenders import Asked
from bench.batchnorm_steps import measure
from bench.frame import WrongResult
from shoal.errors import InputError


def main() -> int:
    """Measure what the input asks for."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    asked = Asked(**json.loads(sys.stdin.readline()))
    answers = sys.stdout

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    with redirect_stdout(sys.stderr):
        try:
            say(result=measure(asked, lambda what: say(tell=what)))
        except WrongResult as error:
            say(wrong=str(error))
        except InputError as error:
            say(input=str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
