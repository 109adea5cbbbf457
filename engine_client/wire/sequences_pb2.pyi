from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_OK: _ClassVar[Outcome]
    OUTCOME_COMPLETE: _ClassVar[Outcome]
    OUTCOME_TERMINATED: _ClassVar[Outcome]
    OUTCOME_REJECTED: _ClassVar[Outcome]
    OUTCOME_HISTORY_GAP: _ClassVar[Outcome]
    OUTCOME_UNKNOWN_SEQUENCE: _ClassVar[Outcome]
    OUTCOME_UNKNOWN_GRAMMAR: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_OK: Outcome
OUTCOME_COMPLETE: Outcome
OUTCOME_TERMINATED: Outcome
OUTCOME_REJECTED: Outcome
OUTCOME_HISTORY_GAP: Outcome
OUTCOME_UNKNOWN_SEQUENCE: Outcome
OUTCOME_UNKNOWN_GRAMMAR: Outcome
OUTCOME_FAILED: Outcome

class Opening(_message.Message):
    __slots__ = ("grammar_id", "stop_token_ids", "constraint_start")
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_START_FIELD_NUMBER: _ClassVar[int]
    grammar_id: str
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    constraint_start: int
    def __init__(self, grammar_id: _Optional[str] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., constraint_start: _Optional[int] = ...) -> None: ...

class Binding(_message.Message):
    __slots__ = ("row", "sequence_id", "opening")
    ROW_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    row: int
    sequence_id: str
    opening: Opening
    def __init__(self, row: _Optional[int] = ..., sequence_id: _Optional[str] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("name", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("bindings", "releases", "rows", "positions", "token_counts", "tokens", "draft_counts", "drafts", "mask_rows", "region")
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    MASK_ROWS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    bindings: _containers.RepeatedCompositeFieldContainer[Binding]
    releases: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    draft_counts: _containers.RepeatedScalarFieldContainer[int]
    drafts: _containers.RepeatedScalarFieldContainer[int]
    mask_rows: _containers.RepeatedScalarFieldContainer[int]
    region: Region
    def __init__(self, bindings: _Optional[_Iterable[_Union[Binding, _Mapping]]] = ..., releases: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., draft_counts: _Optional[_Iterable[int]] = ..., drafts: _Optional[_Iterable[int]] = ..., mask_rows: _Optional[_Iterable[int]] = ..., region: _Optional[_Union[Region, _Mapping]] = ...) -> None: ...

class RowNote(_message.Message):
    __slots__ = ("index", "reason", "message", "rewound", "accepted", "ignored", "history_length")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REWOUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: str
    message: str
    rewound: int
    accepted: int
    ignored: int
    history_length: int
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., rewound: _Optional[int] = ..., accepted: _Optional[int] = ..., ignored: _Optional[int] = ..., history_length: _Optional[int] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("outcomes", "legal_drafts", "notes", "masks")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    LEGAL_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[Outcome]
    legal_drafts: _containers.RepeatedScalarFieldContainer[int]
    notes: _containers.RepeatedCompositeFieldContainer[RowNote]
    masks: bytes
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, str]]] = ..., legal_drafts: _Optional[_Iterable[int]] = ..., notes: _Optional[_Iterable[_Union[RowNote, _Mapping]]] = ..., masks: _Optional[bytes] = ...) -> None: ...

class StepStreamRequest(_message.Message):
    __slots__ = ("step", "request")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    step: int
    request: StepRequest
    def __init__(self, step: _Optional[int] = ..., request: _Optional[_Union[StepRequest, _Mapping]] = ...) -> None: ...

class StepError(_message.Message):
    __slots__ = ("code", "reason", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StepStreamResponse(_message.Message):
    __slots__ = ("step", "response", "error")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    step: int
    response: StepResponse
    error: StepError
    def __init__(self, step: _Optional[int] = ..., response: _Optional[_Union[StepResponse, _Mapping]] = ..., error: _Optional[_Union[StepError, _Mapping]] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("source_id", "target_id", "position")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    target_id: str
    position: int
    def __init__(self, source_id: _Optional[str] = ..., target_id: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class ForkSequencesRequest(_message.Message):
    __slots__ = ("forks",)
    FORKS_FIELD_NUMBER: _ClassVar[int]
    forks: _containers.RepeatedCompositeFieldContainer[Fork]
    def __init__(self, forks: _Optional[_Iterable[_Union[Fork, _Mapping]]] = ...) -> None: ...

class ForkSequencesResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, str]]] = ...) -> None: ...

class CloseSequencesRequest(_message.Message):
    __slots__ = ("sequence_ids",)
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequence_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseSequencesResponse(_message.Message):
    __slots__ = ("closed",)
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    closed: int
    def __init__(self, closed: _Optional[int] = ...) -> None: ...

class GetSequenceRequest(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    def __init__(self, sequence_id: _Optional[str] = ...) -> None: ...

class GetSequenceResponse(_message.Message):
    __slots__ = ("sequence_id", "opening", "tokens", "outcome", "message", "idle_seconds")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    opening: Opening
    tokens: _containers.RepeatedScalarFieldContainer[int]
    outcome: Outcome
    message: str
    idle_seconds: float
    def __init__(self, sequence_id: _Optional[str] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., message: _Optional[str] = ..., idle_seconds: _Optional[float] = ...) -> None: ...
