"""References by address: fetched only from where the server was told to, and never from inside by accident.

An address given by a caller is a way to make this machine talk to others on the caller's behalf. So nothing
is fetched unless its host is on the list; the host's address is looked up once, judged, and then connected to
itself, so that a second look-up cannot give another one; private addresses need a network on the list; and
every redirect is judged like the first address.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from portable_dit.server.refusal import ApiError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
TIMEOUT_SECONDS = 10.0
CHUNK_BYTES = 64 * 1024


def look_up(host: str, port: int) -> list[str]:
    """The numeric addresses of a host."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@dataclass(frozen=True)
class Fetcher:
    """hosts: names, *.domain or networks that may be fetched from; empty = nothing is. resolve: for tests."""

    hosts: tuple[str, ...] = ()
    resolve: Callable[[str, int], Sequence[str]] = look_up

    def fetch(self, url: str, *, most_bytes: int, param: str) -> bytes:
        """The body behind an address. Raises ApiError 400."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for _ in range(MAX_REDIRECTS + 1):
            parts, address = self._judged(url, param)
            status, location, body = _get(parts, address, most_bytes, deadline, param)
            if status == 200:
                return body
            if location is None:
                raise _refused(param, f"{parts.hostname} answered {status}")
            url = urljoin(url, location)
        raise _refused(param, f"more than {MAX_REDIRECTS} redirects")

    def _judged(self, url: str, param: str) -> tuple[SplitResult, str]:
        """The parts of an address that may be fetched, and the numeric address to connect to."""
        if not self.hosts:
            raise _refused(param, "this server fetches no addresses. Send the image itself, as a data URL")
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise _refused(param, f"not an address ({error})") from error
        host = (parts.hostname or "").lower().rstrip(".")
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise _refused(param, "only plain http and https addresses are fetched")
        if not any(_names(entry, host) for entry in self.hosts) and not self._in_network(host):
            raise _refused(param, f"the host {host} is not on this server's list")
        try:
            addresses = self.resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise _refused(param, f"the host {host} has no address ({error})") from error
        for address in addresses:
            if not _is_public(address) and not self._in_network(address):
                raise _refused(param, f"the host {host} has a private address")
        if not addresses:
            raise _refused(param, f"the host {host} has no address")
        return parts, addresses[0]

    def _in_network(self, host: str) -> bool:
        address = _parsed(host)
        networks = [network for entry in self.hosts if (network := _network(entry)) is not None]
        return address is not None and any(address in network for network in networks)


def _get(
    parts: SplitResult, address: str, most_bytes: int, deadline: float, param: str
) -> tuple[int, str | None, bytes]:
    """(status, where a redirect leads, body) of one request to a numeric address."""
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.sock = socket.create_connection((address, port), timeout=TIMEOUT_SECONDS)
        if secure:
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(connection.sock, server_hostname=host)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "portable-dit"})
        with connection.getresponse() as response:
            if response.status in REDIRECTS:
                return response.status, response.getheader("Location"), b""
            if response.status != 200:
                return response.status, None, b""
            body = bytearray()
            while chunk := response.read1(CHUNK_BYTES):
                body += chunk
                if len(body) > most_bytes:
                    raise _refused(param, f"over {most_bytes:,} bytes")
                if time.monotonic() > deadline:
                    raise _refused(param, f"not here after {TIMEOUT_SECONDS:g} s")
            return 200, None, bytes(body)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _refused(param, f"{host} cannot be read ({type(error).__name__})") from error
    finally:
        connection.close()


def _names(entry: str, host: str) -> bool:
    entry = entry.lower()
    if entry.startswith("*."):
        return host.endswith(entry[1:])
    return host == entry


def _network(entry: str) -> Network | None:
    try:
        return ipaddress.ip_network(entry)
    except ValueError:
        return None


def _parsed(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_public(host: str) -> bool:
    address = _parsed(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and address.is_global and not address.is_multicast


def _refused(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param}: not fetched: {reason}.", code="reference_not_fetched", param=param)
