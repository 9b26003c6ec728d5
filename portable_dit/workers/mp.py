"""One process per device of this host, started, watched and ended by the caller's process.

The caller holds a socket to each rank. A request goes to all of them; the leader's events and pictures come
back. While they work, every rank says twice a second how far it is, so that

- a rank that dies is told by its closed socket, with how it ended and the last lines it wrote;
- a rank that raises says so itself; ranks that only lost their partner are not blamed;
- ranks that stand still for `rank_timeout_seconds` are given up, and the one that the others wait for is
  named, with the line it is in.

Then all of the replica are ended, and the next request starts them anew. A rank whose caller is gone ends by
itself. One that ends and was not told to is told on stderr at once, also between two requests.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait

from portable_dit.errors import RankError
from portable_dit.request import ResolvedRequest
from portable_dit.result import Event, Outcome
from portable_dit.setup import Setup
from portable_dit.workers import RankReport, after_a_failure
from portable_dit.workers.messages import (
    Alive,
    Answer,
    Component,
    Done,
    Draw,
    Failed,
    Hearing,
    Join,
    Leave,
    Loaded,
    Order,
    Read,
    Stop,
    Told,
)
from portable_dit.workers.rank import Task

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0  # for the other ranks to say their part, once one has failed
LEAVE_SECONDS = 5.0
LOAD_SECONDS = 180.0  # of patience at least while they load: Python, torch and vendors' libraries come up
LAST_LINES = 12
TOLD_ITS_ERROR = 1  # exit code of Python after an error that nobody caught, which the rank has sent before
HERE = "127.0.0.1"
NOT_HEARD = Alive(0, "starting", "")


@dataclass(eq=False)
class Member:
    """A rank as the caller sees it."""

    rank: int
    label: int  # over all replicas
    process: subprocess.Popen[bytes]
    connection: Connection[Order, Answer]
    lines: deque[str]
    pump: threading.Thread
    alive: Alive = NOT_HEARD
    heard: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    done: Loaded | Done | Failed | None = None
    ended: bool = False
    quiet: bool = True  # it has said nothing of its task yet

    def begin(self) -> None:
        """Nothing is known of the new task yet."""
        self.done, self.quiet = None, True
        self.heard = self.moved = time.monotonic()

    def last_words(self, trace: str = "") -> str:
        """What it wrote last, and the end of its traceback."""
        if self.ended:
            self.pump.join(timeout=1.0)
        lines = [*self.lines, *trace.rstrip().splitlines()[-LAST_LINES:]]
        return "\n".join(["Its last words:", *(f"    {line}" for line in lines or ["(none)"])])

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return _end_of(code)


class _GoneBeforeError(RankError):
    """A rank was gone before it had said anything of its request, and nothing of that was told."""


class LocalRanks:
    """The ranks of one replica. They are started by `start`, and again by `draw` after they were lost."""

    def __init__(self, setup: Setup, replica: int) -> None:
        self._setup = setup
        self._replica = replica
        self._members: list[Member] = []
        self._ending = threading.Event()  # of the present ranks
        self._told = True  # something of the present task was told to the caller
        self._store: list[object] = []  # where the ranks meet; it lives as long as they do
        self.reports: tuple[RankReport, ...] = ()

    def start(self, on_component: Callable[[str], None], on_bytes: Callable[[str, int, int], None]) -> None:
        """Starts the ranks and returns when all have loaded. Raises what went wrong, with no rank left."""
        from portable_dit.parallel.mesh import open_store

        store, port = open_store(HERE)
        size = self._setup.plan.layout.replica
        first = self._replica * size
        processes: list[subprocess.Popen[bytes]] = []
        self._ending = threading.Event()
        self._finalizer = weakref.finalize(self, _end, processes, self._ending)
        self._store = [store]
        for rank in range(size):
            world = size * self._setup.plan.layout.data
            self._members.append(_start_rank(rank, first + rank, world, self._ending))
            processes.append(self._members[-1].process)
        recipe, strict = self._setup.recipe, self._setup.strict
        for member in self._members:
            task = Task(recipe, strict, member.rank, first + member.rank)
            _send(member, Join(task, port))

        def heard(member: Member, answer: Answer) -> None:
            if isinstance(answer, Component):
                on_component(answer.name)
            elif isinstance(answer, Read):
                on_bytes(answer.name, answer.done, answer.total)

        self._follow(heard, watch=lambda: None, during="loading")
        self.reports = tuple(
            replace(m.done.report, rank=m.label) for m in self._members if isinstance(m.done, Loaded)
        )

    def draw(
        self,
        requests: Sequence[ResolvedRequest],
        emit: Callable[[int, Event], None],
        cancelled: Callable[[int], bool],
        previews: Sequence[bool],
    ) -> tuple[Outcome, ...]:
        """See `workers.Workers`."""
        if any(member.process.poll() is not None for member in self._members):
            self.end()
        try:
            return self._draw(requests, emit, cancelled, previews)
        except _GoneBeforeError:  # a rank had died since the last request; these have not begun
            return self._draw(requests, emit, cancelled, previews)

    def _draw(
        self,
        requests: Sequence[ResolvedRequest],
        emit: Callable[[int, Event], None],
        cancelled: Callable[[int], bool],
        previews: Sequence[bool],
    ) -> tuple[Outcome, ...]:
        if not self._members:
            self.start(lambda name: None, lambda name, done, total: None)
        self._told = False
        self._tell_all(Draw(tuple(requests), tuple(previews)))
        hearing, running = Hearing(len(requests), emit), set(range(len(requests)))

        def heard(member: Member, answer: Answer) -> None:
            if isinstance(answer, Told):
                self._told = True
                hearing.hear(answer)

        def stop_cancelled() -> None:
            for place in [place for place in running if cancelled(place)]:
                running.remove(place)
                _send(self._members[0], Stop(place))

        self._follow(heard, watch=stop_cancelled, during="drawing")
        leader = self._members[0].done
        assert isinstance(leader, Done)
        return hearing.outcomes(leader)

    def close(self) -> None:
        """Ends the ranks: each is asked to leave, and those that do not are killed."""
        self._ending.set()
        for member in self._members:
            if member.process.poll() is None:
                _send(member, Leave())
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline and any(m.process.poll() is None for m in self._members):
            time.sleep(POLL_SECONDS / 10)
        self.end()

    def end(self) -> None:
        """Kills whatever is left of the ranks and forgets them."""
        members, self._members = self._members, []
        _end([member.process for member in members], self._ending)
        for member in members:
            member.connection.close()
            member.pump.join(timeout=1.0)
        self._store = []

    def _tell_all(self, order: Order) -> None:
        for member in self._members:
            member.begin()
        for member in self._members:
            _send(member, order)

    def _follow(
        self,
        heard: Callable[[Member, Answer], None],
        *,
        watch: Callable[[], None],
        during: str,
    ) -> None:
        """Hears the ranks until all are done. Any way out but a whole group that is done ends the ranks.

        watch: called now and then.
        """
        healthy = False
        try:
            while not all(member.done for member in self._members):
                self._hear(heard)
                watch()
                if any(m.ended or isinstance(m.done, Failed) for m in self._members):
                    self._hear_the_rest(heard)
                    break
                self._give_up_if_still(during)
            healthy = self._are_in_step()
            self._raise_failures(during)
        finally:
            if not healthy:
                self.end()

    def _are_in_step(self) -> bool:
        """Whether all ranks are there and came to the same end, be it an error that all of them raised."""
        ends = {type(m.done) for m in self._members}
        ours = all(m.done.error is not None for m in self._members if isinstance(m.done, Failed))
        return len(ends) == 1 and None not in ends and ours and not any(m.ended for m in self._members)

    def _hear(self, heard: Callable[[Member, Answer], None]) -> None:
        by_connection = {member.connection: member for member in self._members if not member.ended}
        for connection in wait(list(by_connection), timeout=POLL_SECONDS):
            member = by_connection[connection]  # type: ignore[index]
            try:
                answer = member.connection.recv()
            except (EOFError, OSError):
                member.ended = True
                continue
            now = member.heard = time.monotonic()
            member.quiet = False
            if isinstance(answer, Alive):
                if answer.count != member.alive.count:
                    member.moved = now
                member.alive = answer
            elif isinstance(answer, Loaded | Done | Failed):
                member.done = answer
            else:
                member.moved = now
                heard(member, answer)

    def _hear_the_rest(self, heard: Callable[[Member, Answer], None]) -> None:
        """What the other ranks say in the moments after one failed, to tell the cause from what followed."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and not all(m.done or m.ended for m in self._members):
            self._hear(heard)

    def _raise_failures(self, during: str) -> None:
        dead = [m for m in self._members if m.ended and not isinstance(m.done, Failed)]
        failed = [(m, m.done) for m in self._members if isinstance(m.done, Failed)]
        again = after_a_failure(self._setup.plan.layout)
        if dead:
            member = dead[0]
            kind = _GoneBeforeError if member.quiet and not self._told else RankError
            raise kind(
                f"{self._name(member)} {member.how_it_ended()} while {during} ({member.alive.doing}). "
                f"{member.last_words()}\n{again}"
            )
        own = [done.error for _, done in failed if done.error is not None]
        if own and len(own) == len(self._members):
            raise own[0]  # all ranks agree, as they do on a bad prompt or on being stopped
        if failed:
            # A rank that failed outside of an exchange was not brought down by another.
            member, done = min(failed, key=lambda pair: (pair[1].waits, pair[0].rank))
            raise RankError(
                f"{self._name(member)} failed while {during}: {done.line}\n"
                f"{member.last_words(done.trace)}\n{again}"
            ) from done.error

    def _give_up_if_still(self, during: str) -> None:
        """Raises RankError when no rank moves any more, or one does not answer."""
        limit, now = self._setup.recipe.rank_timeout_seconds, time.monotonic()
        if during == "loading":
            limit = max(limit, LOAD_SECONDS)
        busy = [m for m in self._members if not m.done]
        silent = [m for m in busy if now - m.heard > limit]
        if not silent and (not busy or any(now - m.moved <= limit for m in busy)):
            return
        first = silent[0] if silent else min(busy, key=lambda m: m.alive.count)
        what = "does not answer" if silent else "makes no progress"
        others = [f"rank {m.label} in {m.alive.doing}" for m in busy if m is not first]
        raise RankError(
            f"{self._name(first)} {what} for {limit:g} s while {during}: {first.alive.doing}, at "
            f"{first.alive.line or 'an unknown line'}. The others: {', '.join(others) or 'done'}. "
            f"{first.last_words()}\n{after_a_failure(self._setup.plan.layout)} Raise rank_timeout_seconds if "
            "they need longer."
        )

    def _name(self, member: Member) -> str:
        return f"rank {member.label} of {len(self._members) * self._setup.plan.layout.data}"


def _start_rank(rank: int, label: int, world: int, ending: threading.Event) -> Member:
    """The process of a rank, in a session of its own: Ctrl-C reaches the caller alone, who ends the ranks.

    ending: set before the caller ends it.
    """
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    # Processes that each took all cores would stand in each other's way.
    environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // world, 1)))
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: nothing listens to the outside
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "portable_dit.workers.process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        connection: Connection[Order, Answer] = Connection(os.dup(ours.fileno()))
    lines: deque[str] = deque(maxlen=LAST_LINES)
    pump = threading.Thread(
        target=_pump, args=(process, label, lines, ending), name=f"rank {label}", daemon=True
    )
    pump.start()
    return Member(rank, label, process, connection, lines, pump)


def _pump(process: subprocess.Popen[bytes], label: int, lines: deque[str], ending: threading.Event) -> None:
    """What a rank writes, with its number in front, on the caller's stderr; last its end, if nobody asked."""
    assert process.stdout is not None
    with process.stdout as stream:
        for raw in stream:
            line = raw.decode("utf-8", errors="replace").rstrip()
            lines.append(line)
            print(f"[rank {label}] {line}", file=sys.stderr, flush=True)
    if not ending.is_set() and (code := process.wait()) != TOLD_ITS_ERROR:
        print(f"[rank {label}] {_end_of(code)}", file=sys.stderr, flush=True)


def _end_of(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _send(member: Member, order: Order) -> None:
    try:
        member.connection.send(order)
    except OSError:  # it is gone, which is found out by listening to it
        member.ended = True


def _end(processes: Sequence[subprocess.Popen[bytes]], ending: threading.Event) -> None:
    ending.set()
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
