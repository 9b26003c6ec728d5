"""References on their way in: data URLs, uploads and addresses become bytes, within the limits."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence

from portable_dit.errors import ImageError
from portable_dit.image import read_size
from portable_dit.server.refusal import ApiError
from portable_dit.server.remote import Fetcher
from portable_dit.server.settings import Limits

JPEG, START_OF_SCAN = b"\xff\xd8", b"\xff\xda"  # the latter stands in no coded data, by JPEG's rules
MOST_SCANS = 64  # progressive files have some 10, and their thumbnails as many
DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32}(?:;[a-z0-9=.-]{1,64})*;base64,", re.IGNORECASE)


def bytes_of(reference: str, fetcher: Fetcher, *, param: str, limits: Limits) -> bytes:
    """The file behind a data URL, or behind an address that may be fetched. Raises ApiError 400."""
    if reference.startswith(("http://", "https://")):
        return fetcher.fetch(reference, most_bytes=limits.body_bytes, param=param)
    found = DATA_URL.match(reference)
    if found is None:
        raise ApiError(
            400,
            f"{param}: neither a data URL of an image (data:image/png;base64,...) nor an address.",
            code="invalid_reference",
            param=param,
        )
    try:
        return base64.b64decode(reference[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(
            400, f"{param}: not base64 ({error}).", code="invalid_reference", param=param
        ) from error


def check_files(files: Sequence[bytes], limits: Limits, *, param: str) -> None:
    """Refuses references that would take too much memory or time to decode, before any is decoded.

    param: what the call names them. Raises ApiError 400.
    """
    total = 0
    for number, file in enumerate(files, 1):
        scans = file.count(START_OF_SCAN) if file.startswith(JPEG) else 0
        if scans > MOST_SCANS:
            raise ApiError(
                400,
                f"reference {number}: a JPEG of {scans:,} scans, each a pass over the whole picture; at most "
                f"{MOST_SCANS} are decoded. Save it again as a usual JPEG, or as PNG.",
                code="invalid_image",
                param=param,
            )
        try:
            width, height = read_size(file, name=f"reference {number}")
        except ImageError as error:
            raise ApiError(400, str(error), code="invalid_image", param=param) from error
        total += width * height
    if total > limits.reference_pixels:
        raise ApiError(
            400,
            f"references: {total:,} pixels together; this server takes at most {limits.reference_pixels:,}. "
            "Scale them down; models see far less.",
            code="invalid_image",
            param=param,
        )
