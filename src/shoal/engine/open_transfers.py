"""The link between device and host that a model's plans share, and what moves the storages of each plan over it."""

from __future__ import annotations

import weakref

import torch

from shoal.core.plan import Plan
from shoal.core.shares import NO_OTHERS, OtherTransfers
from shoal.offload.links.open_link import OpenLink, open_link
from shoal.offload.policy import Offloading
from shoal.offload.transfers import RunningTransfers, Transfers


class OpenTransfers:
    """Opens the link when the first plan needs it.

    Args:
        offloading: where saved storages may wait; None: only on the device.
    """

    def __init__(self, offloading: Offloading | None) -> None:
        self._offloading = offloading
        self._link: OpenLink | None = None
        self._transfers: weakref.WeakSet[Transfers] = weakref.WeakSet()  # a graph that is compiled again drops its own

    def of(
        self,
        plan: Plan,
        device: torch.device,
        *,
        running: RunningTransfers | None = None,
        others: OtherTransfers = NO_OTHERS,
    ) -> Transfers | None:
        """What moves the storages that the plan offloads; None where it offloads nothing, and does nothing for others.

        Args:
            plan: of the step.
            device: where it runs.
            running: as of `Transfers`.
            others: what it does for the storages of other graphs.

        Raises:
            TransferError: the host has no room for them.
        """
        offloading = self._offloading
        if not (plan.offloaded or others) or offloading is None:
            return None
        pace = offloading.pace
        if self._link is None:
            self._link = open_link(
                device,
                offloading.where,
                offloading.host_bytes,
                pace.to_host_bytes_per_second if pace else None,
                pace.to_device_bytes_per_second if pace else None,
                pace.latency_seconds if pace else 0.0,
            )
        overlaps = pace is None or pace.overlaps
        transfers = Transfers(
            self._link,
            [storage.nbytes for storage in plan.offloaded],
            overlaps=overlaps,
            running=running,
            names=[storage.name for storage in plan.offloaded],
        )
        self._transfers.add(transfers)
        return transfers

    def close(self) -> None:
        """Give the host's bytes and the link's threads back; the next plan opens the link again."""
        for transfers in tuple(self._transfers):
            transfers.close()
        self._transfers.clear()
        if self._link is not None:
            self._link.close()
            self._link = None
