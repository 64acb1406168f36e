"""A process that examines one network after another; see `bench.fuzz`. A kernel that ends it ends no more than that.

One line of JSON comes in for each network, `{"seed", "number", "attempt", "settings", "most_checks",
"most_shrunk", "shrunk"}`; lines
`{"stage"}` tell what is about to run, and a line `{"findings", "runs"}` or `{"not_a_network"}` ends it.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from bench.fuzz_compare import Comparison, Finding, NotANetwork, Setting
from bench.fuzz_networks import draw
from bench.fuzz_shrink import Case, has, script, shrink

SHRINKING = "shrinking"


def main() -> int:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)  # repairs are counted
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
    for line in sys.stdin:
        _say(examine(json.loads(line)))
    return 0


def examine(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The findings of one network, each with its script, and what each training took."""
    network = draw(asked["seed"], asked["number"], asked["attempt"])
    try:
        comparison = Comparison(network, lambda what: _say({"stage": what}))
    except NotANetwork as error:
        return {"not_a_network": str(error)}
    found: list[Finding] = []
    runs = []
    for setting in asked["settings"]:
        findings, ran = comparison.findings(Setting(*setting))
        found += findings
        runs += [asdict(one) for one in ran]
    shrunk = dict(asked["shrunk"])
    told = []
    for finding in distinct(found):
        case = Case(network, finding.setting)
        key = f"{finding.kind}: {finding.what}"
        if shrunk.get(key, 0) < asked["most_shrunk"]:
            shrunk[key] = shrunk.get(key, 0) + 1
            _say({"stage": f"{SHRINKING} {key}"})
            case = shrink(case, has(finding), asked["most_checks"])
        count = sum((one.kind, one.what) == (finding.kind, finding.what) for one in found)
        told.append(asdict(finding) | {"count": count, "ours": finding.ours, "script": script(case, finding)})
    return {"findings": told, "runs": runs}


def distinct(found: Sequence[Finding]) -> list[Finding]:
    """The first of each kind."""
    return list({(one.kind, one.what): one for one in reversed(found)}.values())[::-1]


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
