"""The devices that training runs on: the CPU and CUDA."""

from __future__ import annotations

import torch

from evenclip.arguments import shown

__all__ = ["device_of"]


def device_of(given: str | torch.device, *, here: bool = True) -> torch.device:
    """Return the device; `here` is whether it has to be on this machine.

    Raises:
        ValueError: it is not the CPU or CUDA, or torch finds no such device.
    """
    try:
        place = torch.device(given)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise ValueError(f"device is {shown(given)}; give cpu, cuda or cuda:NUMBER.") from None
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"Device {str(given)!r} is not supported; use 'cpu' or 'cuda'.")
    if not here:
        return place
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is {str(place)!r} and torch {torch.__version__} finds no CUDA device; pass "
            "device='cpu', or install a CUDA build of torch and its driver."
        )
    count = torch.cuda.device_count() if place.type == "cuda" else 1
    if place.index is not None and place.index >= count:
        raise ValueError(
            f"device is {str(place)!r}, and there {'is' if count == 1 else 'are'} {count} of that "
            "kind, numbered from 0; give a smaller number."
        )
    return place
