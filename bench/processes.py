"""Work in a process of its own, for a malloc that is tuned when a process starts, or since a kernel may end it.

A question is a line of JSON and so is each thing that comes back: `{"stage"}` for what is about to run, then
`{"answer"}`, or `{"wrong"}` and `{"input"}` for what is raised on the other side.
"""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any

from bench.conditions import CPU_ALLOCATOR, use_allocator
from bench.frame import WrongResult
from shoal.errors import InputError
from shoal.memory.cpu_allocator import TORCH

Stage = Callable[[str], None]
NEVER_UNMAPPED = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736:glibc.malloc.arena_max=1"
HUGE_PAGES = "glibc.malloc.hugetlb=1"


class Ended(InputError):
    """The process ended without an answer.

    Attributes:
        code: its exit status, negative for a signal.
        stage: what it was about.
    """

    def __init__(self, code: int, stage: str, reason: str) -> None:
        super().__init__(f"a contender's process ended: {reason}")
        self.code, self.stage, self.reason = code, stage, reason


class Worker:
    """A process that answers questions.

    Args:
        answers: `module:name` of what answers: `name(question, stage)`, or a class whose instance does.
        environment: of the process; None: this one's.
    """

    def __init__(self, answers: str, environment: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # open as long as the process runs
        # In a session of its own: Ctrl-C is for this process, which then ends its workers.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.processes", answers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env=environment,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: Any, stage: Stage = lambda what: None, limit_seconds: float | None = None) -> Any:
        """The answer.

        Args:
            question: plain values.
            stage: called with what is about to run.
            limit_seconds: then the process is ended.

        Raises:
            Ended: the process ended first.
            WrongResult, InputError: the same was raised in the process.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(limit_seconds or threading.TIMEOUT_MAX, self.close)
        timer.daemon = True
        timer.start()
        last = ""
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                reported = json.loads(line)
                if "answer" in reported:
                    return reported["answer"]
                if "stage" not in reported:
                    raise WrongResult(reported["wrong"]) if "wrong" in reported else InputError(reported["input"])
                last = reported["stage"]
                stage(last)
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        code = self._process.wait()
        self._errors.seek(0)
        raise Ended(code, last, (self._errors.read().strip().splitlines() or ["no reason given"])[-1])

    def close(self) -> None:
        self._process.kill()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._process.wait()


def malloc_environment(
    tunables: str, threads: int, inherited: Mapping[str, str], *, pinned: bool = False, allocator: str = TORCH
) -> dict[str, str]:
    """What a process runs under: no settings of malloc but `tunables`, and torch's allocator unless told otherwise.

    >>> malloc_environment("", 2, {"MALLOC_ARENA_MAX": "1", "HOME": "/"}, pinned=True)
    {'HOME': '/', 'OMP_PROC_BIND': 'true', 'OMP_NUM_THREADS': '2', 'BENCH_CPU_ALLOCATOR': 'torch'}
    """
    kept = {k: v for k, v in inherited.items() if k != "GLIBC_TUNABLES" and not k.startswith("MALLOC_")}
    if pinned:
        kept.setdefault("OMP_PROC_BIND", "true")
    kept["OMP_NUM_THREADS"] = str(threads)
    kept[CPU_ALLOCATOR] = allocator
    return {**kept, **({"GLIBC_TUNABLES": tunables} if tunables else {})}


def _serve(answers: str) -> None:
    module, _, name = answers.partition(":")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    use_allocator()
    answer = getattr(importlib.import_module(module), name)
    if isinstance(answer, type):
        answer = answer()
    out = sys.stdout

    def say(**what: Any) -> None:
        print(json.dumps(what), file=out, flush=True)

    with redirect_stdout(sys.stderr):
        for line in sys.stdin:
            try:
                say(answer=answer(json.loads(line), lambda what: say(stage=what)))
            except WrongResult as error:
                say(wrong=str(error))
            except InputError as error:
                say(input=str(error))


if __name__ == "__main__":
    _serve(sys.argv[1])
