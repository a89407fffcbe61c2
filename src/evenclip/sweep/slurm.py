"""Runs carried out by a Slurm cluster: a bundle of runs is a job of an array, submitted by
submitit.

A Slurm site has a shared disk. On it lie the store, into which jobs put their results themselves,
and what they say:

    STORE/slurm/SWEEP/N.jsonl      what the job of bundle N said (see `sweep.bundle`)
                      *.out, *.err, *.pkl, *.sh      submitit's own

The folder of a sweep is removed when everything in it went well. A job that is gone without having
said how its runs ended was killed (its node died, its time was up): they are tried again, each by
itself, up to three times.
"""

from __future__ import annotations

import json
import logging
import platform
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
from evenclip.sweep.bundle import bundles, described, into, opened, ready
from evenclip.sweep.executor import TRIES, Failure, InHand, Show, Tries
from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store, default_root

__all__ = ["Slurm"]

S = TypeVar("S")
T = TypeVar("T")

# Seconds between two looks at what jobs have written; between two questions to Slurm; until a run
# that another command is at is asked for again.
_LOOK, _ASK, _LATER = 0.5, 10.0, 30.0


@dataclass(frozen=True)
class Slurm:
    """A Slurm cluster; needs `pip install 'evenclip[slurm]'`, and this package and the store on its
    shared disk.

    Attributes:
        partition, account: to submit to; the site's defaults unless given.
        minutes: until a job is ended.
        cpus: processors of a job, and its threads.
        gpus: GPUs of a job.
        jobs: at a time, at the most; runs of the same data and model are cut into so many bundles.
        cluster: submitit's name for it; "local" is processes of this machine, to try things out.
    """

    partition: str | None = None
    account: str | None = None
    minutes: int = 60
    cpus: int = 1
    gpus: int = 0
    jobs: int = 16
    cluster: str = "slurm"

    def __post_init__(self) -> None:
        check.natural(minutes=self.minutes, cpus=self.cpus, jobs=self.jobs)
        if self.gpus < 0 or self.gpus != int(self.gpus):
            raise ValueError(f"gpus is {self.gpus}; Slurm gives a job a whole number of them.")

    def check_device(self, device: str) -> None:
        """Raise if runs would not get the GPU that they are to run on."""
        if device.startswith("cuda") and not self.gpus:
            raise ValueError(
                f"device is {device!r} and Slurm gives a job no GPU unless it is asked to; add "
                "--gpus-per-run 1."
            )

    def carry_out(self, specs: Sequence[Spec], store: Store, show: Show) -> list[Failure]:
        """All of them; those that failed."""
        work = bundles(specs, self.jobs)
        with _Site(self, store.root) as site:
            found = _sweep(site, work, Tries(store, show, TRIES), store)
            site.in_order = not found
        return found

    def map_processes(self, work: Callable[[S], T], items: Sequence[S]) -> Iterator[tuple[int, T]]:
        """(place, work(item)) of every item, as they end.

        Raises:
            RuntimeError: if one failed three times.
        """
        if not items:
            return
        with _Site(self, default_root()) as site:
            jobs = site.submit(_once, [(work, item, self.cpus) for item in items])
            out = {job: place for place, job in enumerate(jobs)}
            failed = [0] * len(items)
            while out:
                for job in site.ended(list(out)):
                    place = out.pop(job)
                    if job.well:
                        yield place, job.result
                        continue
                    failed[place] += 1
                    if failed[place] == TRIES:
                        raise RuntimeError(job.why)
                    (again,) = site.submit(_once, [(work, items[place], self.cpus)])
                    out[again] = place
            site.in_order = True


def _sweep(
    site: _Site, work: Sequence[Sequence[Spec]], tries: Tries, store: Store
) -> list[Failure]:
    """Submit, listen, and submit again what was lost."""
    out, busy = dict[_Job, _Hearing](), dict[str, tuple[Spec, float]]()
    root = str(store.root.resolve())

    def submit(some: Sequence[Sequence[Spec]]) -> None:
        hearings = [
            _Hearing(InHand(dict(enumerate(bundle))), site.path(".jsonl")) for bundle in some
        ]
        tasks = [
            (described(bundle) | {"root": root}, str(hearing.path), site.asked.cpus)
            for bundle, hearing in zip(some, hearings, strict=True)
        ]
        out.update(zip(site.submit(_carry_out, tasks), hearings, strict=True))

    submit(work)
    while out or busy:
        ended, again = site.ended(list(out)), list[Spec]()
        for job, hearing in list(out.items()):
            for event in hearing.news():
                tried = tries.heard(hearing.hand, event)
                if event["event"] == "busy":
                    busy.update({spec.hash: (spec, time.monotonic() + _LATER) for spec in tried})
                else:
                    again += tried
            if job in ended:
                again += tries.over(out.pop(job).hand, job.why, job.trace)
        for name, (spec, when) in list(busy.items()):
            if store.has(spec) or time.monotonic() > when:
                del busy[name]
                again += tries.there([spec])
        if again:
            submit([[spec] for spec in again])
    return tries.failures


@dataclass
class _Hearing:
    """What a job says, as far as it was read."""

    hand: InHand
    path: Path
    read: int = 0

    def news(self) -> list[dict[str, Any]]:
        """What it has said since; whole lines only."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.read)
                lines, _, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:  # it has not begun
            return []
        self.read += len(lines) + 1 if lines else 0
        return [event for line in lines.splitlines() if (event := _event(line)) is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    """What a line says; nothing, if its job was killed in the middle of it."""
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return found


@dataclass(eq=False)
class _Job:
    """A job, and since when Slurm does not know it any more."""

    job: Any
    born: float = field(default_factory=time.monotonic)
    missed: int = 0

    @property
    def well(self) -> bool:
        """Whether it returned something."""
        return bool(self.job.paths.result_pickle.exists()) and self.job.exception() is None

    @property
    def result(self) -> Any:
        """What it returned."""
        return self.job.result()

    @property
    def why(self) -> str:
        """What became of it."""
        said = [
            line for line in self.trace.splitlines() if line.strip() and not line.startswith("---")
        ]
        last = f" ({said[-1].strip()})" if said else ""
        return f"its job {self.job.job_id} ended without a result{last}"

    @property
    def trace(self) -> str:
        """What it wrote to its error stream, the end of it."""
        return str(self.job.stderr() or "")[-4000:]


class _Site:
    """submitit's executor, set as asked, and a folder of its own; what is under way is cancelled
    when it is left.
    """

    def __init__(self, asked: Slurm, root: Path) -> None:
        self.asked, self.in_order = asked, False
        self._folder = root.resolve() / "slurm" / uuid.uuid4().hex[:12]
        self._folder.mkdir(parents=True)
        self._executor = _executor(asked, self._folder)
        self._out: set[_Job] = set()
        self._listed: set[str] | None = None
        self._last, self._files = 0.0, 0

    def __enter__(self) -> _Site:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._out:
            job.job.cancel(check=False)
        if self.in_order:
            shutil.rmtree(self._folder, ignore_errors=True)

    def path(self, suffix: str) -> Path:
        """For a file of the sweep."""
        self._files += 1
        return self._folder / f"{self._files}{suffix}"

    def submit(self, work: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[_Job]:
        """A job for each, as one array.

        Raises:
            ValueError: if Slurm does not take them.
        """
        from submitit.core.utils import FailedJobError

        try:
            made = [_Job(job) for job in self._executor.map_array(work, *zip(*tasks, strict=True))]
        except FailedJobError as error:
            said = " ".join(str(error).split())[-300:]
            raise ValueError(f"Slurm does not take the jobs: {said}") from None
        self._out.update(made)
        return made

    def ended(self, jobs: Sequence[_Job]) -> list[_Job]:
        """After a moment, those that are over."""
        time.sleep(_LOOK)
        asked = self._ask()
        found = [job for job in jobs if self._over(job, asked)]
        self._out.difference_update(found)
        return found

    def _over(self, job: _Job, asked: bool) -> bool:
        if self.asked.cluster != "slurm":
            return bool(job.job.done())
        if job.job.paths.result_pickle.exists():
            return True
        if asked and self._listed is not None and time.monotonic() - job.born > _ASK:
            job.missed = 0 if job.job.job_id in self._listed else job.missed + 1
        return job.missed > 1  # once may be a shared disk that shows the result late

    def _ask(self) -> bool:
        """Ask Slurm which jobs it knows, now and then. squeue, not sacct, which not every site has."""
        if self.asked.cluster != "slurm" or time.monotonic() - self._last < _ASK:
            return False
        self._last = time.monotonic()
        asked = subprocess.run(
            ["squeue", "--noheader", "--array", "--format=%i", "--user", getuser()],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        self._listed = set(asked.stdout.split()) if asked.returncode == 0 else None
        return True


def _executor(asked: Slurm, folder: Path) -> Any:
    """Submitit's.

    Raises:
        ImportError, ValueError: a sentence.
    """
    try:
        import submitit
    except ImportError:
        raise ImportError(
            "submitit is not installed; run `pip install 'evenclip[slurm]'`, or leave --on slurm "
            "out."
        ) from None
    logging.getLogger("submitit").setLevel(logging.ERROR)
    if asked.cluster == "slurm" and shutil.which("sbatch") is None:
        raise ValueError(
            "There is no Slurm here (no sbatch); run the command on a login node of the cluster."
        )
    made = submitit.AutoExecutor(folder=folder, cluster=asked.cluster)
    made.update_parameters(
        name="evenclip",
        timeout_min=asked.minutes,
        cpus_per_task=asked.cpus,
        gpus_per_node=asked.gpus or None,
        slurm_partition=asked.partition,
        slurm_account=asked.account,
        slurm_array_parallelism=asked.jobs,
    )
    return made


# --- in a job -----------------------------------------------------------------------------------


def _carry_out(task: Mapping[str, Any], path: str, threads: int) -> None:
    """A bundle, its results into the store, and what is said about it into the file."""
    ready(threads)
    other = (
        "evenclip, torch, numpy, pandas or scikit-learn is of another version on "
        f"{platform.node()} than where the "
        "command was started; install the same"
    )
    with Path(path).open("a", buffering=1) as out:
        out.write(
            "\n"
        )  # it may be the second time, and the first have ended in the middle of a line

        def say(**event: Any) -> None:
            out.write(json.dumps(event) + "\n")

        into(Store(task["root"]), opened(task, say, other), say)


def _once(work: Callable[[S], T], item: S, threads: int) -> T:
    ready(threads)
    return work(item)
