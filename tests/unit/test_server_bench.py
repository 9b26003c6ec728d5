"""The figures of a server's bench, its price file and its plot."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ElementTree
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from portable_dit import host
from portable_dit.errors import UserError
from portable_dit.server.bench import Point, Prices, ServerReport, make_point, percentile, read_prices
from portable_dit.server.plot import plot, ticks_to

ROOT = Path(__file__).parents[2]


def published(share: float) -> Point:
    """6,115 pictures in an hour on four devices."""
    prices = Prices(device_hour=0, picture=0.06879, billable_share=share)
    return make_point(8, [1.0] * 6115, 0, 3600.0, 4, None, prices)


def test_revenue_is_what_was_published_for_the_same_throughput():
    assert published(1.0).revenue_per_device_hour == pytest.approx(105.16, abs=0.005)
    assert published(0.75).revenue_per_device_hour == pytest.approx(78.87, abs=0.005)
    assert published(1.0).pictures_per_device_day * 4 == pytest.approx(146_760)


def test_cost_is_the_devices_share_and_the_energy():
    prices = Prices(device_hour=3.0, kwh=0.36)
    point = make_point(1, [2.0] * 10, 0, 20.0, 2, joules=10 * 1000.0, prices=prices)
    assert point.pictures_per_hour == 1800
    assert point.joules_per_picture == 1000
    assert point.cost_per_picture == pytest.approx(3.0 * 2 / 1800 + 1000 / 3.6e6 * 0.36)


def test_what_is_not_known_stays_unknown():
    point = make_point(1, [1.0], 2, 1.0, 1, None, None)
    assert (point.joules_per_picture, point.cost_per_picture, point.revenue_per_device_hour) == (None,) * 3
    assert point.failures == 2
    nothing = make_point(1, [], 3, 1.0, 1, 5.0, Prices(device_hour=1))
    assert nothing.cost_per_picture is None
    assert nothing.p50 is None


def test_percentiles_lie_between_neighbours():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 95) == pytest.approx(1.95)
    assert percentile([7.0], 99) == 7.0


def test_the_example_of_prices_is_read_and_mistakes_are_told(tmp_path):
    assert read_prices(ROOT / "docs" / "prices" / "example.yaml").billable_share == 0.75
    path = tmp_path / "prices.yaml"
    for text, word in (
        ("device_hours: 1\n", "device_hours: unknown key. Did you mean 'device_hour'"),
        ("device_hour: -1\n", "device_hour: -1 must be at least 0"),
        ("a: [", "line"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=word):
            read_prices(path)


@pytest.mark.parametrize("most", [0.0, 0.003, 0.9, 1.0, 7.3, 99.0, 123_456.0])
def test_ticks_are_round_and_reach_the_top(most):
    ticks = ticks_to(most)
    assert ticks[0] == 0
    assert ticks[-1] >= most
    assert 2 <= len(ticks) <= 9


def test_a_plot_is_whole_svg_with_a_line_for_each_series():
    points = tuple(make_point(n, [n * 0.5] * 4, 0, 2.0, 1, None, None) for n in (1, 2, 4))
    report = ServerReport("http://a", "h3-mini <&>", "any", 1, "512x512", points, None, ())
    root = ElementTree.fromstring(plot(report))
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 4
    assert all(len(line.attrib["points"].split()) == 3 for line in lines)
    assert "h3-mini <&>" in "".join(root.itertext())


def test_a_plot_of_nothing_drawn_is_still_a_plot():
    report = ServerReport("http://a", "m", "d", 1, "s", (make_point(1, [], 1, 1.0, 1, None, None),), None, ())
    assert ElementTree.fromstring(plot(report)).tag.endswith("svg")


def test_energy_is_read_from_the_packages_alone(tmp_path):
    assert host.energy_joules(tmp_path) is None
    for name, kind, used in (
        ("p:0", "package-0", 5_000_000),
        ("p:1", "package-1", 1_500_000),
        ("p:0:0", "core", 9),
    ):
        zone = tmp_path / "sys/class/powercap" / name
        zone.mkdir(parents=True)
        (zone / "name").write_text(f"{kind}\n")
        (zone / "energy_uj").write_text(f"{used}\n")
    assert host.energy_joules(tmp_path) == 6.5


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--concurrency", "1,2"], "--server"),
        (["--prices", "p.yaml"], "--server"),
        (["--server", "http://127.0.0.1:1", "--recipe", "other"], "recipe of its own"),
        (["--server", "http://127.0.0.1:1", "--enforce-eager"], "recipe of its own"),
        (["--server", "127.0.0.1:1"], "not the address"),
        (["--server", "http://127.0.0.1:1", "--concurrency", "0"], "whole numbers"),
        (["--server", "http://127.0.0.1:1", "--prompts", "missing.txt"], "cannot be read"),
        (["--server", "http://127.0.0.1:1", "--image", "missing.png"], "--image missing.png: cannot be read"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(cli, flags, word):
    answer = cli("bench", *flags)
    assert answer.exit_code == 2
    assert word in answer.stderr


def test_a_server_that_is_not_there_is_told(cli):
    answer = cli("bench", "--server", "http://127.0.0.1:1")
    assert answer.exit_code == 1
    assert "does not answer" in answer.stderr


@pytest.mark.parametrize(
    "answer", ["{}", "[]", "null", "7", '{"workers": []}', '{"model": "m", "workers": [3]}']
)
def test_a_server_of_another_kind_is_told(cli, answer):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *arguments):
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever).start()
        done = cli("bench", "--server", f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
    assert done.exit_code == 1
    assert "is no server of portable-dit" in done.stderr
    assert done.stdout == ""
