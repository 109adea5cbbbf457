"""Shared-memory regions: files that a caller made in a directory that both sides mount.

Masks are written to them, never through a mapping of ours: a caller may cut its file short at any
moment, and a mapping's write past the end would end the process. The write costs 250 us for 256
rows of a 129k vocabulary, 170 us more than copying memory. A name is never used twice.
"""

import os
import re
import stat
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from grammar_service.errors import Invalid, NotFound

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_ALIGNMENT = 64
_KEPT = 4
"""Files a stream keeps open: a caller replaces its region when it needs more rows."""


class Regions:
    """The regions of one stream. Not thread-safe; a stream is served by one thread."""

    def __init__(self, directory: Path | None, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._open: OrderedDict[str, int] = OrderedDict()

    def check(self, name: str, offset: int, size: int) -> None:
        """Whether a step may write so many bytes there.

        Raises Invalid (REGION_INVALID, REGION_TOO_SMALL) or NotFound (REGION_NOT_FOUND).
        """
        if offset % _ALIGNMENT:
            raise Invalid("REGION_INVALID", f"region offset {offset} is no multiple of 64 bytes")
        held = os.fstat(self._descriptor(name)).st_size
        if held > self._max_bytes:
            raise Invalid(
                "REGION_INVALID",
                f"region {name!r} has {held} bytes; at most {self._max_bytes} (max_region_bytes)",
            )
        if offset + size > held:
            raise Invalid(
                "REGION_TOO_SMALL",
                f"region {name!r} has {held} bytes; this step needs {size} at {offset}",
            )

    def write(self, name: str, offset: int, rows: npt.NDArray[np.int32]) -> None:
        """Writes contiguous mask rows. Raises Invalid with REGION_TOO_SMALL for a full disk."""
        data = memoryview(rows.data).cast("B")
        while data:
            try:
                written = os.pwrite(self._descriptor(name), data, offset)
            except OSError as error:
                reason = f"region {name!r} can't be written: {error.strerror}"
                raise Invalid("REGION_TOO_SMALL", reason) from None
            data, offset = data[written:], offset + written

    def close(self) -> None:
        """Lets go of all files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = self._opened(name)
            if len(self._open) > _KEPT:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(name)
        return self._open[name]

    def _opened(self, name: str) -> int:
        if self._directory is None:
            raise NotFound("REGION_NOT_FOUND", "this service has no region directory (region_dir)")
        if not _NAME.fullmatch(name):
            raise Invalid(
                "REGION_INVALID",
                f"region name {name[:140]!r}: 1 to 128 of A-Z a-z 0-9 . _ -, not starting with .",
            )
        try:
            # O_NONBLOCK: a FIFO under that name must not hold the thread.
            flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(self._directory / name, flags)
        except FileNotFoundError:
            raise NotFound(
                "REGION_NOT_FOUND",
                f"no region {name!r} in the service's region_dir; do both mount the same one?",
            ) from None
        except OSError as error:
            raise Invalid(
                "REGION_INVALID", f"region {name!r} can't be opened: {error.strerror}"
            ) from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(descriptor)
            raise Invalid("REGION_INVALID", f"region {name!r} is a link or no regular file")
        return descriptor
