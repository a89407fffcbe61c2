"""What a process computes with: its processor, its threads, and the switches of torch.

Each of them can change the last bits of a sum.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from operator import attrgetter
from pathlib import Path
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
    "get_default_device", "get_default_dtype",
)  # fmt: skip
# Environment variables that libraries of products and convolutions read.
_VARIABLES = (
    "ATEN_CPU_", "BLIS_", "CUBLAS_", "CUDNN_", "DNNL_", "KMP_", "MKL_", "NVIDIA_TF32_",
    "OMP_DYNAMIC", "OMP_THREAD_LIMIT", "ONEDNN_", "OPENBLAS_", "TORCH_BLAS_",
)  # fmt: skip
# What /proc/cpuinfo says about a processor, and its features that libraries choose their code by.
_PROCESSOR = (
    "vendor_id", "cpu family", "model", "model name", "stepping",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision",
)  # fmt: skip
_FEATURES = ("amx", "asimd", "avx", "bf16", "fma", "fp16", "i8mm", "sse", "sve")


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
        return f"cuda {torch.cuda.get_device_name(device)} {_libraries()}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{device.type} {platform.machine()} {capability} {_processor()} {_libraries()}"


@cache
def _processor() -> str:
    """Return the model of the processor; libraries choose their code by more than AVX."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    facts = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    features = (facts.get("flags") or facts.get("Features") or "").split()
    known = [f"{name} {facts[name]}" for name in _PROCESSOR if name in facts]
    return ", ".join(known + sorted(x for x in features if x.startswith(_FEATURES)))


@cache
def _libraries() -> str:
    """Return how torch was built, and with which libraries of products."""
    return torch.__config__.show()


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
