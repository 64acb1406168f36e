"""Several models under one budget on CUDA: their turns take what was predicted, whatever else the process holds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

TURNS = """
import json, logging, os, sys
import torch
from torch import nn
import shoal
from tests import made_up_machine
from tests.cuda_standin.counts import record_all, recorded

made_up_machine.put_in_place()
said = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("shoal").addHandler(handler)
record_all()

def network(*widths, head):
    pairs = zip(widths, widths[1:])
    layers = [layer for a, b in pairs for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())]
    return nn.Sequential(*layers, *head)

def turn():
    "As in PyTorch's example of a GAN: the generator's result waits while the discriminator takes its step."
    discriminator.zero_grad()
    discriminator(images).sum().backward()
    made = generator(noise)
    discriminator(made.detach()).sum().backward()
    of_discriminator.step()
    generator.zero_grad()
    discriminator(made).sum().backward()
    of_generator.step()

beside = torch.empty(int(sys.argv[2]) << 20, dtype=torch.uint8, device="cuda")
generator = network(8, 32, 32, 32, 3, head=[]).cuda()
discriminator = network(3, 32, 32, 32, 32, head=[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1)]).cuda()
images, noise = torch.zeros(32, 3, 64, 64, device="cuda"), torch.zeros(32, 8, 64, 64, device="cuda")
of_generator, of_discriminator = (torch.optim.Adam(m.parameters()) for m in (generator, discriminator))
shared = shoal.Budget(int(sys.argv[1])) if int(sys.argv[1]) else None
if shared is not None:
    shoal.compile(generator, budget=shared, optimizer=of_generator, allow="recompute, pieces", name="G")
    shoal.compile(discriminator, budget=shared, optimizer=of_discriminator, allow="recompute, pieces", name="D")
peaks = []
for _ in range(7):
    with recorded() as record:
        turn()
    peaks.append(record.peak_bytes - beside.nbytes)
status = shared and shared.status
print(json.dumps({
    "peaks": peaks,
    "predicted": shared and shared.predicted_peak_bytes,
    "repairs": status.repairs if status else 0,
    "recomputed": any(plan.recomputed for plan in status.plans) if status else False,
    "said": said,
}), flush=True)
os._exit(0)
"""


def ran(budget_bytes: int, beside_mib: int = 0) -> dict[str, object]:
    command = [sys.executable, "-c", TURNS, str(budget_bytes), str(beside_mib)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("beside_mib", [0, 300])
def test_turns_take_what_was_predicted(beside_mib: int) -> None:
    plain_bytes = max(ran(0)["peaks"])  # type: ignore[call-overload]
    budget_bytes = int(0.75 * plain_bytes)
    found = ran(budget_bytes, beside_mib)
    peaks, predicted = found["peaks"], found["predicted"]
    assert isinstance(peaks, list) and isinstance(predicted, int)
    assert found["repairs"] == 0 and found["recomputed"]
    assert predicted <= budget_bytes
    assert max(peaks[3:]) <= budget_bytes
    assert max(peaks[3:]) == pytest.approx(predicted, rel=0.05)
    assert not [line for line in found["said"] if "between two iterations" in line]  # type: ignore[attr-defined]
