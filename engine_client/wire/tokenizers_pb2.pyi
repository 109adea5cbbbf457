from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tokenizer(_message.Message):
    __slots__ = ("id", "vocab_size", "width", "stop_token_ids", "special_count", "empty_count")
    ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    EMPTY_COUNT_FIELD_NUMBER: _ClassVar[int]
    id: str
    vocab_size: int
    width: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    special_count: int
    empty_count: int
    def __init__(self, id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., width: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., special_count: _Optional[int] = ..., empty_count: _Optional[int] = ...) -> None: ...

class TokenizerHeader(_message.Message):
    __slots__ = ("vocab_size", "width", "stop_token_ids", "special_token_ids")
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    vocab_size: int
    width: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    special_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, vocab_size: _Optional[int] = ..., width: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., special_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenizerChunk(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RegisterTokenizerRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: TokenizerHeader
    chunk: TokenizerChunk
    def __init__(self, header: _Optional[_Union[TokenizerHeader, _Mapping]] = ..., chunk: _Optional[_Union[TokenizerChunk, _Mapping]] = ...) -> None: ...

class RegisterTokenizerResponse(_message.Message):
    __slots__ = ("tokenizer", "known")
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    tokenizer: Tokenizer
    known: bool
    def __init__(self, tokenizer: _Optional[_Union[Tokenizer, _Mapping]] = ..., known: bool = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("tokenizer_id",)
    TOKENIZER_ID_FIELD_NUMBER: _ClassVar[int]
    tokenizer_id: str
    def __init__(self, tokenizer_id: _Optional[str] = ...) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("tokenizer",)
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    tokenizer: Tokenizer
    def __init__(self, tokenizer: _Optional[_Union[Tokenizer, _Mapping]] = ...) -> None: ...

class ListTokenizersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTokenizersResponse(_message.Message):
    __slots__ = ("tokenizers",)
    TOKENIZERS_FIELD_NUMBER: _ClassVar[int]
    tokenizers: _containers.RepeatedCompositeFieldContainer[Tokenizer]
    def __init__(self, tokenizers: _Optional[_Iterable[_Union[Tokenizer, _Mapping]]] = ...) -> None: ...
