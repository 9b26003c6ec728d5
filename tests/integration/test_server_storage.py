"""What is kept of jobs when the disk is full, for a while, and when their time is over."""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

from server_process import RunningServer, eventually, running

SHORT = {"prompt": "a red apple", "size": "64x64", "seed": 1}
LONG = {"prompt": "a red apple", "size": "512x512", "n": 24}
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def fill_disk(pid: int, size: int = 0) -> None:
    """A limit on the size of files stands for a disk without room, until `free_disk`."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def free_disk(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, NO_LIMIT)


def wait_for(server: RunningServer, id: str, *states: str) -> dict:
    def there() -> dict | None:
        job = server.get(f"/v1/jobs/{id}").json
        return job if job["status"] in states else None

    return eventually(there, f"{id} is {states}")


def test_a_full_disk_is_told_and_the_server_goes_on(tiny_recipe, tmp_path):
    with running(tiny_recipe, tmp_path / "jobs.sqlite3") as server:
        size = (tmp_path / "jobs.sqlite3").stat().st_size
        fill_disk(server.process.pid, size)
        answers = [
            server.post("/v1/jobs", {**SHORT, "prompt": "a red apple" + " on" * 60}) for _ in range(40)
        ]
        refused = [answer for answer in answers if answer.status != 202]
        assert refused, "40 jobs do not fit"
        assert {(answer.status, answer.error["code"]) for answer in refused} == {(503, "storage")}
        assert server.draw(size="64x64").status == 200, "what needs no disk is drawn"
        free_disk(server.process.pid)
        wait_for(server, server.post("/v1/jobs", SHORT).json["id"], "finished")


def test_a_job_that_ends_while_the_disk_is_full_is_told_when_there_is_room_again(make_slow_recipe, tmp_path):
    with running(make_slow_recipe(), tmp_path / "jobs.sqlite3", "--max-images", "128") as server:
        id = server.post("/v1/jobs", LONG).json["id"]
        wait_for(server, id, "running")
        fill_disk(server.process.pid)
        eventually(
            lambda: any(f"the end of job {id} cannot be stored" in line for line in server.log), "told"
        )
        free_disk(server.process.pid)
        error = wait_for(server, id, "failed", "finished")["error"]
        assert error["code"] == "storage"
        assert "Its pictures could not be stored" in error["message"]


def test_pictures_whose_time_is_over_are_gone_at_once(tiny_recipe, tmp_path):
    with running(tiny_recipe, tmp_path / "jobs.sqlite3", "--keep-hours", "0") as server:
        id = server.post("/v1/jobs", SHORT).json["id"]
        job = wait_for(server, id, "finished")
        assert job["images"] == [], "no address of a picture that is not there"
        gone = server.get(f"/v1/jobs/{id}/result")
        assert (gone.status, gone.error["code"]) == (410, "expired")


def test_a_failure_of_the_server_has_an_id_under_which_the_log_tells_it(tiny_recipe, tmp_path):
    """Here a job that somebody else's hand has changed in the file."""
    with running(tiny_recipe, tmp_path / "jobs.sqlite3", wait=False) as server:
        with sqlite3.connect(tmp_path / "jobs.sqlite3") as database:
            row = ("broken", "peer 127.0.0.1", 0.0, "finished", "no JSON", "[]", None, None, None)
            database.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        database.close()
        answer = server.get("/v1/jobs/broken")
        assert (answer.status, answer.error["code"]) == (500, "bug")
        assert answer.headers["x-content-type-options"] == "nosniff"
        begin = f"{answer.headers['x-request-id']} GET /v1/jobs/{{id}} 500 "
        eventually(lambda: any(line.startswith(begin) for line in server.log), "it is told under its id")
        eventually(lambda: any("JSONDecodeError" in line for line in server.log), "and why")
        assert 'path="/v1/jobs/{id}",status="500"} 1.0' in server.get("/metrics").body.decode()


SERVE = """
import sys
from pathlib import Path
from portable_dit.catalog import load_recipe
from portable_dit.server import service
from portable_dit.server.serving import serve
from portable_dit.server.settings import Settings

service.EXPIRY_SECONDS = 0.1
settings = Settings(port=0, jobs=Path(sys.argv[2]), keep_seconds=1.0)
log = lambda line: print(line, file=sys.stderr, flush=True)
serve(load_recipe(sys.argv[1]), settings, log=log, on_bound=lambda port: print(port, flush=True))
"""


def test_old_pictures_are_dropped_after_the_disk_was_full(tiny_recipe: Path, tmp_path: Path):
    jobs = tmp_path / "jobs.sqlite3"

    def kept() -> int:
        with sqlite3.connect(f"file:{jobs}?mode=ro", uri=True) as database:
            (count,) = database.execute("SELECT COUNT(*) FROM pictures").fetchone()
        database.close()
        return count

    command = [sys.executable, "-c", SERVE, str(tiny_recipe), str(jobs)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        server = RunningServer(f"http://127.0.0.1:{process.stdout.readline().strip()}", process)
        reader = threading.Thread(target=lambda: server.log.extend(process.stderr))
        reader.start()
        try:
            assert server.draw(**SHORT, response_format="url").status == 200
            fill_disk(process.pid)
            eventually(lambda: any("old pictures cannot be dropped" in line for line in server.log), "told")
            assert kept() == 1
            free_disk(process.pid)
            eventually(lambda: not kept(), "it is dropped")
        finally:
            process.kill()
            reader.join(60)
