"""Jobs, cancelling, lost workers, restarts and signals, each against a real server process."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
from server_process import RunningServer, alive, eventually, running

from portable_dit.engine import Engine
from portable_dit.request import Request


@pytest.fixture(scope="module")
def server(tiny_recipe: Path, tmp_path_factory) -> Iterator[RunningServer]:
    with running(tiny_recipe, tmp_path_factory.mktemp("server") / "jobs.sqlite3") as server:
        yield server


@pytest.fixture(scope="module")
def slow(make_slow_recipe) -> Path:
    return make_slow_recipe()


@pytest.fixture(scope="module")
def slow_server(slow: Path, tmp_path_factory) -> Iterator[RunningServer]:
    jobs = tmp_path_factory.mktemp("server") / "jobs.sqlite3"
    with running(slow, jobs, "--max-images", "128") as server:
        yield server


LONG = {"prompt": "a red apple", "size": "512x512", "n": 128}
SHORT = {"prompt": "a red apple", "size": "64x64", "seed": 1}


def submit(server: RunningServer, body: dict) -> str:
    answer = server.post("/v1/jobs", body)
    assert answer.status == 202, answer.body
    assert answer.headers["location"] == f"/v1/jobs/{answer.json['id']}"
    return answer.json["id"]


def job(server: RunningServer, id: str) -> dict:
    return server.get(f"/v1/jobs/{id}").json


def wait_for(server: RunningServer, id: str, *states: str) -> dict:
    return eventually(lambda: (found := job(server, id))["status"] in states and found, f"{id} is {states}")


def events_of(
    server: RunningServer, id: str, *, listening: Callable[[], object] = lambda: None
) -> list[tuple[str, dict]]:
    """All events up to the end. listening: called when the first has come."""
    with urllib.request.urlopen(f"{server.url}/v1/jobs/{id}/events", timeout=300) as stream:
        first = stream.readline()
        listening()
        text = (first + stream.read()).decode()
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def test_a_job_ends_with_the_picture_that_the_engine_draws(server, tiny_recipe):
    id = submit(server, {**SHORT, "size": "96x64", "seed": 4, "n": 2})
    done = wait_for(server, id, "finished")
    with Engine.load(tiny_recipe) as engine:
        expected = engine.generate(Request("a red apple", size=(96, 64), seed=4, images=2, format="png"))
    files = [server.get(image["url"].removeprefix(server.url)).body for image in done["images"]]
    assert files == [picture.encoded["png"] for picture in expected.images]
    result = server.get(f"/v1/jobs/{id}/result").json
    assert [base64.b64decode(item["b64_json"]) for item in result["data"]] == files
    assert [item["seed"] for item in result["data"]] == [4, 5]


def test_events_tell_every_step_with_a_preview_and_then_the_end(slow_server):
    before = submit(slow_server, LONG)
    wait_for(slow_server, before, "running")
    id = submit(slow_server, {"prompt": "a red apple", "size": "512x512", "previews": True})
    *steps, (name, last) = events_of(
        slow_server, id, listening=lambda: slow_server.post(f"/v1/jobs/{before}/cancel")
    )
    assert (name, last["status"], len(last["images"])) == ("finished", "finished", 1)
    numbers = [data["step"] for kind, data in steps if kind == "step"]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 6
    assert any(data.get("preview", "").startswith("data:image/png;base64,") for _, data in steps)


def test_events_of_an_ended_job_are_its_end(server):
    id = submit(server, SHORT)
    wait_for(server, id, "finished")
    assert [name for name, _ in events_of(server, id)] == ["finished"]


def test_a_cancelled_job_frees_the_device_at_the_next_step(slow_server):
    id = submit(slow_server, LONG)
    wait_for(slow_server, id, "running")
    assert slow_server.post(f"/v1/jobs/{id}/cancel").json["status"] == "cancelled"
    assert slow_server.draw(size="64x64").status == 200, "the next request is drawn"
    assert slow_server.get(f"/v1/jobs/{id}/result").error["code"] == "job_cancelled"
    assert events_of(slow_server, id)[-1][0] == "cancelled"
    assert slow_server.post(f"/v1/jobs/{id}/cancel").json["status"] == "cancelled", "once more does no harm"


def test_a_job_that_waits_can_be_cancelled(slow_server):
    first, second = submit(slow_server, LONG), submit(slow_server, LONG)
    assert job(slow_server, second)["position"] in (0, 1)
    assert slow_server.post(f"/v1/jobs/{second}/cancel").json["status"] == "cancelled"
    assert slow_server.post(f"/v1/jobs/{first}/cancel").json["status"] == "cancelled"


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/chat/completions"])
def test_a_caller_who_leaves_frees_the_device(slow_server, path):
    body: dict = {**LONG, "n": 100}
    if path.endswith("completions"):
        body = {"messages": [{"role": "user", "content": body.pop("prompt")}], **body}
    connection = http.client.HTTPConnection("127.0.0.1", slow_server.port, timeout=300)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    eventually(lambda: slow_server.get("/server_info").json["workers"][0]["drawing"], "it is being drawn")
    connection.close()
    eventually(
        lambda: not slow_server.get("/server_info").json["workers"][0]["drawing"], "the worker is free"
    )


def test_a_cancelled_drawing_changes_no_guess_of_how_long_the_queue_takes(slow_server):
    assert slow_server.draw(size="64x64").status == 200

    def guess() -> float:
        """Of one that waits behind one that is drawn, both of which are cancelled then."""
        long = submit(slow_server, LONG)
        wait_for(slow_server, long, "running")
        waits = submit(slow_server, SHORT)
        told = slow_server.get("/server_info").json
        assert (told["queue"]["waiting"], told["workers"][0]["drawing"]) == (1, [long])
        for id in (waits, long):
            slow_server.post(f"/v1/jobs/{id}/cancel")
        return told["queue"]["seconds_ahead"]

    assert guess() == guess() == guess()


def test_a_caller_who_leaves_a_stream_frees_the_device(slow_server):
    connection = http.client.HTTPConnection("127.0.0.1", slow_server.port, timeout=300)
    body = json.dumps({**LONG, "stream": True, "partial_images": 3})
    connection.request("POST", "/v1/images/generations", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"event: image_generation.partial_image")
    response.close()
    connection.close()
    eventually(
        lambda: not slow_server.get("/server_info").json["workers"][0]["drawing"], "the worker is free"
    )


def test_a_lost_worker_is_told_to_its_caller_and_replaced(slow_server):
    with ThreadPoolExecutor(2) as pool:
        lost = pool.submit(slow_server.post, "/v1/images/generations", LONG)
        eventually(lambda: slow_server.get("/server_info").json["workers"][0]["drawing"], "it is being drawn")
        waiting = pool.submit(slow_server.draw, size="64x64")
        eventually(lambda: slow_server.get("/server_info").json["queue"]["waiting"], "one waits")
        os.kill(slow_server.worker_pid, signal.SIGKILL)
        answer = lost.result(300)
        assert (answer.status, answer.error["code"]) == (503, "worker_lost")
        assert answer.headers["retry-after"]
        slow_server.wait_ready(False)
        assert slow_server.get("/health").status == 200
        assert waiting.result(300).status == 200, "the queue goes on with the next worker"
    assert slow_server.get("/server_info").json["workers"][0]["starts"] == 2


def test_a_worker_is_lost_while_nobody_waits(server):
    before = server.worker_pid
    os.kill(before, signal.SIGKILL)
    eventually(lambda: server.worker_pid != before and server.get("/ready").status == 200, "another is ready")
    assert server.draw(size="64x64").status == 200


def test_too_many_requests_are_told_when_to_come_again(slow, tmp_path):
    with running(slow, tmp_path / "jobs.sqlite3", "--max-queue", "2", "--max-images", "128") as server:
        first = submit(server, LONG)
        wait_for(server, first, "running")
        waiting = [submit(server, LONG) for _ in range(2)]
        refused = server.post("/v1/jobs", SHORT)
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        for id in (first, *waiting):
            server.post(f"/v1/jobs/{id}/cancel")
        assert server.draw(size="64x64").status == 200


def test_what_takes_too_long_ends_in_time(slow, tmp_path):
    with running(slow, tmp_path / "jobs.sqlite3", "--deadline", "0.5", "--max-images", "128") as server:
        answer = server.post("/v1/images/generations", LONG)
        assert (answer.status, answer.error["code"]) == (504, "deadline")
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                client.images.generate(prompt="a red apple", size=LONG["size"], n=LONG["n"])
            assert caught.value.code == "deadline"
        assert 'code="deadline"} 2.0' in server.get("/metrics").body.decode(), "the client sent it once"
        eventually(lambda: server.draw(size="64x64").status == 200, "others are drawn in that time")


def test_a_restart_keeps_pictures_resumes_what_waited_and_tells_what_was_interrupted(slow, tmp_path):
    jobs = tmp_path / "jobs.sqlite3"
    with running(slow, jobs, "--max-images", "128") as server:
        finished = submit(server, SHORT)
        picture = wait_for(server, finished, "finished")["images"][0]["url"].removeprefix(server.url)
        data = server.get(picture).body
        interrupted = submit(server, LONG)
        wait_for(server, interrupted, "running")
        waited = submit(
            server, {**SHORT, "images": [f"data:image/png;base64,{base64.b64encode(data).decode()}"]}
        )
        server.process.kill()
        server.process.wait(300)
    with running(slow, jobs, "--max-images", "128") as server:
        assert server.get(picture).body == data
        assert job(server, interrupted)["status"] == "interrupted"
        assert server.get(f"/v1/jobs/{interrupted}/result").error["code"] == "job_interrupted"
        again = wait_for(server, waited, "finished")
        assert again["images"][0]["seed"] == 1
        newest = server.get("/v1/jobs").json["data"]
        assert [item["id"] for item in newest] == [waited, interrupted, finished]
        assert server.request("DELETE", f"/v1/jobs/{finished}").status == 204
        assert server.get(picture).status == 404


def test_a_port_that_is_taken_is_refused(server, tiny_recipe, tmp_path, cli):
    flags = ("--recipe", tiny_recipe, "--jobs", tmp_path / "jobs", "--port", server.port)
    refused = cli("serve", *flags)
    assert (refused.exit_code, "cannot be listened on" in refused.stderr) == (2, True)


def test_two_servers_do_not_share_a_jobs_file(server, tiny_recipe, cli, tmp_path):
    path = next(arg for arg in server.process.args if str(arg).endswith("jobs.sqlite3"))
    (tmp_path / "link").symlink_to(Path(path).parent)
    (tmp_path / "other").symlink_to(path)
    for name in (path, tmp_path / "link" / "jobs.sqlite3", tmp_path / "other"):
        refused = cli("serve", "--recipe", tiny_recipe, "--jobs", name, "--port", 0)
        assert refused.exit_code == 2
        assert "another server keeps its jobs there" in refused.stderr


def test_a_stop_finishes_what_was_accepted_and_a_second_one_does_not(slow, tmp_path):
    jobs = tmp_path / "jobs.sqlite3"
    with running(slow, jobs, "--max-images", "128") as server, ThreadPoolExecutor(2) as pool:
        some = pool.submit(server.post, "/v1/images/generations", {**LONG, "n": 6})
        eventually(lambda: server.get("/server_info").json["workers"][0]["drawing"], "it is being drawn")
        more = pool.submit(server.post, "/v1/images/generations", SHORT)
        eventually(lambda: server.get("/server_info").json["queue"]["waiting"], "one waits")
        worker = server.worker_pid
        server.process.send_signal(signal.SIGTERM)
        refused = eventually(lambda: (a := server.draw()).status == 503 and a, "nothing more is accepted")
        assert refused.error["code"] == "draining"
        assert server.get("/ready").status == 503
        assert len(some.result(300).json["data"]) == 6
        assert more.result(300).status == 200
        assert server.process.wait(300) == 0
        assert not Path(f"/proc/{worker}").exists()
    with running(slow, jobs, "--max-images", "128") as server, ThreadPoolExecutor(2) as pool:
        drawn, waiting = submit(server, LONG), submit(server, SHORT)
        wait_for(server, drawn, "running")
        asked = pool.submit(server.post, "/v1/images/generations", SHORT)
        told = pool.submit(events_of, server, waiting)
        eventually(lambda: server.get("/server_info").json["queue"]["waiting"] == 2, "two wait")
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.get("/ready").status == 503, "it drains")
        server.process.send_signal(signal.SIGTERM)
        answer = asked.result(300)
        assert (answer.status, answer.error["code"]) == (503, "draining")
        assert {name for name, _ in told.result(60)} == {"queued"}, "its end is still to come"
        assert server.process.wait(300) == 0
    assert not any("Traceback" in line for line in server.log)
    assert not jobs.with_name(f"{jobs.name}-wal").exists()
    with running(slow, jobs, "--max-images", "128") as server:
        assert job(server, drawn)["status"] == "interrupted"
        wait_for(server, waiting, "finished")


def test_a_server_that_is_killed_takes_its_worker_along(tiny_recipe, tmp_path):
    with running(tiny_recipe, tmp_path / "jobs.sqlite3") as server:
        worker = server.worker_pid
        server.process.kill()
        server.process.wait(300)
        eventually(lambda: not alive(worker), "the worker is gone")


def test_a_recipe_that_cannot_be_loaded_ends_the_server_with_its_reason(tmp_path, make_checkpoint):
    folder = make_checkpoint(tmp_path / "broken")
    (folder / "vae" / "model.safetensors").write_bytes(b"no tensors")
    recipe = tmp_path / "broken.yaml"
    recipe.write_text(f"model: h3-mini\nweights: {folder}\ndevice: {{backend: cpu}}\n")
    with running(recipe, tmp_path / "jobs.sqlite3", wait=False) as server:
        assert server.process.wait(300) == 2
    assert server.log[0].startswith("error:")
    assert "vae/model.safetensors: 10 bytes" in "".join(server.log)


def test_clients_take_turns(slow, tmp_path):
    """One client's many requests do not stand before another's only one."""
    keys = tmp_path / "keys"
    keys.write_text("first-client-0123456789\nsecond-client-0123456789\n")
    flags = ("--api-key-file", str(keys), "--max-images", "128")
    with running(slow, tmp_path / "jobs.sqlite3", *flags) as server:
        one, two = ({"Authorization": f"Bearer {key}"} for key in keys.read_text().split())
        order: list[str] = []

        def draw(name: str, headers: dict[str, str]) -> None:
            body = {"prompt": "a red apple", "size": "512x512", "n": 2}
            assert server.post("/v1/images/generations", body, headers=headers).status == 200
            order.append(name)

        def info() -> dict:
            return server.get("/server_info", headers=one).json

        before = server.post("/v1/jobs", LONG, headers=one).json["id"]
        eventually(lambda: info()["workers"][0]["drawing"], "it is being drawn")
        threads = [threading.Thread(target=draw, args=("one", one)) for _ in range(4)]
        for thread in threads:
            thread.start()
        eventually(lambda: info()["queue"]["waiting"] == 4, "four wait")
        other = threading.Thread(target=draw, args=("two", two))
        other.start()
        eventually(lambda: info()["queue"]["waiting"] == 5, "the other's waits too")
        server.post(f"/v1/jobs/{before}/cancel", headers=one)
        for thread in (*threads, other):
            thread.join(300)
        assert order.index("two") <= 1, order
        assert server.get("/v1/jobs", headers=two).json["data"] == []
        assert server.get("/v1/jobs").status == 401


def test_the_profiler_logs_each_part_and_writes_a_trace_that_opens(tiny_recipe, tmp_path):
    trace = tmp_path / "trace.json"
    flags = ("--enable-diffusion-pipeline-profiler", "--profile", str(trace))
    with running(tiny_recipe, tmp_path / "jobs.sqlite3", *flags) as server:
        bodies = [server.draw(size="96x64", seed=seed).body for seed in (1, 2)]
        assert len(bodies) == 2
        parts = json.loads(trace.read_text())
        server.stop()
    counts = {name: sum(part["name"] == name for part in parts) for name in {part["name"] for part in parts}}
    assert counts["model.forward"] == counts["patch_embed.forward"] == counts["final_layer.forward"] == 12
    assert counts["vae.decode"] == 2
    for forward in (part for part in parts if part["name"] == "model.forward"):
        inside = [part for part in parts if forward["ts"] <= part["ts"] < forward["ts"] + forward["dur"]]
        assert {"patch_embed.forward", "final_layer.forward"} <= {part["name"] for part in inside}
    assert sum("profile: 96x64, 6 steps: " in line and "vae.decode 1 x " in line for line in server.log) == 2


def test_replicas_of_a_layout_draw_at_once_and_a_lost_one_is_told_and_started_again(slow, tmp_path):
    flags = ("--set", "layout.data=2", "--max-images", "128")
    with running(slow, tmp_path / "jobs.sqlite3", *flags) as server, ThreadPoolExecutor(4) as pool:
        (worker,) = server.get("/server_info").json["workers"]
        assert (worker["plan"]["executor"], worker["devices"]) == ("mp", 2)
        alone = server.draw(size="96x64", seed=3).json["data"]
        together = [pool.submit(server.draw, size="96x64", seed=3, n=2) for _ in range(4)]
        for answer in together:
            assert answer.result(300).json["data"][0] == alone[0], "in the order of their seeds"
        long, seen = submit(server, LONG), set()

        def both_have_told() -> bool:
            """A rank that is lost before it has said anything is started again, and nobody notices."""
            step = job(server, long).get("step", 0)
            if step:
                seen.add(step > LONG["n"] * 6 // 2)
            return len(seen) == 2

        eventually(both_have_told, "each replica has drawn some of its half")
        waits = submit(server, SHORT)
        told = pool.submit(events_of, server, waits)
        taken = eventually(
            lambda: (found := server.get("/server_info").json)["queue"]["waiting"] and found, "it waits"
        )
        assert (taken["workers"][0]["drawing"], taken["queue"]["waiting"]) == ([long], 1)
        assert (job(server, waits)["status"], job(server, waits)["position"]) == ("queued", 0)
        server.post(f"/v1/jobs/{waits}/cancel")
        assert [name for name, _ in told.result(300)] == ["queued", "cancelled"]
        waits = submit(server, SHORT)
        ranks = [child.pid for child in psutil.Process(worker["pid"]).children()]
        os.kill(ranks[0], signal.SIGKILL)
        error = wait_for(server, long, "failed")["error"]
        assert error["code"] == "worker_lost"
        assert "SIGKILL" in error["message"]
        wait_for(server, waits, "finished")
        long = submit(server, LONG)
        wait_for(server, long, "running")
        waits = submit(server, SHORT)
        eventually(lambda: job(server, waits).get("position") == 0, "it is the next")
        os.kill(worker["pid"], signal.SIGKILL)
        assert wait_for(server, long, "failed")["error"]["code"] == "worker_lost"
        wait_for(server, waits, "finished")
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(300)


def test_a_worker_that_does_not_answer_is_not_ready(server):
    """Stopped, not dead: its requests hang, and a balancer has to know."""
    os.kill(server.worker_pid, signal.SIGSTOP)
    try:
        server.wait_ready(False)
        assert server.get("/health").status == 200
    finally:
        os.kill(server.worker_pid, signal.SIGCONT)
    server.wait_ready()
    assert server.draw(size="64x64").status == 200


NOTES_THREADS = """
import threading
from pathlib import Path
from portable_dit.cpu import CpuBackend
from portable_dit.hooks import hookimpl

class NotesThreads(CpuBackend):
    id = "notes"
    def synchronize(self, device):
        with Path({file!r}).open("a") as file:
            print(threading.current_thread().name, file=file)

@hookimpl
def portable_dit_backends():
    return [NotesThreads()]
"""


def test_the_thread_that_loads_is_the_one_that_draws(shelf, tiny_recipe, tmp_path):
    """Two threads that compute have two teams of OpenMP threads, which slow each other down."""
    names = tmp_path / "names"
    shelf.install("notes", NOTES_THREADS.format(file=str(names)))
    recipe = tmp_path / "notes.yaml"
    recipe.write_text(tiny_recipe.read_text().replace("backend: cpu", "backend: notes"))
    with running(recipe, tmp_path / "jobs.sqlite3", **shelf.environment) as server:
        loaded = names.read_text().split()
        assert server.draw(size="64x64").status == 200
        drawn = names.read_text().split()[len(loaded) :]
    assert loaded
    assert set(loaded) == set(drawn)
