"""Runs carried out by a Ray cluster: a bundle of runs is a task, and what it says and finds comes
back through Ray.

Workers need evenclip, in the same version, and nothing else: no shared disk (files are sent, see
`runs.parcel`) and no store. The driver writes each result into its own as it comes, so that a node
that dies takes with it only what it was at. A task is never retried by Ray itself, which would
compute a bundle's finished runs again: runs are, up to three times, each by itself.
"""

from __future__ import annotations

import os
import platform
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from evenclip import check
from evenclip.sweep.bundle import bundles, described, opened, ready, work_on
from evenclip.sweep.executor import TRIES, Failure, InHand, Show, Tries
from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store
from evenclip.sweep.transfer import contents, unpacked

__all__ = ["Ray"]

S = TypeVar("S")
T = TypeVar("T")

Files = Mapping[str, Any]  # SHA-256 -> where Ray keeps the content

_TOKEN = (
    "if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to what `ray "
    "get-auth-token` prints on its head"
)


@dataclass(frozen=True)
class Ray:
    """A Ray cluster; needs `pip install 'evenclip[ray]'` here and on its nodes.

    Attributes:
        address: HOST:PORT of its head, whose node this must be one of; unless given RAY_ADDRESS, or
            a cluster that runs on this machine, or one that is started here for as long as it
            takes.
        cpus: processors of a task, and its threads.
        gpus: GPUs of a task; 0.2 lets five share one.
    """

    address: str | None = None
    cpus: int = 1
    gpus: float = 0.0

    def __post_init__(self) -> None:
        check.natural(cpus=self.cpus)
        if not self.gpus >= 0 or (self.gpus > 1 and self.gpus != int(self.gpus)):
            raise ValueError(
                f"gpus is {self.gpus}; give a fraction of one, such as 0.2, or a whole number."
            )

    def check_device(self, device: str) -> None:
        """Raise if runs would not get the GPU that they are to run on."""
        if device.startswith("cuda") and not self.gpus:
            raise ValueError(
                f"device is {device!r} and Ray gives a run no GPU unless it is asked to; add "
                "--gpus-per-run, such as "
                "0.2 for five runs on each."
            )

    def carry_out(self, specs: Sequence[Spec], store: Store, show: Show) -> list[Failure]:
        """All of them; those that failed."""
        with self._cluster() as ray:
            slots = self._slots(ray)
            files = {digest: ray.put(content) for digest, content in contents(specs)}
            return self._sweep(ray, bundles(specs, slots), files, Tries(store, show, TRIES), store)

    def map_processes(self, work: Callable[[S], T], items: Sequence[S]) -> Iterator[tuple[int, T]]:
        """(place, work(item)) of every item, as they end."""
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
            running = {
                task.remote(work, item, files, self.cpus): place for place, item in enumerate(items)
            }
            try:
                while running:
                    (ended,), _ = ray.wait(list(running))
                    yield running.pop(ended), ray.get(ended)
            finally:
                for left in running:
                    ray.cancel(left, force=True)

    def _sweep(
        self, ray: Any, work: Sequence[Sequence[Spec]], files: Files, tries: Tries, store: Store
    ) -> list[Failure]:
        """Submit, listen, and submit again what was lost."""
        task = ray.remote(_carry_out).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_retries=0, num_returns="streaming"
        )
        out = dict[Any, InHand]()

        def submit(bundle: Sequence[Spec]) -> None:
            out[task.remote(described(bundle), files, self.cpus)] = InHand(dict(enumerate(bundle)))

        try:
            for bundle in work:
                submit(bundle)
            while out:
                (heard,), _ = ray.wait(list(out))
                for spec in _listen(ray, heard, out, tries, store):
                    submit([spec])
        finally:
            for left in out:
                ray.cancel(left, force=True)
        return tries.failures

    @contextmanager
    def _cluster(self) -> Iterator[Any]:
        """Ray itself, connected; as it was afterwards."""
        ray = _package()
        if ray.is_initialized():
            yield ray
            return
        self._connect(ray)
        try:
            yield ray
        finally:
            ray.shutdown()

    def _connect(self, ray: Any) -> None:
        """To a cluster that runs, or to one that is started.

        Raises:
            ConnectionError: a sentence, whatever Ray says.
        """
        address = self.address or os.environ.get("RAY_ADDRESS") or None
        if address is not None:
            _reachable(address)
        try:
            with _quiet():
                ray.init(
                    address=address,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                )
        except ray.exceptions.AuthenticationError:
            raise ConnectionError(f"Ray's token was not found: {_TOKEN}.") from None
        except ConnectionError:
            if address is None:
                raise
            raise ConnectionError(
                f"The Ray cluster at {address} does not let us in: {_TOKEN}; if it does not, "
                "leave RAY_AUTH_MODE out."
            ) from None
        except (
            RuntimeError,
            ValueError,
        ) as error:  # another version of Ray or Python; no node of it on this machine
            said = " ".join(str(error).split())[:400]
            raise ConnectionError(
                f"The Ray cluster at {address} cannot be used from here. Ray says: {said}"
            ) from None

    def _slots(self, ray: Any) -> int:
        """Number of tasks that the cluster takes at a time.

        Raises:
            ValueError: if no node takes any; Ray would wait for one forever.
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
            had = ", ".join(
                f"{has.get('CPU', 0):.0f} CPUs and {has.get('GPU', 0):.0f} GPUs" for has in nodes
            )
            raise ValueError(
                f"A run is to have {self.cpus} CPUs and {self.gpus:g} GPUs, and no node of the "
                "Ray cluster has them "
                f"({had}); ask for less, or add a node."
            )
        return slots


def _package() -> Any:
    """Ray, without its statistics and its chatter.

    Raises:
        ImportError: a sentence.
    """
    os.environ.setdefault(
        "RAY_USAGE_STATS_ENABLED", "0"
    )  # a cluster that is started here tells nobody about it
    os.environ.setdefault(
        "RAY_DEDUP_LOGS_SKIP_REGEX", "^"
    )  # a node that dies is not printed amid the results
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
    """Without what Ray's C++ writes while it connects, a line a second; what matters of it is
    raised.
    """
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _reachable(address: str) -> None:
    """Raise at once, where Ray would try for long."""
    if "://" in address:
        raise ValueError(
            f"{address} is an address of Ray's client, through which results cannot be streamed; "
            "run the command on a "
            "node of the cluster and give HOST:PORT of its head, such as 10.0.0.1:6379."
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
            "--head`, or give another "
            "--ray-address."
        ) from None


def _listen(ray: Any, task: Any, out: dict[Any, InHand], tries: Tries, store: Store) -> list[Spec]:
    """The next thing that a task says; the runs to try again."""
    hand = out[task]
    try:
        event = ray.get(next(task))
    except StopIteration:
        return tries.over(out.pop(task), "its task ended and did not say how")
    except ray.exceptions.RayError as error:
        return tries.over(out.pop(task), *_reason(ray, error))
    if event["event"] == "found":
        store.write(hand.specs[event["i"]], event["result"], _weights(event["weights"]))
        return []
    return tries.heard(hand, event)


def _reason(ray: Any, error: Exception) -> tuple[str, str]:
    """Why a task is gone, as a sentence, and what Ray says about it."""
    if isinstance(error, ray.exceptions.NodeDiedError):
        return "the node of the Ray cluster that it ran on died", str(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "its process was ended by Ray, for its node was out of memory", str(error)
    if isinstance(error, ray.exceptions.WorkerCrashedError):
        return "its process on the Ray cluster died (out of memory?)", str(error)
    cause = getattr(error, "cause", None) or error
    first = (str(cause).strip() or type(cause).__name__).splitlines()[-1]
    return f"its task could not be run on the Ray cluster: {first}", str(error)


def _weights(packed: bytes) -> dict[str, Any]:
    from safetensors.torch import load

    return dict(load(packed))


# --- on a worker --------------------------------------------------------------------------------


def _carry_out(task: Mapping[str, Any], files: Files, threads: int) -> Iterator[dict[str, Any]]:
    """A bundle; what is said about it, and {"event": "found", ...} with each result.

    It is computed in a thread of its own, so that what it says can go out while it goes on.
    """
    said = queue.SimpleQueue[dict[str, Any] | None]()

    def say(**event: Any) -> None:
        said.put(event)

    def work() -> None:
        try:
            _work(task, files, threads, say)
        finally:
            said.put(None)

    threading.Thread(target=work, daemon=True).start()
    while (event := said.get()) is not None:
        yield event


def _work(task: Mapping[str, Any], files: Files, threads: int, say: Callable[..., None]) -> None:
    from safetensors.torch import save

    def keep(i: int, spec: Spec, result: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
        del spec
        packed = save({name: tensor.contiguous().cpu() for name, tensor in weights.items()})
        say(event="found", i=i, result=dict(result), weights=packed)

    ready(threads)
    other = (
        "evenclip, torch, numpy, pandas or scikit-learn is of another version on "
        f"{platform.node()}; install the same "
        "on every node of the Ray cluster"
    )
    with tempfile.TemporaryDirectory(prefix="evenclip-") as folder:
        todo = opened(task, say, other, lambda spec: unpacked(spec, _sent(files), Path(folder)))
        work_on(todo, keep, say)


def _once(work: Callable[[S], T], item: S, files: Files, threads: int) -> T:
    """One thing, which may be a run whose files have to be had first."""
    ready(threads)
    with tempfile.TemporaryDirectory(prefix="evenclip-") as folder:
        placed: Any = unpacked(item, _sent(files), Path(folder)) if isinstance(item, Spec) else item
        return work(placed)


def _sent(files: Files) -> Callable[[str], bytes | None]:
    """The content of a file that was sent, by its SHA-256."""

    def content(digest: str) -> bytes | None:
        found: bytes | None = _package().get(files[digest]) if digest in files else None
        return found

    return content
