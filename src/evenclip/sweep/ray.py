"""Carry out runs on a Ray cluster: a bundle of runs is a task that streams events and results.

Workers need the same version of evenclip and nothing else: no store, and no shared disk, since
files are sent (see `sweep.transfer`). The driver writes each result to its store on arrival, so
that a dying node loses only its unfinished runs. Ray itself never retries a task, because that
would repeat the finished runs of a bundle. Instead, each failed run is retried on its own, up to
three tries.
"""

from __future__ import annotations

import os
import platform
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from evenclip import check
from evenclip.arguments import check_fields
from evenclip.files import private_folder
from evenclip.sweep.bundle import bundles, compute_all, make_task, prepare_worker, read_task
from evenclip.sweep.executor import TRIES, Assignment, Failure, ProgressDisplay, Tries
from evenclip.sweep.ray_start import job, private_cluster
from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store
from evenclip.sweep.transfer import contents, unpacked

__all__ = ["Ray"]

S = TypeVar("S")
T = TypeVar("T")

Files = Mapping[str, Any]  # SHA-256 -> Ray reference of the content

_TOKEN = (
    "if the cluster requires a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the output of "
    "`ray get-auth-token` on its head"
)


@dataclass(frozen=True)
class Ray:
    """Executor that uses a Ray cluster; needs `pip install 'evenclip[ray]'` here and on its nodes.

    Attributes:
        address: HOST:PORT of the cluster's head; this machine must be a node of the cluster. Unless
            given: RAY_ADDRESS, or a cluster that runs on this machine, or a temporary cluster
            started here.
        cpus: processors per task.
        gpus: GPUs per task; with 0.2, five tasks share one GPU.
    """

    address: str | None = None
    cpus: int = 1
    gpus: float = 0.0

    def __post_init__(self) -> None:
        check_fields(Ray, self)
        check.natural(cpus=self.cpus)
        check.finite(gpus=self.gpus)
        whole = self.gpus <= 1 or float(self.gpus).is_integer()
        if self.gpus < 0 or not whole:
            raise ValueError(
                f"gpus is {self.gpus}; give a fraction of one, such as 0.2, or a whole number."
            )

    def check_device(self, device: str) -> None:
        """Raise if the device is a GPU and tasks get none."""
        if device.startswith("cuda") and not self.gpus:
            raise ValueError(
                f"device is {device!r}, but Ray assigns no GPU to a run by default; add "
                "--gpus-per-run, such as 0.2 for five runs per GPU."
            )

    def carry_out(
        self, specs: Sequence[Spec], store: Store, show: ProgressDisplay
    ) -> list[Failure]:
        """Carry out these runs; return the failures."""
        with self._cluster() as ray:
            slots = self._slots(ray)
            files = {digest: ray.put(content) for digest, content in contents(specs)}
            return self._sweep(ray, bundles(specs, slots), files, Tries(store, show, TRIES), store)

    def map_processes(self, work: Callable[[S], T], items: Sequence[S]) -> Iterator[tuple[int, T]]:
        """Yield (index, work(item)) of every item in order of completion."""
        if not items:
            return
        with self._cluster() as ray:
            self._slots(ray)
            files = {
                d: ray.put(content)
                for d, content in contents([i for i in items if isinstance(i, Spec)])
            }
            task = ray.remote(_once).options(
                num_cpus=self.cpus, num_gpus=self.gpus, max_retries=TRIES - 1, retry_exceptions=True
            )
            running = {task.remote(work, item, files): index for index, item in enumerate(items)}
            try:
                while running:
                    (ended,), _ = ray.wait(list(running))
                    yield running.pop(ended), ray.get(ended)
            finally:
                for unfinished in running:
                    ray.cancel(unfinished, force=True)

    def _sweep(
        self, ray: Any, work: Sequence[Sequence[Spec]], files: Files, tries: Tries, store: Store
    ) -> list[Failure]:
        """Submit the bundles, process their events, and resubmit lost runs."""
        task = ray.remote(_carry_out).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_retries=0, num_returns="streaming"
        )
        pending = dict[Any, Assignment]()

        def submit(bundle: Sequence[Spec]) -> None:
            reference = task.remote(make_task(bundle), files)
            pending[reference] = Assignment(dict(enumerate(bundle)))

        try:
            for bundle in work:
                submit(bundle)
            while pending:
                (ready_task,), _ = ray.wait(list(pending))
                for spec in _next_event(ray, ready_task, pending, tries, store):
                    submit([spec])
        finally:
            for unfinished in pending:
                ray.cancel(unfinished, force=True)
        return tries.failures

    @contextmanager
    def _cluster(self) -> Iterator[Any]:
        """Connect to Ray, and disconnect on exit unless it was connected before."""
        ray = _package()
        if ray.is_initialized():
            yield ray
            return
        options: dict[str, Any] = {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        address = self.address or os.environ.get("RAY_ADDRESS") or None
        try:
            self._connect(ray, address or "auto", options)
        except _NoClusterError:
            with _quiet_start(ray, options):
                yield ray
            return
        try:
            yield ray
        finally:
            ray.shutdown()

    def _connect(self, ray: Any, address: str, options: Mapping[str, Any]) -> None:
        """Connect to a running cluster.

        Raises:
            ConnectionError: the connection failed; the message says what to do.
        """
        _reachable(address)
        try:
            with _quiet():
                ray.init(address=address, job_config=job(ray), **options)
        except ray.exceptions.AuthenticationError:
            raise ConnectionError(f"Ray found no token; {_TOKEN}.") from None
        except ConnectionError:
            if address == "auto":
                raise _NoClusterError from None
            raise ConnectionError(
                f"The Ray cluster at {address} rejected the connection; {_TOKEN}; otherwise unset "
                "RAY_AUTH_MODE."
            ) from None
        except (RuntimeError, ValueError) as error:
            # Another version of Ray or Python, or this machine is not a node of the cluster.
            reason = " ".join(str(error).split())[:400]
            raise ConnectionError(
                f"The Ray cluster at {address} cannot be used from this machine. Ray: {reason}"
            ) from None

    def _slots(self, ray: Any) -> int:
        """Return the number of tasks that the cluster can run at a time.

        Raises:
            ValueError: no node can run a task; Ray would wait forever.
        """
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        slots = sum(
            min(
                int(has.get("CPU", 0) // self.cpus),
                int(has.get("GPU", 0) / self.gpus) if self.gpus else 2**31,
            )
            for has in nodes
        )
        if slots == 0:
            available = ", ".join(
                f"{has.get('CPU', 0):.0f} CPUs and {has.get('GPU', 0):.0f} GPUs" for has in nodes
            )
            raise ValueError(
                f"A run needs {self.cpus} CPUs and {self.gpus:g} GPUs, but no node of the Ray "
                f"cluster has them ({available}); request less or add a node."
            )
        return slots


class _NoClusterError(Exception):
    """No Ray cluster runs on this machine."""


@contextmanager
def _quiet_start(ray: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Start a cluster that only this user can reach, without Ray's messages."""
    with ExitStack() as stack:
        with _quiet():
            stack.enter_context(private_cluster(ray, job_config=job(ray), **options))
        yield


def _package() -> Any:
    """Import Ray with usage statistics and log messages turned off.

    Raises:
        ImportError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Do not print messages about dead nodes between the results.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise ImportError(
            "Ray is not installed; run `pip install 'evenclip[ray]'`, or leave --on ray out."
        ) from None
    return ray


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard stderr, to which Ray's C++ writes every second while it connects.

    Errors are raised as exceptions.
    """
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def _reachable(address: str) -> None:
    """Raise at once if the address is wrong or unreachable; Ray would retry for long."""
    if "://" in address:
        raise ValueError(
            f"{address} is an address of Ray's client, which cannot stream results; run the "
            "command on a node of the cluster and give HOST:PORT of its head, such as "
            "10.0.0.1:6379."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        if address in ("auto", "local"):
            return
        raise ValueError(
            f"The Ray address is {address!r}; give HOST:PORT of its head, such as 10.0.0.1:6379."
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise ConnectionError(
            f"There is no Ray cluster at {address} ({why}); start its head with `ray start "
            "--head`, or give another --ray-address."
        ) from None


def _next_event(
    ray: Any, task: Any, pending: dict[Any, Assignment], tries: Tries, store: Store
) -> list[Spec]:
    """Process the next event of a task; return the runs to retry."""
    assignment = pending[task]
    try:
        event = ray.get(next(task))
    except StopIteration:
        return tries.end_assignment(pending.pop(task), "its task ended without a result")
    except ray.exceptions.RayError as error:
        return tries.end_assignment(pending.pop(task), *_reason(ray, error))
    if event["event"] == "result":
        store.write(assignment.specs[event["i"]], event["result"], _weights(event["weights"]))
        return []
    return tries.process_event(assignment, event)


def _reason(ray: Any, error: Exception) -> tuple[str, str]:
    """Return why a task ended, as a sentence, and Ray's message."""
    if isinstance(error, ray.exceptions.NodeDiedError):
        return "the node of the Ray cluster that it ran on died", str(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "Ray ended its process because its node was out of memory", str(error)
    if isinstance(error, ray.exceptions.WorkerCrashedError):
        return "its process on the Ray cluster died (out of memory?)", str(error)
    cause = getattr(error, "cause", None) or error
    first = (str(cause).strip() or type(cause).__name__).splitlines()[-1]
    return f"its task could not be run on the Ray cluster: {first}", str(error)


def _weights(packed: bytes) -> dict[str, Any]:
    from safetensors.torch import load

    return dict(load(packed))


# --- on a worker --------------------------------------------------------------------------------


def _carry_out(task: Mapping[str, Any], files: Files) -> Iterator[dict[str, Any]]:
    """Carry out a bundle; yield its events, and {"event": "result", ...} with each result.

    A separate thread computes the runs, so that events are sent meanwhile.
    """
    events = queue.SimpleQueue[dict[str, Any] | None]()

    def say(**event: Any) -> None:
        events.put(event)

    def work() -> None:
        try:
            _work(task, files, say)
        finally:
            events.put(None)

    threading.Thread(target=work, daemon=True).start()
    while (event := events.get()) is not None:
        yield event


def _work(task: Mapping[str, Any], files: Files, say: Callable[..., None]) -> None:
    from safetensors.torch import save

    def keep(i: int, spec: Spec, result: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
        del spec
        packed = save({name: tensor.contiguous().cpu() for name, tensor in weights.items()})
        say(event="result", i=i, result=dict(result), weights=packed)

    prepare_worker()
    other = (
        "evenclip, torch, numpy, pandas or scikit-learn has another version on "
        f"{platform.node()}; install the same versions on every node of the Ray cluster"
    )
    with private_folder(Path(tempfile.gettempdir())) as folder:
        todo = read_task(task, say, other, lambda spec: unpacked(spec, _sent(files), folder))
        compute_all(todo, keep, say)


def _once(work: Callable[[S], T], item: S, files: Files) -> T:
    """Return work(item); if the item is a run, unpack its files first."""
    prepare_worker()
    with private_folder(Path(tempfile.gettempdir())) as folder:
        local: Any = unpacked(item, _sent(files), folder) if isinstance(item, Spec) else item
        return work(local)


def _sent(files: Files) -> Callable[[str], bytes | None]:
    """Return a function from SHA-256 to the content of a sent file."""

    def content(digest: str) -> bytes | None:
        received: bytes | None = _package().get(files[digest]) if digest in files else None
        return received

    return content
