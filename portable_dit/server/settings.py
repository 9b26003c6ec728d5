"""What `portable-dit serve` can be told, with the defaults that a machine of one's own wants."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from portable_dit.errors import UserError

MIB = 2**20
KEYS_VARIABLE = "PORTABLE_DIT_API_KEYS"


@dataclass(frozen=True)
class Limits:
    """What one request and the queue as a whole may ask for; beyond it a request is refused at once.

    body_bytes, body_seconds: of a request's body, and how long it may take to arrive. header_seconds: how
    long a connection may take to say what it wants. read_seconds: how long a caller may take to read 16 KiB
    of its answer. images: of one request. pixels: of one picture, None =
    what the model draws. reference_pixels: of all references of a request together, as they are stored.
    queue: requests that wait; of one client, half of them while others wait too. queue_pixels: pixels that
    all waiting requests will draw. deadline_seconds: from acceptance to the answer.
    """

    body_bytes: int = 96 * MIB
    body_seconds: float = 60.0
    header_seconds: float = 5.0
    read_seconds: float = 30.0
    connections: int = 512
    images: int = 10
    pixels: int | None = None
    reference_pixels: int = 96 * MIB
    queue: int = 64
    queue_pixels: int = 1024 * MIB
    deadline_seconds: float = 900.0


@dataclass(frozen=True)
class Settings:
    """One server. keys: API keys, none = everybody may draw; never in a log or an answer.

    jobs: the SQLite file of jobs and pictures. keep_seconds, keep_bytes: how long, and how much of, finished
    pictures are kept. image_hosts: where references may be fetched from: host names, *.domain, or networks
    such as 10.0.0.0/8, without which private addresses are refused. allowed_hosts: further names that this
    server is called by. profile: file of a Chrome trace of every request's stages.
    """

    host: str = "127.0.0.1"
    port: int = 8091
    jobs: Path = Path("jobs.sqlite3")
    model_name: str | None = None
    keys: frozenset[str] = field(default=frozenset(), repr=False)
    limits: Limits = Limits()
    keep_seconds: float = 24 * 3600.0
    keep_bytes: int = 4096 * MIB
    image_hosts: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    stall_seconds: float = 900.0
    strict: bool = False
    profile: Path | None = None

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)


def check_host(name: str, flag: str) -> str:
    """A host's name, *.domain, address or network, in small letters. Raises UserError for anything else."""
    if _is_network(name) and (flag == "--allow-image-host" or "/" not in name):
        return name.lower()
    if HOST.fullmatch(name) is None or (name.startswith("*.") and flag == "--allowed-host"):
        more = "" if flag == "--allowed-host" else ", *.example.com or a network such as 10.0.0.0/8"
        raise UserError(f"{flag} {name}: not a host. Say its name alone, as in pictures.example.com{more}.")
    return name.lower()


def _is_network(name: str) -> bool:
    try:
        ipaddress.ip_network(name)
    except ValueError:
        return False
    return True


def check_origin(site: str) -> str:
    """An origin as browsers say it. Raises UserError for anything else."""
    try:
        parts = urlsplit(site)
        whole = (
            parts.scheme in ("http", "https") and parts.netloc and site == f"{parts.scheme}://{parts.netloc}"
        )
    except ValueError:
        whole = False
    if not whole:
        raise UserError(
            f"--cors-origin {site}: not an origin. Say scheme and host, as in https://example.com."
        )
    return site.lower()


def read_keys(file: Path | None, environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """API keys of a file, one a line, and of PORTABLE_DIT_API_KEYS, with commas between. Raises UserError."""
    lines = environment.get(KEYS_VARIABLE, "").split(",")
    if file is not None:
        try:
            lines += file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise UserError(f"--api-key-file {file}: cannot be read ({error}). Name a text file.") from error
    keys = {line.strip() for line in lines if line.strip() and not line.strip().startswith("#")}
    if file is not None and not keys:
        raise UserError(f"--api-key-file {file}: holds no key. Put one on each line.")
    short = sum(len(key) < 16 for key in keys)
    if short:
        raise UserError(
            f"API keys: {short} are shorter than 16 characters, which can be guessed. Try longer ones."
        )
    return frozenset(keys)


def default_jobs_file(port: int, environment: Mapping[str, str] = os.environ) -> Path:
    """Where jobs are kept unless --jobs says otherwise: the user's state folder, one file for each port."""
    home = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "portable-dit" / f"jobs-{port}.sqlite3"
