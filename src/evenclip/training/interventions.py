"""What a program has switched on that acts in every computation of torch.

Global hooks, modes, and operators that are registered anew run code that is in no digest. So a run
with a seed is refused while any of them is active.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import library
from torch.nn.modules import module as modules
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["check_interventions", "check_modes"]

_HOOKS = {
    "_global_forward_pre_hooks": "torch.nn.modules.module.register_module_forward_pre_hook",
    "_global_forward_hooks": "torch.nn.modules.module.register_module_forward_hook",
    "_global_backward_pre_hooks": "torch.nn.modules.module.register_module_full_backward_pre_hook",
    "_global_backward_hooks": "torch.nn.modules.module.register_module_full_backward_hook",
    "_global_optimizer_pre_hooks": "torch.optim.optimizer.register_optimizer_step_pre_hook",
    "_global_optimizer_post_hooks": "torch.optim.optimizer.register_optimizer_step_post_hook",
}
_OPTIMIZERS = sys.modules["torch.optim.optimizer"]  # torch.optim does not show it
_TORCH = Path(torch.__file__).parent.as_posix()


def check_interventions() -> None:
    """Raise if a global hook, a mode or an operator of the program acts in every computation.

    Raises:
        ValueError: one is active; the message says what to remove.
    """
    _raise_first(_hooks())
    check_modes()
    _raise_first(_operators())


def check_modes() -> None:
    """Raise if a mode of torch is active, which gets every call; a default device is none.

    Raises:
        ValueError: one is active; the message says what to remove.
    """
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        _raise_first(_modes())
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        _raise_first(["saved_tensors_hooks are active, which change the values of a backward pass"])


def _raise_first(active: Iterator[str] | list[str]) -> None:
    for what in active:
        raise ValueError(
            f"With a seed, the noise is a function of all that is computed with, and {what}; "
            "remove or leave it before prepare() or fit(), or leave seed out."
        )


def _hooks() -> Iterator[str]:
    for name, registered in _HOOKS.items():
        if getattr(modules, name, None) or getattr(_OPTIMIZERS, name, None):
            yield f"a hook of {registered} acts in every model"


def _modes() -> Iterator[str]:
    functions = (
        torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())
    )
    for mode in (*functions, *_get_current_dispatch_mode_stack()):
        if type(mode) is not DeviceContext:
            yield f"the mode {type(mode).__name__} is active, which gets every call of torch"


def _operators() -> Iterator[str]:
    """Yield the operators of torch that Python code outside of torch has replaced."""
    for key in sorted(library._impls):
        namespace, _, rest = key.partition("/")
        name, _, dispatch = rest.partition("/")
        if namespace == "aten" and dispatch != "Meta" and not _is_own(f"aten::{name}", dispatch):
            yield f"the operator aten::{name} was registered anew for {dispatch} (torch.library)"


def _is_own(name: str, dispatch: str) -> bool:
    """Return whether torch itself has registered an operator."""
    lines: Any = torch._C._dispatch_dump(name).splitlines()
    places = [line for line in lines if line.split("[")[0].split(":")[0] == dispatch]
    return bool(places) and all(f"registered at {_TORCH}/" in line for line in places)
