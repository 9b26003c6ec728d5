"""`bench --server` and `eval --server` against running servers."""

from __future__ import annotations

import base64
import io
import json
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from PIL import Image
from server_process import RunningServer, running

PRICES = Path(__file__).parents[2] / "docs" / "prices" / "example.yaml"


@pytest.fixture(scope="module")
def server(tiny_recipe: Path, tmp_path_factory) -> Iterator[RunningServer]:
    with running(tiny_recipe, tmp_path_factory.mktemp("server") / "jobs.sqlite3") as server:
        yield server


def test_a_server_is_measured_at_several_numbers_of_clients(cli, server, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red apple\n\na green apple\n")
    flags = [
        "--server",
        server.url,
        "--concurrency",
        "1,3",
        "--requests",
        6,
        "--prompts",
        prompts,
        "--size",
        "64x64",
    ]
    plot = tmp_path / "plot.svg"
    answer = cli("bench", *flags, "--prices", PRICES, "--plot", plot, "--json")
    assert answer.exit_code == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert [point["concurrency"] for point in report["points"]] == [1, 3]
    for point in report["points"]:
        assert (point["pictures"], point["failures"]) == (6, 0)
        assert 0 < point["p50"] <= point["p95"] <= point["p99"]
        hourly = point["pictures_per_hour"]  # figures of seven digits, like all here
        assert hourly == pytest.approx(3600 * 6 / point["seconds"], rel=1e-5)
        assert point["cost_per_picture"] >= 2.9999 / hourly
        assert point["revenue_per_device_hour"] == pytest.approx(hourly * 0.06879 * 0.75, rel=1e-5)
    ElementTree.parse(plot)
    text = cli("bench", *flags)
    assert text.stdout.splitlines()[0].split()[0] == "clients"
    assert len(text.stdout.splitlines()) == 3


def test_what_a_server_refuses_is_told(cli, server):
    answer = cli("bench", "--server", server.url, "--size", "65x64", "--requests", 1, "--warmup", 0)
    assert answer.exit_code == 1
    assert "multiples" in answer.stderr


def test_references_are_sent_along(cli, server, tmp_path):
    import numpy as np

    from portable_dit.image import encode

    path = tmp_path / "red.png"
    path.write_bytes(encode(np.full((64, 96, 3), (255, 0, 0), np.uint8), {}))
    answer = cli("bench", "--server", server.url, "--image", path, "-n", 3, "--requests", 2, "--json")
    (point,) = json.loads(answer.stdout)["points"]
    assert (point["pictures"], point["side_by_side"]) == (6, 1.0)
    assert point["pictures_per_hour"] == pytest.approx(3600 * 6 / point["seconds"], rel=1e-5)


class RuleJudge(BaseHTTPRequestHandler):
    """A judge by a rule: a picture of 96 x 64 gets 1, of 64 x 64 a half; every third answer is not JSON."""

    asked: ClassVar[list[dict]] = []

    def do_GET(self):
        self.answer({"data": [{"id": "rule"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        urls = [part["image_url"]["url"] for part in body["messages"][1]["content"] if "image_url" in part]
        with Image.open(io.BytesIO(base64.b64decode(urls[-1].partition(",")[2]))) as picture:
            score = {(96, 64): 1.0, (64, 64): 0.5}[picture.size]
        text = (
            "let me think" if len(self.asked) % 3 == 0 else f'{{"score": {score}, "reason": "by its size"}}'
        )
        self.answer({"choices": [{"message": {"content": text}}]})

    def answer(self, document):
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        """Quiet."""


@pytest.fixture
def judge() -> Iterator[str]:
    RuleJudge.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), RuleJudge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    Image.new("RGB", (96, 64), "red").save(tmp_path / "red.png")
    path = tmp_path / "suite.yaml"
    path.write_text(
        "name: sizes\nrubric: By its size.\ngate: 0.75\ntypes:\n"
        "  drawn: [{prompt: a red apple}, {prompt: a green apple}]\n"
        "  edited: [{prompt: make it blue, references: [red.png], expect: blue}]\n"
    )
    return path


def test_a_suite_is_drawn_and_judged_and_means_are_reported(cli, server, judge, suite, tmp_path):
    report = tmp_path / "report.json"
    flags = ("--suite", suite, "--server", server.url, "--judge", judge, "--report", report, "--json")
    answer = cli("eval", *flags)
    assert answer.exit_code == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert json.loads(report.read_text()) == found
    assert found["passed"]
    assert (found["overall"]["mean"], found["overall"]["count"]) == (1.0, 3)
    assert set(found["types"]) == {"drawn", "edited"}
    assert RuleJudge.asked[0]["messages"][0]["content"].startswith("By its size.")
    edit = RuleJudge.asked[-1]["messages"][1]["content"]
    assert [part["type"] for part in edit] == ["text", "image_url", "image_url"], "the reference comes along"
    assert "Look for: blue" in edit[0]["text"]


def test_a_gate_that_is_missed_is_exit_code_one(cli, server, judge, suite):
    suite.write_text(suite.read_text().replace("types:", "size: 64x64\ntypes:"))
    answer = cli("eval", "--suite", suite, "--server", server.url, "--judge", judge)
    assert answer.exit_code == 1
    assert answer.stdout.startswith("sizes, judged by http")
    assert "FAILED" in answer.stdout
    assert "0.500 of 0.75" in answer.stdout


def test_drawing_and_judging_can_be_hours_apart(cli, server, judge, suite, tmp_path):
    """The drawing server may be gone when the judge runs; nothing is drawn twice."""
    folder = tmp_path / "pictures"
    drawn = cli("eval", "--suite", suite, "--server", server.url, "--pictures", folder)
    assert drawn.exit_code == 0, drawn.stderr
    assert sorted(path.name for path in folder.glob("*.png")) == [
        "drawn-000.png",
        "drawn-001.png",
        "edited-000.png",
    ]
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    assert cli("eval", "--suite", suite, "--server", server.url, "--pictures", folder).exit_code == 0
    assert times == {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    assert cli("eval", "--suite", suite, "--judge", judge, "--pictures", folder).exit_code == 0
    (folder / "drawn-000.png").unlink()
    missing = cli("eval", "--suite", suite, "--judge", judge, "--pictures", folder)
    assert (missing.exit_code, "drawn-000.png" in missing.stderr) == (2, True)
    suite.write_text(suite.read_text().replace("a red apple", "a blue apple"))
    other = cli("eval", "--suite", suite, "--server", server.url, "--pictures", folder)
    assert (other.exit_code, "another suite" in other.stderr) == (2, True)


def test_noise_does_not_pass_the_builtin_judge(cli, server):
    """A model with random weights, asked for two of each kind."""
    answer = cli("eval", "--server", server.url, "--judge", "builtin", "--samples-per-type", 2, "--json")
    assert answer.exit_code == 1, answer.stderr
    found = json.loads(answer.stdout)
    assert not found["passed"]
    failed = {gate["name"] for gate in found["gates"] if gate["outcome"] == "missed"}
    assert {"t2i/single_top1", "t2i/style", "edit/untouched"} <= failed


def test_the_builtin_model_passes_what_it_passes_without_a_server(cli, tmp_path):
    """One of each kind, which must be the right things; whole gates are measured in test_gates."""
    with running("cpu/h3-mini", tmp_path / "jobs") as server:
        answer = cli("eval", "--server", server.url, "--judge", "builtin", "--samples-per-type", 1, "--json")
    found = json.loads(answer.stdout)
    values = {gate["name"]: gate["value"] for gate in found["gates"]}
    assert values["t2i/background"] == 1.0
    assert values["t2i/single_top1"] >= 0.5
    assert values["edit/background/gain"] > 5
    assert values["edit/black_and_white/attribute"] == 1.0
    assert found["passed"] == (answer.exit_code == 0)
