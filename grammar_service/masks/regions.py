"""Shared-memory regions: files that a caller made in a directory that both sides mount.

A stream maps the regions that it names and lets go of them when it ends. A name is never used
twice, so a mapping never goes stale; the caller may unlink the file once a step was answered.
"""

import mmap
import os
import re
import stat
from collections import OrderedDict
from pathlib import Path

import torch

from grammar_service.errors import Invalid, NotFound

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_ALIGNMENT = 64
_KEPT = 4
"""Mappings a stream keeps: a caller replaces its region when it needs more rows."""


class Regions:
    """The regions of one stream. Not thread-safe; a stream is served by one thread."""

    def __init__(self, directory: Path | None, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._mapped: OrderedDict[str, tuple[int, torch.Tensor]] = OrderedDict()

    def rows(self, name: str, offset: int, count: int, words: int) -> torch.Tensor:
        """The part of a region that a step fills: int32[count, words], written in place.

        Raises Invalid (REGION_INVALID, REGION_TOO_SMALL) or NotFound (REGION_NOT_FOUND).
        """
        if offset % _ALIGNMENT:
            raise Invalid("REGION_INVALID", f"region offset {offset} is no multiple of 64 bytes")
        if name not in self._mapped:
            self._mapped[name] = self._map(name)
            if len(self._mapped) > _KEPT:
                os.close(self._mapped.popitem(last=False)[1][0])
        self._mapped.move_to_end(name)
        descriptor, tensor = self._mapped[name]
        need = offset + count * words * 4
        # Asked each time: writing past a file that was cut short would be a bus error.
        size = min(os.fstat(descriptor).st_size, tensor.numel() * 4)
        if need > size:
            raise Invalid(
                "REGION_TOO_SMALL",
                f"region {name!r} has {size} bytes, this step needs {need} "
                f"({count} mask rows of {words * 4} bytes at {offset})",
            )
        return tensor[offset // 4 : need // 4].view(count, words)

    def close(self) -> None:
        """Lets go of all mappings."""
        for descriptor, _ in self._mapped.values():
            os.close(descriptor)
        self._mapped.clear()

    def _map(self, name: str) -> tuple[int, torch.Tensor]:
        if self._directory is None:
            raise NotFound("REGION_NOT_FOUND", "this service has no region directory (region_dir)")
        if not _NAME.fullmatch(name):
            raise Invalid(
                "REGION_INVALID",
                f"region name {name[:140]!r}: 1 to 128 of A-Z a-z 0-9 . _ -, not starting with .",
            )
        descriptor = self._open(name, self._directory)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise Invalid("REGION_INVALID", f"region {name!r} is a link or no regular file")
            if not 0 < status.st_size <= self._max_bytes:
                raise Invalid(
                    "REGION_TOO_SMALL" if status.st_size == 0 else "REGION_INVALID",
                    f"region {name!r} has {status.st_size} bytes; allowed are 1 to "
                    f"{self._max_bytes} (max_region_bytes)",
                )
            mapping = mmap.mmap(descriptor, status.st_size)
            whole = status.st_size // 4 * 4
            if whole == 0:
                raise Invalid("REGION_TOO_SMALL", f"region {name!r} holds no mask word")
            return descriptor, torch.frombuffer(mapping, dtype=torch.int32, count=whole // 4)
        except BaseException:
            os.close(descriptor)
            raise

    @staticmethod
    def _open(name: str, directory: Path) -> int:
        try:
            # O_NONBLOCK: a FIFO under that name must not hold the thread.
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            return os.open(directory / name, flags)
        except FileNotFoundError:
            raise NotFound(
                "REGION_NOT_FOUND",
                f"no region {name!r} in the service's region_dir; do both mount the same one?",
            ) from None
        except OSError as error:
            raise Invalid(
                "REGION_INVALID", f"region {name!r} can't be opened: {error.strerror}"
            ) from None
