"""The server's small parts on their own: the store of jobs, answers, settings, wording."""

from __future__ import annotations

import asyncio
import base64
import json
import multiprocessing
import sqlite3
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from portable_dit.catalog import load_recipe, read_spec
from portable_dit.errors import CancelledError, UserError
from portable_dit.request import Request, ResolvedRequest, validate_request
from portable_dit.result import Outcome, Started
from portable_dit.server.answers import Blobs
from portable_dit.server.images import preview_steps
from portable_dit.server.job_store import JobStore, StoredJob
from portable_dit.server.jobs import follow, wish_of
from portable_dit.server.messages import Begun, Draw, Free, Order, PictureFile, Summary
from portable_dit.server.profiler import Profiler
from portable_dit.server.refusal import ApiError
from portable_dit.server.service import Service
from portable_dit.server.settings import Settings, check_host, check_origin, default_jobs_file, read_keys
from portable_dit.server.worker import Worker


def file(data: bytes, seed: int = 0) -> PictureFile:
    return PictureFile(data, "png", 8, 8, seed, {"encode_png": 0.0})


def store(path: Path, *, keep_seconds: float = 60.0, keep_bytes: int = 1 << 20) -> JobStore:
    return JobStore(path, keep_seconds=keep_seconds, keep_bytes=keep_bytes)


def test_a_finished_job_survives_and_a_running_one_is_interrupted(tmp_path):
    async def before() -> None:
        jobs = store(tmp_path / "jobs")
        for id in ("done", "running", "waiting"):
            await jobs.add(id, "me", {"prompt": id}, ["data:,"])
        await jobs.running("done")
        await jobs.ended("done", "finished", files=[file(b"one"), file(b"two", 1)], facts={"id": "done"})
        await jobs.running("running")
        await jobs.close()

    async def after() -> None:
        jobs = store(tmp_path / "jobs")
        (waiting,) = await jobs.restart()
        assert (waiting.id, waiting.wish, waiting.references) == ("waiting", {"prompt": "waiting"}, 1)
        assert await jobs.references("waiting") == ["data:,"]
        done, running = await jobs.find("done"), await jobs.find("running")
        assert done is not None
        assert running is not None
        assert [picture.seed for picture in done.pictures] == [0, 1]
        for job in (done, running):
            assert job.references == 1
            assert await jobs.references(job.id) == [None], "what is not needed any more is not kept"
        assert running.status == "interrupted"
        assert running.error is not None
        assert await jobs.picture("done", 1) == ("png", b"two")
        assert [job.id for job in await jobs.latest("me", 2)] == ["waiting", "running"]
        assert await jobs.latest("somebody else", 2) == []
        await jobs.close()

    asyncio.run(before())
    asyncio.run(after())


def test_pictures_expire_by_age(tmp_path):
    async def work() -> None:
        jobs = store(tmp_path / "jobs", keep_seconds=0.0)
        await jobs.add("old", "me", {}, [])
        await jobs.ended("old", "finished", files=[file(b"old")])
        assert await jobs.picture("old", 0) is None
        job = await jobs.find("old")
        assert job is not None
        assert job.pictures == (), "none that could not be had"
        await jobs.expire()
        assert await jobs.find("old") is None
        await jobs.close()

    asyncio.run(work())


def test_pictures_expire_by_size_the_oldest_first(tmp_path):
    async def work() -> None:
        jobs = store(tmp_path / "jobs", keep_bytes=250)
        for number in range(4):
            await jobs.keep(f"owner {number}", [file(bytes(100))])
        await jobs.expire()
        kept = [await jobs.picture(f"owner {number}", 0) is not None for number in range(4)]
        assert kept == [False, False, True, True]
        await jobs.close()

    asyncio.run(work())


def test_a_stop_writes_down_what_became_of_jobs_on_a_slow_disk(tmp_path):
    """Of two that end as it stops, while the disk is busy: one with a picture, one that it ends itself."""

    async def work() -> None:
        recipe, settings = load_recipe("cpu/h3-mini"), Settings(jobs=tmp_path / "jobs")
        service = Service(recipe, settings, on_fatal=lambda failed: None, log=lambda line: None)
        tickets = [service.accept(drawable(), client="me", id=id) for id in ("done", "waiting")]
        for ticket in tickets:
            await service.store.add(ticket.id, "me", {"prompt": ticket.id}, [])
            service.spawn(follow(service, ticket), writes=True)
        slow = sqlite3.connect(tmp_path / "jobs", isolation_level=None)
        slow.execute("BEGIN IMMEDIATE")  # what wants to write waits
        tickets[0].start()
        await asyncio.sleep(0.1)  # that it has begun is still to be written
        tickets[0].add(file(b"one"))
        tickets[0].finish(Summary({"text_encode": 0.0, "total": 0.0}, None, (), ()))
        stopping = asyncio.ensure_future(service.stop())
        await asyncio.sleep(0.2)
        slow.close()
        await stopping
        jobs = store(tmp_path / "jobs")
        found = [await jobs.find(id) for id in ("done", "waiting")]
        assert [job and job.status for job in found] == ["finished", "queued"]
        assert await jobs.picture("done", 0) == ("png", b"one")
        await jobs.close()

    asyncio.run(work())


def test_the_file_of_jobs_is_for_its_owner_alone(tmp_path):
    path = tmp_path / "state" / "jobs"
    asyncio.run(store(path).close())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database, and dear to somebody " * 100)
    with pytest.raises(UserError, match="cannot be used"):
        store(path)
    assert path.read_text().startswith("not a database")


def test_a_second_server_on_the_same_file_is_refused(tmp_path):
    first = store(tmp_path / "jobs")
    with pytest.raises(UserError, match="another server"):
        store(tmp_path / "jobs")
    asyncio.run(first.close())
    asyncio.run(store(tmp_path / "jobs").close())


def test_ids_are_values_and_never_part_of_a_statement(tmp_path):
    async def work() -> None:
        jobs = store(tmp_path / "jobs")
        await jobs.add("a", "me", {}, [])
        assert await jobs.find("' OR '1'='1") is None
        await jobs.remove("a'; DROP TABLE jobs; --")
        assert await jobs.find("a") is not None
        await jobs.close()

    asyncio.run(work())
    with sqlite3.connect(tmp_path / "jobs") as database:
        assert database.execute("SELECT COUNT(*) FROM jobs").fetchone() == (1,)
    database.close()


def test_blobs_stand_in_json_as_base64():
    blobs = Blobs()
    data = [bytes(range(256)), b"", b"x" * 1000]
    document = {"data": [{"b64_json": blobs.marker(piece)} for piece in data], "note": 'ü "quoted" <tag>'}
    read = json.loads(blobs.dump(document))
    assert [base64.b64decode(item["b64_json"]) for item in read["data"]] == data
    assert read["note"] == 'ü "quoted" <tag>'


@pytest.mark.parametrize(
    ("steps", "count", "expected"),
    [(6, 0, []), (6, 1, [3]), (6, 2, [2, 4]), (6, 3, [2, 3, 4]), (1, 3, []), (50, 3, [12, 25, 38])],
)
def test_partial_images_are_spread_over_the_steps(steps, count, expected):
    assert sorted(preview_steps(steps, count)) == expected


def test_keys_come_from_a_file_and_from_the_environment(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# comment\n\n  first-key-0123456789  \n")
    keys = read_keys(path, {"PORTABLE_DIT_API_KEYS": "second-key-0123456789, third-key-0123456789"})
    assert keys == {"first-key-0123456789", "second-key-0123456789", "third-key-0123456789"}
    assert "first-key" not in repr(Settings(keys=keys))
    assert read_keys(None, {}) == frozenset()


@pytest.mark.parametrize(("text", "rule"), [("short\n", "shorter than 16"), ("# none\n", "holds no key")])
def test_keys_that_protect_nothing_are_refused(tmp_path, text, rule):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(UserError, match=rule) as refused:
        read_keys(path, {})
    assert "short\n" not in str(refused.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_keys(tmp_path / "missing", {})


def test_jobs_are_kept_in_the_users_state_folder(tmp_path):
    path = default_jobs_file(8091, {"XDG_STATE_HOME": str(tmp_path)})
    assert path == tmp_path / "portable-dit" / "jobs-8091.sqlite3"


def test_loopback_is_known(tmp_path):
    assert all(Settings(host=host).is_loopback for host in ("127.0.0.1", "localhost", "::1"))
    assert not any(Settings(host=host).is_loopback for host in ("0.0.0.0", "::", "10.0.0.1"))


def test_what_is_measured_while_another_request_of_the_call_ends_is_not_lost(tmp_path):
    """Requests end on the caller's thread, and the one that draws goes on with those beside them."""
    file, count = tmp_path / "trace.json", 20_000
    profiler = Profiler(file, wait=lambda: None, log=lambda line: None)

    def draw() -> None:
        for number in range(count):
            profiler.add("part", 0.0, 0.0, number=number)

    drawing = threading.Thread(target=draw)
    drawing.start()
    while drawing.is_alive():
        profiler.end_request("one")
    drawing.join()
    profiler.end_request("the last")
    profiler.close()
    assert [event["args"]["number"] for event in json.loads(file.read_text())] == list(range(count))


def test_who_waits_for_a_replica_that_draws_has_not_stalled():
    request = drawable()
    ours, theirs = multiprocessing.Pipe()
    now = 1000.0
    with ours, theirs:
        worker = Worker(theirs, clock=lambda: now)
        worker.drawing = HeldBack()
        assert worker.quiet_seconds() == 0.0
        draws = [Draw((Order(id, request, frozenset(), 92),)) for id in ("first", "second")]
        for draw in draws:
            worker.obey(draw)
        now += 7
        assert worker.quiet_seconds() == 7.0, "nothing is drawn that they could wait for"
        worker.tell(draws[0], draws[0].orders[0], Started(1, 6))
        assert ours.recv() == Begun("first")
        now += 3
        assert worker.quiet_seconds() == 3.0, "the one that is drawn counts"
        worker.drawing.ended[0].set_result((CancelledError("test"),))
        now += 5
        assert worker.quiet_seconds() == 5.0, "it should have begun when the other ended"
        assert ours.recv() == Free(("first",), whole=False)
        worker.encoding.shutdown()


def test_a_drawing_is_told_at_once_and_not_behind_the_files_of_others():
    order = Order("id", drawable(), frozenset(), 92)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        worker, made = Worker(theirs), threading.Event()
        worker.encoding.submit(made.wait)
        worker.tell(Draw((order,)), order, Started(1, 6))
        assert ours.poll(), "the files are not made yet"
        assert ours.recv() == Begun("id")
        made.set()
        worker.encoding.shutdown()


def drawable() -> ResolvedRequest:
    return validate_request(Request("a red apple", size=(256, 256)), read_spec(load_recipe("cpu/h3-mini")))


class HeldBack:
    """Where drawings are handed in, which end when the test says so."""

    def __init__(self) -> None:
        self.ended: list[Future[tuple[Outcome, ...]]] = []

    def submit(self, draw: Callable[..., Any], message: Draw) -> Future[tuple[Outcome, ...]]:
        self.ended.append(Future())
        return self.ended[-1]


@pytest.mark.parametrize(
    "name",
    ["a.example.com", "LOCALHOST", "*.example.com", "10.0.0.0/8", "::1", "fd00::/8", "127.0.0.1", "a_b"],
)
def test_a_host_to_fetch_from_is_a_name_a_domain_or_a_network(name):
    assert check_host(name, "--allow-image-host") == name.lower()


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("http://x", "--allow-image-host"),
        ("x:80", "--allow-image-host"),
        ("*", "--allow-image-host"),
        ("10.0.0.1/8", "--allow-image-host"),
        ("", "--allow-image-host"),
        ("*.example.com", "--allowed-host"),
        ("10.0.0.0/8", "--allowed-host"),
        ("x:80", "--allowed-host"),
    ],
)
def test_what_could_never_be_a_host_is_refused(name, flag):
    with pytest.raises(UserError, match=f"{flag} .*: not a host. Say its name alone"):
        check_host(name, flag)


def test_an_origin_is_what_a_browser_says():
    for site in ("https://example.com", "http://127.0.0.1:8080", "https://[::1]:1"):
        assert check_origin(site) == site
    for site in ("*", "example.com", "https://example.com/", "ftp://a", "https://", "http://[::1"):
        with pytest.raises(UserError, match="not an origin"):
            check_origin(site)


def test_a_stored_job_that_this_version_does_not_take_any_more_is_refused_and_no_crash():
    job = StoredJob("id", "me", 0.0, "queued", {"prompt": "a", "colour": 3}, 0, None, None, None, ())
    with pytest.raises(ApiError, match="colour: not a field of this call"):
        wish_of(job)
    assert wish_of(replace(job, wish={"prompt": "a", "seed": 7})).seed == 7
