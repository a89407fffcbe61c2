"""Start a temporary Ray cluster that only this user can reach.

It listens on the loopback address alone and requires a token, which is in no file. Its session
folder, which Ray makes accessible to every user, lies in a private folder that is removed in every
ending. Its workers do not import from the current folder or from that of the user's script.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evenclip.files import private_folder
from evenclip.sweep.process import as_environment, environment

__all__ = ["job", "private_cluster"]

_LOOPBACK = ("127.0.0.1", "::1")
_LONGEST = 30  # characters of the parent folder: the paths of Ray's sockets must be short


@contextmanager
def private_cluster(ray: Any, **options: Any) -> Iterator[None]:
    """Start a cluster on this machine and connect to it; stop it when the context ends.

    Raises:
        ConnectionError: this version of Ray does not listen on the loopback address alone.
    """
    with private_folder(_parent()) as folder:
        try:
            with _only_here(ray):
                _start(ray, folder / "r", options)
            addresses = [node["NodeManagerAddress"] for node in ray.nodes()]
            if not set(addresses) <= set(_LOOPBACK):
                raise ConnectionError(
                    f"Ray {ray.__version__} listens on {addresses[0]}, where other machines can "
                    "reach it; install Ray 2.60, or start a cluster and give --ray-address."
                )
            yield
        finally:
            ray.shutdown()


def _start(ray: Any, folder: Path, options: Mapping[str, Any]) -> None:
    """Start the processes of the cluster, with their session below `folder`."""
    try:
        ray.init(address="local", _temp_dir=str(folder), **options)
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:400].rstrip(".")
        raise ConnectionError(
            f"Ray cannot be started on this machine ({reason}); start a cluster with `ray start` "
            "and give --ray-address, or leave --on ray out."
        ) from error


class _NoFolders(list[str]):
    """The folders that Ray adds to the path of workers: none."""

    def extend(self, folders: Iterable[str]) -> None:
        """Leave out the current folder and that of the user's script."""


def job(ray: Any) -> Any:
    """Return Ray's settings of a job whose workers import nothing from the user's folders."""
    config = ray.job_config.JobConfig()
    config._py_driver_sys_path = _NoFolders()
    return config


def _parent() -> Path:
    """Return the folder for temporary files, or /tmp if its path is too long for sockets."""
    given = Path(tempfile.gettempdir())
    return given if len(str(given)) <= _LONGEST else Path("/tmp")


@contextmanager
def _only_here(ray: Any) -> Iterator[None]:
    """Let Ray start its processes on the loopback address, with a token, without our folders."""
    from ray._private import ray_constants as constants

    everywhere = constants.ENABLE_RAY_CLUSTER
    # Kept: this process has one token, which Ray reads again.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    own = {"RAY_AUTH_MODE": "token", constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
    try:
        # Ray has this for systems whose firewall asks about every other address.
        constants.ENABLE_RAY_CLUSTER = False
        with as_environment(environment() | own):
            _read_environment(ray)
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = everywhere


def _read_environment(ray: Any) -> None:
    """Let Ray read the settings of the token again; it did when it was imported."""
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
