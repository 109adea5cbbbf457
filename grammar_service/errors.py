"""What the service refuses, and why. Knows nothing of gRPC: `server.status` translates.

ServiceError
├── Invalid            the caller can mend the request
├── NotFound           the named thing isn't held by this replica
├── Exhausted          a limit was reached
├── DeadlineExceeded   a compile ran past its time
├── Cancelled          nobody waits for the answer any more
├── Unavailable        the service is stopping
└── Internal           a compile child crashed
"""

from collections.abc import Sequence
from typing import NamedTuple


class Unenforced(NamedTuple):
    """A keyword of a schema that no mask enforces, by JSON pointer (RFC 6901)."""

    pointer: str
    keyword: str


class ServiceError(Exception):
    """Base of all refusals. `reason` is UPPER_SNAKE and stable; the message is for people."""

    def __init__(self, reason: str, message: str, unenforced: Sequence[Unenforced] = ()) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.unenforced = tuple(unenforced)


class Invalid(ServiceError):
    """The caller can mend the request."""


class NotFound(ServiceError):
    """The named thing isn't held by this replica."""


class Exhausted(ServiceError):
    """A limit was reached; the message names the setting."""


class DeadlineExceeded(ServiceError):
    """A compile ran past its time and was killed."""


class Cancelled(ServiceError):
    """Nobody waits for the answer any more."""


class Unavailable(ServiceError):
    """The service is stopping; another replica or a restart will answer."""


class Internal(ServiceError):
    """A compile child crashed."""
