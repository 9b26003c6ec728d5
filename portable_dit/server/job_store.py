"""Jobs and pictures in one SQLite file, so that a restart loses neither.

A job that was running when the server ended is interrupted, one that waited waits again, and a finished one
gives its pictures until they expire. One server at a time: a second one on the same file is refused.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from portable_dit.errors import UserError
from portable_dit.server.messages import PictureFile

Result = TypeVar("Result")
TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, client TEXT NOT NULL, created REAL NOT NULL, status TEXT NOT NULL,
    wish TEXT NOT NULL, references_ TEXT NOT NULL, error TEXT, facts TEXT, finished REAL
);
CREATE TABLE IF NOT EXISTS pictures (
    owner TEXT NOT NULL, number INTEGER NOT NULL, format TEXT NOT NULL, width INTEGER NOT NULL,
    height INTEGER NOT NULL, seed INTEGER NOT NULL, bytes INTEGER NOT NULL, created REAL NOT NULL,
    data BLOB NOT NULL, PRIMARY KEY (owner, number)
);
CREATE INDEX IF NOT EXISTS jobs_by_client ON jobs (client, created);
"""
FORGOTTEN = "(SELECT json_group_array(NULL) FROM json_each(references_))"  # as many, without what they were
INTERRUPTED = {
    "message": "The server ended while this was being drawn. Submit it again.",
    "type": "server_error",
    "param": None,
    "code": "interrupted",
}


@dataclass(frozen=True)
class StoredPicture:
    """A picture without its bytes."""

    number: int
    format: str
    width: int
    height: int
    seed: int


@dataclass(frozen=True)
class StoredJob:
    """A job as it was last written. wish: the body without its references. references: how many it has."""

    id: str
    client: str
    created: float
    status: str
    wish: dict[str, Any]
    references: int
    error: dict[str, Any] | None
    facts: dict[str, Any] | None
    finished: float | None
    pictures: tuple[StoredPicture, ...]


class JobStore:
    """The file. Every method runs on a thread of its own, one at a time, and is awaited."""

    def __init__(self, path: Path, *, keep_seconds: float, keep_bytes: int) -> None:
        self.path = path
        self.keep_seconds = keep_seconds
        self.keep_bytes = keep_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = f"{os.path.realpath(path)}.lock"  # two names of one file have one lock
            self._lock = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # prompts are nobody else's business
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute("PRAGMA secure_delete = OFF")
            self._database.execute("PRAGMA auto_vacuum = INCREMENTAL")
            self._database.executescript(TABLES)
        except BlockingIOError as error:
            raise UserError(
                f"--jobs {path}: another server keeps its jobs there. Name another file."
            ) from error
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"--jobs {path}: cannot be used ({error}). Name a file that can be written."
            ) from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs")

    async def restart(self) -> list[StoredJob]:
        """Marks what was running as interrupted, and gives what waited, oldest first."""

        def work() -> list[StoredJob]:
            self._database.execute(
                f"UPDATE jobs SET status = 'interrupted', error = ?, finished = ?, references_ = {FORGOTTEN} "
                "WHERE status = 'running'",
                (json.dumps(INTERRUPTED), time.time()),
            )
            rows = self._database.execute("SELECT id FROM jobs WHERE status = 'queued' ORDER BY created")
            return [job for (id,) in rows.fetchall() if (job := self._find(id)) is not None]

        return await self._run(work)

    async def add(self, id: str, client: str, wish: dict[str, Any], references: Sequence[str]) -> None:
        values = (id, client, time.time(), "queued", json.dumps(wish), json.dumps(list(references)))
        await self._execute(
            "INSERT INTO jobs (id, client, created, status, wish, references_) VALUES (?, ?, ?, ?, ?, ?)",
            values,
        )

    async def running(self, id: str) -> None:
        await self._execute("UPDATE jobs SET status = 'running' WHERE id = ?", (id,))

    async def ended(
        self,
        id: str,
        status: str,
        *,
        files: Sequence[PictureFile] = (),
        error: dict[str, Any] | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """The end of a job and its pictures, in one transaction; its references are not needed any more."""

        def work() -> None:
            with self._database:
                self._database.execute("BEGIN")
                self._insert(id, files)
                self._database.execute(
                    "UPDATE jobs SET status = ?, error = ?, facts = ?, finished = ?, "
                    f"references_ = {FORGOTTEN} WHERE id = ?",
                    (status, _text(error), _text(facts), time.time(), id),
                )

        await self._run(work)

    async def keep(self, owner: str, files: Sequence[PictureFile]) -> None:
        """Pictures of a request that is no job, for answers that hold addresses."""

        def work() -> None:
            with self._database:
                self._database.execute("BEGIN")
                self._insert(owner, files)

        await self._run(work)

    async def find(self, id: str) -> StoredJob | None:
        return await self._run(lambda: self._find(id))

    async def references(self, id: str) -> list[str]:
        """The references of a job that has not ended, as they were sent."""

        def work() -> list[str]:
            row = self._database.execute("SELECT references_ FROM jobs WHERE id = ?", (id,)).fetchone()
            return [] if row is None else list(json.loads(row[0]))

        return await self._run(work)

    async def latest(self, client: str, most: int) -> list[StoredJob]:
        """A client's jobs, the newest first."""

        def work() -> list[StoredJob]:
            rows = self._database.execute(
                "SELECT id FROM jobs WHERE client = ? ORDER BY created DESC, rowid DESC LIMIT ?",
                (client, most),
            )
            return [job for (id,) in rows.fetchall() if (job := self._find(id)) is not None]

        return await self._run(work)

    async def picture(self, owner: str, number: int) -> tuple[str, bytes] | None:
        """(format, bytes) of a picture that has not expired."""

        def work() -> tuple[str, bytes] | None:
            found: tuple[str, bytes] | None = self._database.execute(
                "SELECT format, data FROM pictures WHERE owner = ? AND number = ? AND created > ?",
                (owner, number, time.time() - self.keep_seconds),
            ).fetchone()
            return found

        return await self._run(work)

    async def remove(self, id: str) -> None:
        """Forgets a job and its pictures."""

        def work() -> None:
            with self._database:
                self._database.execute("BEGIN")
                self._database.execute("DELETE FROM pictures WHERE owner = ?", (id,))
                self._database.execute("DELETE FROM jobs WHERE id = ?", (id,))

        await self._run(work)

    async def expire(self) -> None:
        """Drops pictures and ended jobs that are too old, and the oldest pictures beyond keep_bytes."""

        def work() -> None:
            oldest = time.time() - self.keep_seconds
            with self._database:
                self._database.execute("BEGIN")
                self._database.execute("DELETE FROM pictures WHERE created <= ?", (oldest,))
                self._database.execute("DELETE FROM jobs WHERE finished <= ?", (oldest,))
                self._database.execute(
                    "DELETE FROM pictures WHERE rowid IN (SELECT rowid FROM (SELECT rowid, SUM(bytes) OVER "
                    "(ORDER BY created DESC, rowid DESC) AS kept FROM pictures) WHERE kept > ?)",
                    (self.keep_bytes,),
                )
            self._database.execute("PRAGMA incremental_vacuum")

        await self._run(work)

    async def close(self) -> None:
        await self._run(self._database.close)
        self._thread.shutdown()
        os.close(self._lock)

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _execute(self, statement: str, values: tuple[Any, ...]) -> None:
        await self._run(lambda: self._database.execute(statement, values))

    def _insert(self, owner: str, files: Sequence[PictureFile]) -> None:
        now = time.time()
        self._database.executemany(
            "INSERT OR REPLACE INTO pictures VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    owner,
                    number,
                    file.format,
                    file.width,
                    file.height,
                    file.seed,
                    len(file.data),
                    now,
                    file.data,
                )
                for number, file in enumerate(files)
            ],
        )

    def _find(self, id: str) -> StoredJob | None:
        row = self._database.execute(
            "SELECT id, client, created, status, wish, json_array_length(references_), error, facts, "
            "finished FROM jobs WHERE id = ?",
            (id,),
        ).fetchone()
        if row is None:
            return None
        pictures = self._database.execute(
            "SELECT number, format, width, height, seed FROM pictures WHERE owner = ? AND created > ? "
            "ORDER BY number",
            (id, time.time() - self.keep_seconds),
        )
        id, client, created, status, wish, references, error, facts, finished = row
        return StoredJob(
            id=id,
            client=client,
            created=created,
            status=status,
            wish=json.loads(wish),
            references=references,
            error=None if error is None else json.loads(error),
            facts=None if facts is None else json.loads(facts),
            finished=finished,
            pictures=tuple(StoredPicture(*picture) for picture in pictures),
        )


def _text(value: dict[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(value)
