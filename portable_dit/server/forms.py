"""The form of an edit: its fields and files, or one refusal that tells all that is wrong with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from portable_dit.server.refusal import ApiError
from portable_dit.server.schema import Edit
from portable_dit.server.wording import MOST_NAMED, problems_of, refused

MAX_FIELDS = 64
FORM = "multipart/form-data"
IMAGES = ("image", "image[]")
FILE_NEEDED = "a file is needed, not text. Send one as `curl -F image=@cat.png` does."


@asynccontextmanager
async def read_form(http: Request, references: int) -> AsyncIterator[FormData]:
    """A form with its files, of which some may be too many. Raises ApiError."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip()
    if kind.lower() != FORM:
        given = kind[:MOST_NAMED] or "nothing"
        raise ApiError(400, f"Content-Type={given}: this call takes a form with files. Say {FORM}.")
    try:
        async with http.form(max_files=references + 2, max_fields=MAX_FIELDS) as form:
            yield form
    except ApiError:
        raise
    except HTTPException as error:
        rules = f"at most {references} pictures and {MAX_FIELDS} fields, each text below 1 MiB"
        raise ApiError(400, f"The form cannot be read: {error.detail} It may hold {rules}.") from error


def edit_of(form: FormData) -> tuple[Edit, list[UploadFile]]:
    """The fields of a form, and its references in the order they were sent. Raises ApiError."""
    fields: dict[str, str] = {}
    files: list[UploadFile] = []
    problems: dict[str, str] = {}
    for name, value in form.multi_items():
        if name in IMAGES and isinstance(value, UploadFile):
            files.append(value)
        elif name in IMAGES:
            problems[name] = f"{name}: {FILE_NEEDED}"
        elif isinstance(value, UploadFile):
            problems[name[:MOST_NAMED]] = _not_a_file(name)
        elif name in fields:
            problems[name[:MOST_NAMED]] = f"{name[:MOST_NAMED]}: given twice. Say it once."
        else:
            fields[name] = value
    body = None
    try:
        body = Edit.model_validate_strings(fields, strict=False)
    except ValidationError as error:
        problems = problems_of(error.errors(), Edit) | problems
    if not files and "image" not in problems:
        problems["image"] = "image: missing. Send at least one file as image or image[]."
    if body is None or problems:
        raise refused(problems)
    return body, files


def _not_a_file(name: str) -> str:
    if name == "mask":
        return "mask: these models take none. Describe the change instead."
    if name in Edit.model_fields:
        return f"{name}: text is needed, not a file. Send it without a file's name."
    return f"{name[:MOST_NAMED]}: not a file that is taken; image and image[] are."
