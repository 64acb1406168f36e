"""One transfer between device and host: what a waiter may ask of it, on any link."""

from __future__ import annotations

from typing import Protocol


class Copy(Protocol):
    """A transfer that was started. It keeps its device bytes alive until it is over and waited for, or abandoned."""

    nbytes: int

    def wait(self) -> None:
        """Let whoever computes on the device wait until the bytes are there; the copy holds none of them afterwards.

        Raises:
            TransferError: the transfer failed, or was abandoned.
        """

    def abandon(self) -> None:
        """Nobody wants it any more: stop it if that is possible, let go of its bytes as soon as that is safe."""

    def settle(self) -> None:
        """Return when no byte moves any more, whatever became of the transfer."""

    @property
    def is_over(self) -> bool:
        """Whether no byte moves any more."""

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once it is over."""

    def stalled_seconds(self) -> float:
        """How long `wait` held up the computation."""
