"""Carry out runs on a Slurm cluster: a bundle of runs is a job of an array, submitted by submitit.

A Slurm site has a shared disk. It holds the store, to which the jobs write their results, and the
events of the jobs:

    STORE/slurm/SWEEP/N.jsonl      events of the job of bundle N (see `sweep.bundle`)
                      *.out, *.err, *.pkl, *.sh      written by submitit

The folder of a sweep is removed if all its runs succeeded. A job that ends without reporting the
end of its runs was killed (its node died, or its time limit passed). These runs are retried, each
on its own, up to three tries.
"""

from __future__ import annotations

import json
import logging
import platform
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from getpass import getuser
from pathlib import Path
from typing import Any, TypeVar

from evenclip import check
from evenclip.arguments import check_fields
from evenclip.sweep.bundle import bundles, compute_into, make_task, prepare_worker, read_task
from evenclip.sweep.executor import TRIES, Assignment, Failure, ProgressDisplay, Tries
from evenclip.sweep.process import as_environment, environment, python
from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store, default_root

__all__ = ["Slurm"]

S = TypeVar("S")
T = TypeVar("T")

_POLL = 0.5  # seconds between two reads of the jobs' events
_QUEUE_POLL = 10.0  # seconds between two calls of squeue
_RETRY = 30.0  # seconds until a run that another command is computing is tried again


@dataclass(frozen=True)
class Slurm:
    """Executor that uses a Slurm cluster; needs `pip install 'evenclip[slurm]'`.

    The package and the store must be on the cluster's shared disk.

    Attributes:
        partition, account: to submit to; the site's defaults unless given.
        minutes: time limit of a job.
        cpus: processors per job.
        gpus: GPUs per job.
        jobs: maximum number of jobs at a time, and of bundles per pair of data and model.
        cluster: submitit's name of the cluster; "local" runs jobs as processes of this machine.
    """

    partition: str | None = None
    account: str | None = None
    minutes: int = 60
    cpus: int = 1
    gpus: int = 0
    jobs: int = 16
    cluster: str = "slurm"

    def __post_init__(self) -> None:
        check_fields(Slurm, self)
        check.natural(minutes=self.minutes, cpus=self.cpus, jobs=self.jobs)
        check.whole(gpus=self.gpus)

    def check_device(self, device: str) -> None:
        """Raise if the device is a GPU and jobs get none."""
        if device.startswith("cuda") and not self.gpus:
            raise ValueError(
                f"device is {device!r}, but Slurm assigns no GPU to a job by default; add "
                "--gpus-per-run 1."
            )

    def carry_out(
        self, specs: Sequence[Spec], store: Store, show: ProgressDisplay
    ) -> list[Failure]:
        """Carry out these runs; return the failures."""
        work = bundles(specs, self.jobs)
        with _Site(self, store.root) as site:
            failures = _sweep(site, work, Tries(store, show, TRIES), store)
            site.in_order = not failures
        return failures

    def map_processes(self, work: Callable[[S], T], items: Sequence[S]) -> Iterator[tuple[int, T]]:
        """Yield (index, work(item)) of every item in order of completion.

        Raises:
            RuntimeError: an item failed three times.
        """
        if not items:
            return
        with _Site(self, default_root()) as site:
            jobs = site.submit(_once, [(work, item) for item in items])
            pending = {job: index for index, job in enumerate(jobs)}
            failed = [0] * len(items)
            while pending:
                for job in site.ended(list(pending)):
                    index = pending.pop(job)
                    if job.succeeded:
                        yield index, job.result
                        continue
                    failed[index] += 1
                    if failed[index] == TRIES:
                        raise RuntimeError(job.why)
                    (retry,) = site.submit(_once, [(work, items[index])])
                    pending[retry] = index
            site.in_order = True


def _sweep(
    site: _Site, work: Sequence[Sequence[Spec]], tries: Tries, store: Store
) -> list[Failure]:
    """Submit the bundles, process their events, and resubmit lost runs."""
    pending, busy = dict[_Job, _EventFile](), dict[str, tuple[Spec, float]]()
    root = str(store.root.resolve())

    def submit(bundles: Sequence[Sequence[Spec]]) -> None:
        logs = [
            _EventFile(Assignment(dict(enumerate(bundle))), site.path(".jsonl"))
            for bundle in bundles
        ]
        tasks = [
            (make_task(bundle) | {"root": root}, str(log.path))
            for bundle, log in zip(bundles, logs, strict=True)
        ]
        pending.update(zip(site.submit(_carry_out, tasks), logs, strict=True))

    submit(work)
    while pending or busy:
        ended, retry = site.ended(list(pending)), list[Spec]()
        for job, log in list(pending.items()):
            for event in log.new_events():
                unfinished = tries.process_event(log.assignment, event)
                if event["event"] == "busy":
                    later = time.monotonic() + _RETRY
                    busy.update({spec.hash: (spec, later) for spec in unfinished})
                else:
                    retry += unfinished
            if job in ended:
                retry += tries.end_assignment(pending.pop(job).assignment, job.why, job.trace)
        for name, (spec, when) in list(busy.items()):
            if store.has(spec) or time.monotonic() > when:
                del busy[name]
                retry += tries.missing([spec])
        if retry:
            submit([[spec] for spec in retry])
    return tries.failures


@dataclass
class _EventFile:
    """The file of a job's events, and how far it was read."""

    assignment: Assignment
    path: Path
    read: int = 0

    def new_events(self) -> list[dict[str, Any]]:
        """Return the events since the last call, from complete lines only."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.read)
                lines, _, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:  # the job has not begun
            return []
        self.read += len(lines) + 1 if lines else 0
        return [event for line in lines.splitlines() if (event := _event(line)) is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    """Parse a line; return None if it is cut off, because its job was killed."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event


@dataclass(eq=False)
class _Job:
    """A job, and how often in a row squeue did not list it."""

    job: Any
    born: float = field(default_factory=time.monotonic)
    missed: int = 0

    @property
    def succeeded(self) -> bool:
        """Whether the job returned a result."""
        return bool(self.job.paths.result_pickle.exists()) and self.job.exception() is None

    @property
    def result(self) -> Any:
        """Result of the job."""
        return self.job.result()

    @property
    def why(self) -> str:
        """Why the job has no result."""
        lines = [
            line for line in self.trace.splitlines() if line.strip() and not line.startswith("---")
        ]
        last = f" ({lines[-1].strip()})" if lines else ""
        return f"its job {self.job.job_id} ended without a result{last}"

    @property
    def trace(self) -> str:
        """End of the job's error stream."""
        return str(self.job.stderr() or "")[-4000:]


class _Site:
    """Submitit's executor with a new folder; unfinished jobs are cancelled on exit."""

    def __init__(self, config: Slurm, root: Path) -> None:
        self.config, self.in_order = config, False
        self._folder = root.resolve() / "slurm" / uuid.uuid4().hex[:12]
        self._folder.mkdir(mode=0o700, parents=True)
        self._executor = _executor(config, self._folder)
        self._pending: set[_Job] = set()
        self._listed: set[str] | None = None
        self._last, self._files = 0.0, 0

    def __enter__(self) -> _Site:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._pending:
            job.job.cancel(check=False)
        if self.in_order:
            shutil.rmtree(self._folder, ignore_errors=True)

    def path(self, suffix: str) -> Path:
        """Return the path of a new file of the sweep."""
        self._files += 1
        return self._folder / f"{self._files}{suffix}"

    def submit(self, work: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[_Job]:
        """Submit one job per task, as one array.

        Raises:
            ValueError: Slurm rejected the jobs.
        """
        from submitit.core.utils import FailedJobError

        try:
            with as_environment(environment()):
                submitted = self._executor.map_array(work, *zip(*tasks, strict=True))
            jobs = [_Job(job) for job in submitted]
        except FailedJobError as error:
            reason = " ".join(str(error).split())[-300:]
            raise ValueError(f"Slurm rejected the jobs: {reason}") from None
        self._pending.update(jobs)
        return jobs

    def ended(self, jobs: Sequence[_Job]) -> list[_Job]:
        """Wait for `_POLL` seconds, then return the jobs that have ended."""
        time.sleep(_POLL)
        listed = self._list_jobs()
        ended = [job for job in jobs if self._has_ended(job, listed)]
        self._pending.difference_update(ended)
        return ended

    def _has_ended(self, job: _Job, listed: bool) -> bool:
        if self.config.cluster != "slurm":
            return bool(job.job.done())
        if job.job.paths.result_pickle.exists():
            return True
        if listed and self._listed is not None and time.monotonic() - job.born > _QUEUE_POLL:
            job.missed = 0 if job.job.job_id in self._listed else job.missed + 1
        return job.missed > 1  # missed once: the shared disk may show the result late

    def _list_jobs(self) -> bool:
        """List the user's jobs with squeue every `_QUEUE_POLL` seconds; return whether it did.

        Not every site has sacct.
        """
        if self.config.cluster != "slurm" or time.monotonic() - self._last < _QUEUE_POLL:
            return False
        self._last = time.monotonic()
        queue = subprocess.run(
            ["squeue", "--noheader", "--array", "--format=%i", "--user", getuser()],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        self._listed = set(queue.stdout.split()) if queue.returncode == 0 else None
        return True


def _executor(config: Slurm, folder: Path) -> Any:
    """Create submitit's executor.

    Raises:
        ImportError: submitit is not installed.
        ValueError: Slurm is not installed.
    """
    try:
        import submitit
    except ImportError:
        raise ImportError(
            "submitit is not installed; run `pip install 'evenclip[slurm]'`, or leave --on slurm "
            "out."
        ) from None
    logging.getLogger("submitit").setLevel(logging.ERROR)
    if config.cluster == "slurm" and shutil.which("sbatch") is None:
        raise ValueError(
            "Slurm is not installed (no sbatch); run the command on a login node of the cluster."
        )
    # submitit starts Python with -m, which would put the folder of the command before all others.
    path = environment().get("PYTHONPATH")
    own = ["-u", "PYTHONPATH"] if path is None else [f"PYTHONPATH={path}"]
    command = shlex.join(["env", *own, "PYTHONSAFEPATH=1", *python()])
    executor = submitit.AutoExecutor(
        folder=folder, cluster=config.cluster, **{f"{config.cluster}_python": command}
    )
    executor.update_parameters(
        name="evenclip",
        timeout_min=config.minutes,
        cpus_per_task=config.cpus,
        gpus_per_node=config.gpus or None,
        slurm_partition=config.partition,
        slurm_account=config.account,
        slurm_array_parallelism=config.jobs,
    )
    return executor


# --- in a job -----------------------------------------------------------------------------------


def _carry_out(task: Mapping[str, Any], path: str) -> None:
    """Carry out a bundle; write results to the store and events to the file."""
    prepare_worker()
    other = (
        "evenclip, torch, numpy, pandas or scikit-learn has another version on "
        f"{platform.node()} than where the command was started; install the same versions"
    )
    with Path(path).open("a", buffering=1) as out:
        out.write("\n")  # ends a line that an earlier, killed try of the job left incomplete

        def say(**event: Any) -> None:
            out.write(json.dumps(event) + "\n")

        compute_into(Store(task["root"]), read_task(task, say, other), say)


def _once(work: Callable[[S], T], item: S) -> T:
    prepare_worker()
    return work(item)
