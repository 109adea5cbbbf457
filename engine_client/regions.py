"""Shared-memory regions: where the service writes masks and this process reads them, in place."""

import contextlib
import mmap
import os
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PARTS = 3
"""Steps whose masks live at the same time: two in flight, or one, and the last that is read."""
_ALIGNMENT = 64


class Region:
    """A file in the shared directory, in parts of equal size. Raises OSError if there is no room.

    The directory's group gets it, so that engine and service may run as different users. Its pages
    are taken at once: a full tmpfs is an error here, not a bus error at the first write.
    """

    def __init__(self, directory: Path, rows: int, words: int) -> None:
        import torch

        self._unlinked = False
        self.name = f"{uuid.uuid4().hex}.masks"
        self.rows = rows
        self.words = words
        self.part_bytes = -(-rows * words * 4 // _ALIGNMENT) * _ALIGNMENT
        self._path = directory / self.name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, -1, directory.stat().st_gid)
            os.fchmod(descriptor, 0o660)
            os.posix_fallocate(descriptor, 0, self.part_bytes * PARTS)
            mapping = mmap.mmap(descriptor, self.part_bytes * PARTS)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(descriptor)
        self._words = torch.frombuffer(mapping, dtype=torch.int32)
        weakref.finalize(self, _remove, self._path)

    def masks(self, part: int, rows: int) -> "torch.Tensor":
        """The first rows of a part: int32[rows, words], shared with the service."""
        start = part * self.part_bytes // 4
        return self._words[start : start + rows * self.words].view(rows, self.words)

    def unlink(self) -> None:
        """Removes the name. The memory stays until both sides let go of it. Harmless to repeat."""
        if self._unlinked:
            return
        self._unlinked = True
        _remove(self._path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
