"""Links of a chosen bandwidth on one machine: ranks in network namespaces, joined by shaped veth pairs.

    python -m bench.link_lab                         what plain sockets reach over each link, 2 and 4 ranks
    python -m bench.link_lab --ranks 2 --links 1

Two ranks are the two ends of one veth pair; more are joined by a bridge in a namespace of its own. A token bucket
(`tc tbf`) shapes what a rank sends and, at the bridge, what it receives, so each rank has a full-duplex port of the
rate, as at a switch. Without a rate the ranks share the loopback of one namespace, whose counters are theirs alone.

Names carry the process that made them. They go when the lab closes; what a killed process left goes when the next
opens, and its ranks die with it. The lab needs Linux, root, `ip` and `tc`; `why_not` says what is missing. It adds no
latency: that would need the kernel's netem, and a veth's own is some ten microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.frame import Bench, Run, Unavailable, comma_separated, integers, option
from bench.tables import new_table
from shoal.errors import InputError

LINKS = (0.1, 1.0, 10.0, None)  # Gbit/s; None is the loopback
# Payload of a full frame: 1500 bytes without the headers of IP and TCP, beside what the bucket counts, with Ethernet's.
PAYLOAD_SHARE = 1448 / 1514
WITHIN_PERCENT = 5.0
_PREFIX = "shoal"
_BURST_SECONDS, _MIN_BURST_BYTES = 1e-3, 16_384  # less than this much at once, and timers cannot keep the rate
_QUEUE_BYTES = 4 << 20
_PORT = 29_500  # the namespace is ours, and so is every port
_SUBNET = "10.77.0"
_CONGESTION_CONTROL = "reno"  # in every kernel; bbr, some systems' default, paces by itself and ramps up slowly


class LabError(Unavailable):
    """The lab could not be built, or a rank in it failed."""


@dataclass(frozen=True)
class Lab:
    """Namespaces that are up. A rank's process is run by `run`."""

    ranks: int
    rate_gbps: float | None
    namespaces: tuple[str, ...]  # by rank
    interface: str

    def run(self, module: str, config: Mapping[str, Any], *, timeout_seconds: float = 600.0) -> list[Any]:
        """`python -m module` in every rank at once; what each passed to `lab_rank.report`, by rank.

        Args:
            module: reads its `config` with `lab_rank.config`.

        Raises:
            LabError: a rank failed, with the end of what it printed, or they took longer than `timeout_seconds`.
        """
        with tempfile.TemporaryDirectory(prefix="shoal-lab-") as folder:
            ranks: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
            try:
                for rank, namespace in enumerate(self.namespaces):
                    log = (Path(folder) / f"{rank}.log").open("w+b")
                    given = {**self._environment(rank, Path(folder)), "SHOAL_LAB_CONFIG": json.dumps(config)}
                    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", module]
                    ranks.append((subprocess.Popen(command, env=given, stdout=log, stderr=log), log))
                _wait(ranks, time.monotonic() + timeout_seconds, module)
                return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(self.ranks)]
            finally:
                for process, log in ranks:
                    process.kill()
                    process.wait()
                    log.close()

    def _environment(self, rank: int, folder: Path) -> dict[str, str]:
        return {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1" if self.rate_gbps is None else _address(0),
            "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": self.interface,
            "OMP_NUM_THREADS": "1",
            "SHOAL_LAB_RESULT": str(folder / f"{rank}.json"),
            "SHOAL_LAB_INTERFACE": self.interface,
            "SHOAL_LAB_PARENT": str(os.getpid()),
        }


def why_not() -> str | None:
    """Why there can be no lab here, in a line; None where there can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "only root may make network namespaces: run it as root"
    name = f"{_PREFIX}-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except LabError as error:
        return f"network namespaces are not allowed here: {error}"
    return None


@contextmanager
def open_lab(ranks: int, rate_gbps: float | None) -> Iterator[Lab]:
    """Namespaces for `ranks` processes, each with a port of `rate_gbps` both ways; None: one loopback for all.

    Raises:
        InputError: fewer than 2 ranks, or no positive rate.
        LabError: there can be no lab here, or the kernel refused a part of it.
    """
    if not 2 <= ranks <= 100 or (rate_gbps is not None and not rate_gbps > 0):
        raise InputError(f"a lab of {ranks} ranks at {rate_gbps} Gbit/s: expected 2 to 100 ranks and a positive rate")
    reason = why_not()
    if reason is not None:
        raise LabError(f"no link lab here: {reason}")
    remove_stale()
    prefix = f"{_PREFIX}-{os.getpid()}-"
    try:
        yield _on_loopback(ranks, prefix) if rate_gbps is None else _on_veth(ranks, rate_gbps, prefix)
    finally:
        _remove(name for name in _namespaces() if name.startswith(prefix))


def remove_stale() -> None:
    """Remove the namespaces of labs whose process is no more, and with them their interfaces."""
    _remove(name for name in _namespaces() if name.startswith(f"{_PREFIX}-") and not _alive(name.split("-")[1]))


def link_name(rate_gbps: float | None) -> str:
    """As tables call it.

    >>> link_name(0.1), link_name(None)
    ('0.1 Gbit/s', 'loopback')
    """
    return "loopback" if rate_gbps is None else f"{rate_gbps:g} Gbit/s"


def parse_links(text: str) -> list[float | None]:
    """The links of `--links`.

    >>> parse_links("0.1,loopback")
    [0.1, None]
    """
    try:
        return [None if one == "loopback" else float(one) for one in comma_separated(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected Gbit/s or loopback, as in 0.1,10,loopback") from None


def verify(lab: Lab, *, seconds: float = 0.5) -> dict[str, Any]:
    """What plain sockets reach, every rank sending to the next at once as in a ring, beside what the rate lets through.

    Returns:
        `goodput_gbps`, the slowest rank's; `expected_gbps` and `off_percent`, None on the loopback; `holds`.
    """
    rate = 8.0 if lab.rate_gbps is None else lab.rate_gbps
    payload_bytes = max(1 << 20, int(rate * 1e9 / 8 * seconds))
    found = lab.run("bench.lab_rank", {"payload_bytes": payload_bytes}, timeout_seconds=60 + 20 * seconds)
    goodput = min(one["goodput_gbps"] for one in found)
    if lab.rate_gbps is None:
        return {"goodput_gbps": goodput, "expected_gbps": None, "off_percent": None, "holds": True}
    expected = lab.rate_gbps * PAYLOAD_SHARE
    off = 100 * (goodput / expected - 1)
    holds = abs(off) <= WITHIN_PERCENT
    return {"goodput_gbps": goodput, "expected_gbps": expected, "off_percent": off, "holds": holds}


def _on_loopback(ranks: int, prefix: str) -> Lab:
    name = f"{prefix}lo"
    _add_namespace(name)
    return Lab(ranks, None, (name,) * ranks, "lo")


def _on_veth(ranks: int, rate_gbps: float, prefix: str) -> Lab:
    names = tuple(f"{prefix}{rank}" for rank in range(ranks))
    for name in names:
        _add_namespace(name)
    if ranks == 2:
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
    else:
        hub = f"{prefix}hub"
        _add_namespace(hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
            _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
            _shape(hub, port, rate_gbps)
    for rank, name in enumerate(names):
        _ip("-n", name, "addr", "add", f"{_address(rank)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _shape(name, "eth0", rate_gbps)
    return Lab(ranks, rate_gbps, names, "eth0")


def _add_namespace(name: str) -> None:
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "lo", "up")
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    _ip("netns", "exec", name, "sh", "-c", f"echo {_CONGESTION_CONTROL} > {setting}")


def _shape(namespace: str, interface: str, rate_gbps: float) -> None:
    burst_bytes = max(_MIN_BURST_BYTES, round(rate_gbps * 1e9 / 8 * _BURST_SECONDS))
    bucket = ["tbf", "rate", f"{round(rate_gbps * 1e9)}bit", "burst", f"{burst_bytes}b", "limit", f"{_QUEUE_BYTES}b"]
    _call(["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *bucket])


def _address(rank: int) -> str:
    return f"{_SUBNET}.{rank + 1}"


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


def _remove(names: Iterator[str]) -> None:
    for name in list(names):
        with suppress(LabError):  # another process may have been faster
            _ip("netns", "del", name)


def _alive(pid: str) -> bool:
    return Path("/proc", pid).exists()


def _ip(*arguments: str) -> str:
    return _call(["ip", *arguments])


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def _wait(ranks: Sequence[tuple[subprocess.Popen[bytes], IO[bytes]]], until: float, module: str) -> None:
    while True:
        codes = [process.poll() for process, _ in ranks]
        for rank, code in enumerate(codes):
            if code:
                raise LabError(f"rank {rank} of {module} ended with status {code}:\n{_end_of(ranks[rank][1])}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > until:
            raise LabError(f"{module} took too long; rank 0 last reported:\n{_end_of(ranks[0][1])}")
        time.sleep(0.05)


def _end_of(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-4000:].strip()


def described(found: Mapping[str, Any]) -> str:
    """What `verify` found, in words.

    >>> described({"goodput_gbps": 0.95, "expected_gbps": 0.956, "off_percent": -0.63, "holds": True})
    'plain sockets: 0.950 Gbit/s each way, -0.6 % from what the rate lets through'
    """
    text = f"plain sockets: {found['goodput_gbps']:.3f} Gbit/s each way"
    if found["expected_gbps"] is None:
        return text
    text += f", {found['off_percent']:+.1f} % from what the rate lets through"
    return text if found["holds"] else f"{text}: THE RATE IS NOT REACHED on this machine"


LAB_OPTIONS = (
    option("--ranks", type=integers, default=[2, 4]),
    option("--links", type=parse_links, minimum=None, default=list(LINKS), help="Gbit/s, or loopback"),
)


def _run(run: Run) -> None:
    table = new_table(
        "Plain sockets, every rank sending to the next at once; Gbit/s of payload, the slowest rank's",
        f"ranks | link | reached | the rate lets through | off | within {WITHIN_PERCENT:g} %",
    )
    rows = []
    for ranks in run.asked.ranks:
        for rate_gbps in run.asked.links:
            with open_lab(ranks, rate_gbps) as lab:
                row = verify(lab, seconds=run.asked.seconds)
            rows.append({"ranks": ranks, "link": link_name(rate_gbps), **row})
            cells = ["", "", ""]
            if row["expected_gbps"] is not None:
                reached = "yes" if row["holds"] else "NO"
                cells = [f"{row['expected_gbps']:.3f}", f"{row['off_percent']:+.1f} %", reached]
            table.add_row(str(ranks), link_name(rate_gbps), f"{row['goodput_gbps']:.3f}", *cells)
    run.say(table)
    run.save(links=rows)


main = Bench(_run, *LAB_OPTIONS, option("--seconds", type=float, default=0.5, help="how long each sends"), quick=None)

if __name__ == "__main__":
    sys.exit(main())
