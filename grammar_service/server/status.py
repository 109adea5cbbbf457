"""Refusals as gRPC statuses: a code, and google.rpc.ErrorInfo with the reason."""

from typing import NoReturn

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from grammar_service.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    Internal,
    Invalid,
    NotFound,
    ServiceError,
    Unavailable,
)

DOMAIN = "grammar.v1"
_MAX_VIOLATIONS_BYTES = 2500
_MAX_POINTER = 500
_MAX_MESSAGE = 1000
"""Details travel in trailing metadata, of which gRPC takes 8 kB in all, coded; the message counts
what isn't listed."""

_CODES: dict[type[ServiceError], int] = {
    Invalid: Code.INVALID_ARGUMENT,
    NotFound: Code.NOT_FOUND,
    Exhausted: Code.RESOURCE_EXHAUSTED,
    DeadlineExceeded: Code.DEADLINE_EXCEEDED,
    Cancelled: Code.CANCELLED,
    Unavailable: Code.UNAVAILABLE,
    Internal: Code.INTERNAL,
}


def code_of(error: ServiceError) -> int:
    """The google.rpc.Code of a refusal."""
    return _CODES[type(error)]


def abort(context: grpc.ServicerContext, error: ServiceError) -> NoReturn:
    """Ends the call with the refusal."""
    details = [Any()]
    details[0].Pack(ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.unenforced:
        violations, size = [], 0
        for item in error.unenforced:
            pointer, keyword = item.pointer[:_MAX_POINTER], item.keyword[:100]
            size += len(pointer.encode()) + len(keyword.encode()) + 8
            if size > _MAX_VIOLATIONS_BYTES:
                break
            violations.append(BadRequest.FieldViolation(field=pointer, description=keyword))
        details.append(Any())
        details[-1].Pack(BadRequest(field_violations=violations))
    status = Status(code=code_of(error), message=error.message[:_MAX_MESSAGE], details=details)
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")
