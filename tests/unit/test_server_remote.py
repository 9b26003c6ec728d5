"""What is fetched on a caller's behalf, and above all what is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from portable_dit.server.refusal import ApiError
from portable_dit.server.remote import Fetcher

LOOPBACK = "127.0.0.0/8"
PICTURE = b"picture" * 1000


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/").replace("~", "/"))
            self.end_headers()
        elif self.path == "/picture":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PICTURE)
        else:
            self.send_error(404)

    def log_message(self, *arguments):
        """Quiet."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(url: str, *hosts: str, most_bytes: int = 1 << 20, addresses: tuple[str, ...] = ()) -> bytes:
    """The fetcher's answer; addresses: what every host name is said to be."""
    fetcher = Fetcher(hosts, lambda host, port: addresses or (host,))
    return fetcher.fetch(url, most_bytes=most_bytes, param="image")


def refusal(url: str, *hosts: str, **options) -> str:
    with pytest.raises(ApiError) as refused:
        fetch(url, *hosts, **options)
    assert refused.value.status_code == 400
    return refused.value.detail


def test_nothing_is_fetched_unless_the_list_says_so(port):
    assert "fetches no addresses" in refusal(f"http://127.0.0.1:{port}/picture")


def test_a_network_on_the_list_is_fetched_from(port):
    assert fetch(f"http://127.0.0.1:{port}/picture", LOOPBACK) == PICTURE


def test_a_host_that_is_not_on_the_list_is_refused():
    assert "not on this server's list" in refusal("http://evil.example/a.png", "good.example")
    assert "not on this server's list" in refusal("http://notgood.example/a.png", "*.good.example")
    assert "not on this server's list" in refusal("http://good.example.evil.example/", "good.example")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1",
     "fc00::1", "::ffff:127.0.0.1", "100.64.0.1", "224.0.0.1", "no address"],
)  # fmt: skip
def test_a_name_that_leads_to_a_private_address_is_refused(address):
    assert "private address" in refusal("http://good.example/a.png", "good.example", addresses=(address,))


def test_one_private_address_among_public_ones_is_enough_to_refuse():
    addresses = ("93.184.216.34", "127.0.0.1")
    assert "private address" in refusal("http://good.example/", "good.example", addresses=addresses)


def test_what_is_connected_to_is_the_address_that_was_judged(port):
    """The host's name leads nowhere; only the address that `resolve` gave can have answered."""
    url = f"http://picture.invalid:{port}/picture"
    assert fetch(url, "picture.invalid", LOOPBACK, addresses=("127.0.0.1",)) == PICTURE


def test_a_redirect_is_judged_like_the_first_address(port):
    here = f"http://127.0.0.1:{port}"
    assert fetch(f"{here}/to/~picture", LOOPBACK) == PICTURE
    assert "not on this server's list" in refusal(f"{here}/to/http:~~evil.example~a", LOOPBACK)
    assert "not on this server's list" in refusal(f"{here}/to/http:~~10.0.0.1~a", LOOPBACK)
    assert "only plain http" in refusal(f"{here}/to/file:~~~etc~passwd", LOOPBACK)


def test_redirects_come_to_an_end(port):
    assert "redirects" in refusal(f"http://127.0.0.1:{port}/to/~to~~to~~to~~to~~picture", LOOPBACK)


def test_a_body_that_is_too_large_is_not_read_to_its_end(port):
    assert "over 100 bytes" in refusal(f"http://127.0.0.1:{port}/picture", LOOPBACK, most_bytes=100)


def test_an_answer_that_is_no_picture_is_refused(port):
    assert "answered 404" in refusal(f"http://127.0.0.1:{port}/nowhere", LOOPBACK)


@pytest.mark.parametrize(
    "url", ["http://", "http://[::1", "http://a:b@127.0.0.1/", "http://127.0.0.1:99999/", "ftp://127.0.0.1/"]
)
def test_what_is_no_plain_address_is_refused(url):
    assert refusal(url, LOOPBACK).startswith("image: not fetched")


def test_a_server_that_does_not_answer_is_told_by_name_only(port):
    assert (
        refusal("http://127.0.0.1:1/", LOOPBACK)
        == "image: not fetched: 127.0.0.1 cannot be read (ConnectionRefusedError)."
    )
