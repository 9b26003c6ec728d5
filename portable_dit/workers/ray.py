"""One Ray actor per device, on this host or on several: a placement group for each replica.

Ray finds the devices, starts the actors and notices when one is gone; what a rank does is the same as under
`mp`, and so is what the caller gets: the leader's events, one result, or one error that names the rank. An
actor that stands still for `rank_timeout_seconds` is found by asking all of them how far they are.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray as untyped_ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from portable_dit.errors import PortableDitError, RankError, RecipeError
from portable_dit.parallel.collectives import Pulse
from portable_dit.parallel.mesh import find_store, open_store
from portable_dit.request import ResolvedRequest
from portable_dit.result import Event, Outcome
from portable_dit.setup import Setup
from portable_dit.workers import RankReport, after_a_failure
from portable_dit.workers.messages import Alive, Component, Done, Failed, Hearing, Read, Told, done, told
from portable_dit.workers.rank import Rank, Task, innermost_line

ray: Any = untyped_ray  # half of its functions have no types
PLACE_SECONDS = 120.0  # for Ray to find the devices of a replica
POLL_SECONDS = 0.2
ASK_SECONDS = 5.0  # between two looks at how far the actors are
LOAD_SECONDS = 180.0  # of patience at least while they load, as for `mp`
THREADS = 3  # of an actor: one tells of the drawing, one says how far it is, one is told to stop


class RankActor:
    """One rank in a process of Ray's. Its methods may be called while it draws."""

    def __init__(self, path: list[str]) -> None:
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        self._pulse = Pulse()
        self._thread = 0
        self._drawing = ThreadPoolExecutor(1, thread_name_prefix="drawing")  # see `workers.thread`
        self._stopped: frozenset[int] = frozenset()  # places of requests
        self._rank: Rank | None = None
        self._store: Any = None

    def address(self) -> str:
        """The host that this actor is on."""
        return str(ray.util.get_node_ip_address())

    def open_store(self, host: str) -> int:
        """The port at which the ranks of the replica meet."""
        self._store, port = open_store(host)
        return port

    def load(self, task: Task, host: str, port: int) -> Iterator[Any]:
        """Joins and loads; gives what the leader reads, and the report at the end."""
        if host == "127.0.0.1":  # all on one host: nothing listens to the outside
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = find_store(host, port)

        def work(tell: Callable[[Any], None]) -> RankReport:
            self._rank = Rank(task, store=store, pulse=self._pulse)
            return self._rank.load(lambda name: tell(Component(name)), lambda *read: tell(Read(*read)))

        yield from self._told(work)

    def draw(self, requests: Sequence[ResolvedRequest], previews: Sequence[bool]) -> Iterator[Any]:
        """The leader's events, and what became of the requests at the end, or why nothing did."""
        rank = self._rank
        assert rank is not None
        self._stopped = frozenset()

        def work(tell: Callable[[Any], None]) -> Done:
            outcomes = rank.draw(
                requests,
                lambda place, event: tell(told(place, event)),
                lambda place: place in self._stopped,
                previews,
            )
            return done(outcomes)

        yield from self._told(work)

    def stop(self, place: int) -> None:
        """Has the request at that place stop at the next step."""
        self._stopped |= {place}

    def alive(self) -> Alive:
        """How far it is."""
        frame = sys._current_frames().get(self._thread)
        return Alive(self._pulse.count, self._pulse.doing, innermost_line(frame) if frame else "")

    def _told(self, work: Callable[[Callable[[Any], None]], Any]) -> Iterator[Any]:
        """What the work tells while the drawing thread does it, then what it gives, or an error of ours."""
        values: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run() -> Any:
            self._thread = threading.get_ident()
            try:
                return work(values.put)
            except PortableDitError as error:
                return Failed(f"{type(error).__name__}: {error}", "", error, waits=False)

        working = self._drawing.submit(run)
        working.add_done_callback(lambda working: values.put(None))
        while (value := values.get()) is not None:
            yield value
        yield working.result()


class ActorGroup:
    """The actors of one replica; see `workers.replicas.Replica`."""

    def __init__(self, setup: Setup, replica: int) -> None:
        if not ray.is_initialized():
            # In the caller's thread: what Ray starts here ends with the thread that started it.
            ray.init(include_dashboard=False)
        self._setup = setup
        self._first = replica * setup.plan.layout.replica
        self._actors: list[Any] = []
        self._place: Any = None
        self.reports: tuple[RankReport, ...] = ()

    def start(self, on_component: Callable[[str], None], on_bytes: Callable[[str, int, int], None]) -> None:
        """Finds devices for all ranks, starts them, and returns when all have loaded."""
        layout, recipe = self._setup.plan.layout, self._setup.recipe
        each = dict(self._setup.backend.cluster_resources())
        self._place = placement_group([each] * layout.replica, strategy="PACK")
        if not self._place.wait(PLACE_SECONDS):
            self.end()
            wanted = ", ".join(f"{count:g} {name}" for name, count in each.items())
            raise RecipeError(
                f"executor=ray: the cluster has no room for {layout.replica} ranks of {wanted} each; it has "
                f"{_free()} free. Add hosts, end other work, or choose a smaller layout."
            )
        for rank in range(layout.replica):
            where = PlacementGroupSchedulingStrategy(self._place, placement_group_bundle_index=rank)
            actor = ray.remote(RankActor).options(
                num_cpus=each.get("CPU", 0),
                num_gpus=each.get("GPU", 0),
                resources={name: n for name, n in each.items() if name not in ("CPU", "GPU")} or None,
                max_concurrency=THREADS,
                scheduling_strategy=where,
            )
            self._actors.append(actor.remote(sys.path))
        hosts = self._ask([actor.address.remote() for actor in self._actors], "starting")
        host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
        port = self._ask([self._actors[0].open_store.remote(host)], "starting")[0]

        def heard(value: Any) -> None:
            if isinstance(value, Component):
                on_component(value.name)
            elif isinstance(value, Read):
                on_bytes(value.name, value.done, value.total)

        # Ray shows an actor its own device alone, which is then the first.
        tasks = [Task(recipe, self._setup.strict, rank, 0) for rank in range(layout.replica)]
        streams = [
            actor.load.options(num_returns="streaming").remote(task, host, port)
            for actor, task in zip(self._actors, tasks, strict=True)
        ]
        reports = self._follow(streams, heard, lambda: None, "loading")
        self.reports = tuple(replace(report, rank=self._first + report.rank) for report in reports)

    def draw(
        self,
        requests: Sequence[ResolvedRequest],
        emit: Callable[[int, Event], None],
        cancelled: Callable[[int], bool],
        previews: Sequence[bool],
    ) -> tuple[Outcome, ...]:
        """See `workers.Workers`."""
        if not self._actors:
            self.start(lambda name: None, lambda name, done, total: None)
        hearing, running = Hearing(len(requests), emit), set(range(len(requests)))

        def heard(value: Any) -> None:
            if isinstance(value, Told):
                hearing.hear(value)

        def stop_cancelled() -> None:
            for place in [place for place in running if cancelled(place)]:
                running.remove(place)
                self._actors[0].stop.remote(place)

        streams = [
            actor.draw.options(num_returns="streaming").remote(tuple(requests), tuple(previews))
            for actor in self._actors
        ]
        return hearing.outcomes(self._follow(streams, heard, stop_cancelled, "drawing")[0])

    def close(self) -> None:
        self.end()

    def end(self) -> None:
        """Ends the actors and gives their devices back to Ray."""
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)
        if self._place is not None:
            remove_placement_group(self._place)
            self._place = None

    def _follow(
        self,
        streams: list[Any],
        heard: Callable[[Any], None],
        watch: Callable[[], None],
        during: str,
    ) -> list[Any]:
        """The last value of every rank's stream. Any way out but all of them at one end ends the actors.

        watch: called now and then.
        """
        last: dict[int, Any] = {}
        open_streams = dict(enumerate(streams))
        again = after_a_failure(self._setup.plan.layout)
        patience = _Patience(self._setup.recipe.rank_timeout_seconds, during, again)
        healthy = False
        try:
            while open_streams:
                ready, _ = ray.wait(list(open_streams.values()), num_returns=1, timeout=POLL_SECONDS)
                for rank in [rank for rank, stream in open_streams.items() if stream in ready]:
                    try:
                        value = ray.get(next(open_streams[rank]))
                    except StopIteration:
                        del open_streams[rank]
                        continue
                    except (RayActorError, RayTaskError) as error:
                        raise self._failure(rank, error, during, streams) from error
                    last[rank] = value
                    heard(value)
                watch()
                if problem := patience.problem(self._actors, open_streams, self._name):
                    raise RankError(problem)
            failed = {rank: value for rank, value in last.items() if isinstance(value, Failed)}
            healthy = len(failed) in (0, len(streams))
            for rank, value in failed.items():
                assert value.error is not None
                raise value.error if healthy else RankError(f"{self._name(rank)}: {value.line}")
            return [last[rank] for rank in sorted(last)]
        finally:
            if not healthy:
                self.end()

    def _failure(self, rank: int, error: Exception, during: str, streams: list[Any]) -> RankError:
        """The error of the rank that brought the others down: one that is gone, before one that raised."""
        if isinstance(error, RayTaskError):
            time.sleep(POLL_SECONDS)  # a partner that is gone is known a moment later
            gone = {other: _why_gone(actor) for other, actor in enumerate(self._actors)}
            rank, error = next(((r, why) for r, why in gone.items() if why is not None), (rank, error))
        what = "is gone" if isinstance(error, RayActorError) else "failed"
        return RankError(
            f"{self._name(rank)} {what} while {during}. Its last words:\n    {_last_line(error)}\n"
            + after_a_failure(self._setup.plan.layout)
        )

    def _ask(self, references: list[Any], during: str) -> list[Any]:
        """The answers of actors that have just been made."""
        healthy = False
        try:
            answers: list[Any] = ray.get(references, timeout=LOAD_SECONDS)
            healthy = True
            return answers
        except (RayActorError, GetTimeoutError) as error:
            raise RankError(f"executor=ray: an actor did not start: {_last_line(error)}") from error
        finally:
            if not healthy:
                self.end()

    def _name(self, rank: int) -> str:
        return f"rank {self._first + rank} of {self._setup.plan.layout.world}"


class _Patience:
    """Asks the actors now and then how far they are, and knows when none of them moves."""

    def __init__(self, limit: float, during: str, again: str) -> None:
        self._limit = max(limit, LOAD_SECONDS) if during == "loading" else limit
        self._during = during
        self._again = again
        self._asked = time.monotonic()
        self._moved = self._asked
        self._alive: dict[int, Alive] = {}

    def problem(self, actors: list[Any], busy: dict[int, Any], name: Callable[[int], str]) -> str | None:
        """Why to give up, None while somebody moves."""
        now = time.monotonic()
        if now - self._asked < min(ASK_SECONDS, self._limit / 2):
            return None
        self._asked = now
        references = {actors[rank].alive.remote(): rank for rank in busy}
        ready, silent = ray.wait(list(references), num_returns=len(references), timeout=POLL_SECONDS)
        for reference in ready:
            rank = references[reference]
            alive = ray.get(reference)
            if rank not in self._alive or alive.count != self._alive[rank].count:
                self._moved = now
            self._alive[rank] = alive
        if now - self._moved <= self._limit:
            return None
        rank = references[silent[0]] if silent else min(busy, key=lambda rank: self._alive[rank].count)
        what = "does not answer" if silent else "makes no progress"
        where = self._alive.get(rank, Alive(0, "starting", ""))
        return (
            f"{name(rank)} {what} for {self._limit:g} s while {self._during}: {where.doing}, at "
            f"{where.line}. {self._again} Raise rank_timeout_seconds if they need longer."
        )


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _why_gone(actor: Any) -> RayActorError | None:
    """What Ray says of an actor that is not there any more, None while it is."""
    try:
        ray.get(actor.alive.remote(), timeout=ASK_SECONDS)
    except RayActorError as error:
        return error
    except GetTimeoutError:
        return None
    return None


def _free() -> dict[str, float]:
    free: dict[str, float] = ray.available_resources()
    return {name: count for name, count in free.items() if not name.startswith("node:")}
