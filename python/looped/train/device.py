"""Which devices can be trained on here."""

from __future__ import annotations

import torch


def usable_device(device: torch.device | str) -> torch.device:
    """The device. Raises ValueError where this installation of PyTorch cannot compute on it."""
    try:
        torch.zeros(1, device=device).item()
        return torch.device(device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={str(device)!r} does not work here ({reason}); use cpu") from None
