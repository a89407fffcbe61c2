"""What a process computes with: its processor, its threads, and the switches of torch.

Each of them can change the last bits of a sum.
"""

from __future__ import annotations

import os
import platform
from operator import attrgetter
from typing import Any

import torch

__all__ = ["machine"]

# Below torch.
_SWITCHES = (
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.cudnn_sdp_enabled", "backends.cuda.flash_sdp_enabled",
    "backends.cuda.math_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cudnn.benchmark", "backends.cudnn.deterministic", "backends.cudnn.enabled",
    "backends.fp32_precision", "backends.mkldnn.deterministic", "backends.mkldnn.enabled",
    "backends.mkldnn.fp32_precision", "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision", "backends.mkldnn.rnn.fp32_precision",
    "backends.nnpack.enabled", "backends.opt_einsum.enabled", "backends.opt_einsum.strategy",
    "are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled",
    "get_default_dtype",
)  # fmt: skip
# Environment variables that libraries of products and convolutions read.
_VARIABLES = ("CUBLAS_", "CUDNN_", "DNNL_", "MKL_", "NVIDIA_TF32_", "ONEDNN_", "TORCH_BLAS_")


def machine(device: torch.device) -> dict[str, str]:
    """Return the processor, the number of threads and the switches of this process, by name."""
    variables = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
    switches = {name: _read(name) for name in _SWITCHES} | {"denormal": _keeps_subnormal_numbers()}
    return {
        "device": _device(device),
        "threads": str(torch.get_num_threads()),
        "switches": f"{switches} {variables} {platform.python_version()}",
    }


def _device(device: torch.device) -> str:
    """Return the kind of processor; two kinds may round differently."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _read(name: str) -> Any:
    """Return the value of a switch; None where this version of torch has none."""
    try:
        switch = attrgetter(name)(torch)
    except AttributeError:
        return None
    return str(switch() if callable(switch) else switch)


def _keeps_subnormal_numbers() -> bool:
    """Return whether the smallest numbers are kept; torch does not say what is set."""
    return bool((torch.full((64,), 2.0**-1060, dtype=torch.float64) * 0.5 > 0).all())
