"""The compiled step of a run, and what its numbers depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from evenclip.mechanism.noise import Values
from evenclip.training.passes import Chunk
from evenclip.training.setup import MOST_ROUNDING

if TYPE_CHECKING:
    from evenclip.training.graph import Graph
    from evenclip.training.run import Run

__all__ = ["compile_step", "compiler"]

# Settings of the compiler that name places of this machine or what is printed.
_PLACES = ("dir", "path", "log", "debug", "trace", "verbose", "progress", "worker", "cache")


def compile_step(
    run: Run, rows: Callable[[int], Chunk], noise: Mapping[str, Values]
) -> tuple[Graph | None, str]:
    """Return the compiled step of a run, or None and the reason as a clause.

    Args:
        run: a run outside of `listening()`, or at its beginning.
        rows: returns n samples to trace and compare with.
        noise: noise of any step, for its sizes.
    """
    from evenclip.training.graph import Graph, NoGraph  # imports torch's compiler

    mode = run.performance.compile
    try:
        if run.ranks.world > 1:
            raise NoGraph("several ranks compute it")
        if run.needs_records:
            raise NoGraph("the model does not take artificial records to compare it with")
        if run.mechanism.rounding > MOST_ROUNDING:
            raise NoGraph("the sum of a whole batch would round too much")
        with run.tape.recording():
            return Graph(
                run.tape,
                run.mechanism,
                run.state,
                run.settings.B,
                rows,
                noise,
                mode if isinstance(mode, str) else None,
            ), ""
    except NoGraph as why:
        return None, str(why)


def compiler() -> str:
    """Return the compilers of this process, and their settings that can change a number."""
    from torch._dynamo import config as tracing
    from torch._inductor import config, cpp_builder

    try:
        program = cpp_builder.get_compiler_version_info(cpp_builder.get_cpp_compiler())
    except Exception as error:  # anything that torch raises where there is no compiler
        program = type(error).__name__
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = ""
    settings = [
        f"{name} {value!r}"
        for given in (tracing, config)
        for name, value in sorted(given.save_config_portable().items())
        if not any(word in name for word in _PLACES)
    ]
    return "\n".join([program, triton, *settings])
