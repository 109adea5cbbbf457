"""What the client raises. Never from `submit` and `collect` for anything that the service does.

ClientError
├── UsageError          you misuse the client; mend the caller
└── ServiceError        the other side erred
    ├── Refused         the service said no, with a reason
    └── Unreachable     no answer in time
"""

from typing import NamedTuple


class Unenforced(NamedTuple):
    """A keyword of a schema that no mask enforces, by JSON pointer (RFC 6901)."""

    pointer: str
    keyword: str


class ClientError(Exception):
    """Base of everything that this package raises on purpose."""


class UsageError(ClientError):
    """The client is used in a way that can't work; the message says what to do."""


class ServiceError(ClientError):
    """The service erred, or isn't there."""


class Refused(ServiceError):
    """The service refused. `reason` is UPPER_SNAKE and stable, as `proto/` lists it.

    `unenforced` names the keywords of a schema that no mask would enforce (SPEC_UNENFORCED).
    """

    def __init__(self, reason: str, message: str, unenforced: tuple[Unenforced, ...] = ()) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.unenforced = unenforced


class Unreachable(ServiceError):
    """No answer in time: the service is gone, stopping, overloaded or frozen."""
