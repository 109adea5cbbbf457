from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrammarType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_TYPE_UNSPECIFIED: _ClassVar[GrammarType]
    GRAMMAR_TYPE_JSON_SCHEMA: _ClassVar[GrammarType]
    GRAMMAR_TYPE_JSON_OBJECT: _ClassVar[GrammarType]
    GRAMMAR_TYPE_REGEX: _ClassVar[GrammarType]
    GRAMMAR_TYPE_CHOICE: _ClassVar[GrammarType]
    GRAMMAR_TYPE_EBNF: _ClassVar[GrammarType]
    GRAMMAR_TYPE_STRUCTURAL_TAG: _ClassVar[GrammarType]
    GRAMMAR_TYPE_LARK: _ClassVar[GrammarType]

class Backend(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BACKEND_UNSPECIFIED: _ClassVar[Backend]
    BACKEND_XGRAMMAR: _ClassVar[Backend]
    BACKEND_LLGUIDANCE: _ClassVar[Backend]
    BACKEND_OUTLINES: _ClassVar[Backend]
GRAMMAR_TYPE_UNSPECIFIED: GrammarType
GRAMMAR_TYPE_JSON_SCHEMA: GrammarType
GRAMMAR_TYPE_JSON_OBJECT: GrammarType
GRAMMAR_TYPE_REGEX: GrammarType
GRAMMAR_TYPE_CHOICE: GrammarType
GRAMMAR_TYPE_EBNF: GrammarType
GRAMMAR_TYPE_STRUCTURAL_TAG: GrammarType
GRAMMAR_TYPE_LARK: GrammarType
BACKEND_UNSPECIFIED: Backend
BACKEND_XGRAMMAR: Backend
BACKEND_LLGUIDANCE: Backend
BACKEND_OUTLINES: Backend

class GrammarOptions(_message.Message):
    __slots__ = ("max_whitespace", "close_objects", "allow_unenforced", "fixed_key_order", "strict_formats", "item_separator", "key_separator")
    MAX_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_UNENFORCED_FIELD_NUMBER: _ClassVar[int]
    FIXED_KEY_ORDER_FIELD_NUMBER: _ClassVar[int]
    STRICT_FORMATS_FIELD_NUMBER: _ClassVar[int]
    ITEM_SEPARATOR_FIELD_NUMBER: _ClassVar[int]
    KEY_SEPARATOR_FIELD_NUMBER: _ClassVar[int]
    max_whitespace: int
    close_objects: bool
    allow_unenforced: bool
    fixed_key_order: bool
    strict_formats: bool
    item_separator: str
    key_separator: str
    def __init__(self, max_whitespace: _Optional[int] = ..., close_objects: bool = ..., allow_unenforced: bool = ..., fixed_key_order: bool = ..., strict_formats: bool = ..., item_separator: _Optional[str] = ..., key_separator: _Optional[str] = ...) -> None: ...

class GrammarSpec(_message.Message):
    __slots__ = ("type", "source", "choices", "options", "backend")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    type: GrammarType
    source: str
    choices: _containers.RepeatedScalarFieldContainer[str]
    options: GrammarOptions
    backend: Backend
    def __init__(self, type: _Optional[_Union[GrammarType, str]] = ..., source: _Optional[str] = ..., choices: _Optional[_Iterable[str]] = ..., options: _Optional[_Union[GrammarOptions, _Mapping]] = ..., backend: _Optional[_Union[Backend, str]] = ...) -> None: ...

class Unenforced(_message.Message):
    __slots__ = ("pointer", "keyword")
    POINTER_FIELD_NUMBER: _ClassVar[int]
    KEYWORD_FIELD_NUMBER: _ClassVar[int]
    pointer: str
    keyword: str
    def __init__(self, pointer: _Optional[str] = ..., keyword: _Optional[str] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("id", "tokenizer_id", "backend", "width", "stop_token_ids", "unenforced", "memory_bytes", "annotations", "compiled_source", "vocab_size")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_ID_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    UNENFORCED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ANNOTATIONS_FIELD_NUMBER: _ClassVar[int]
    COMPILED_SOURCE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    id: str
    tokenizer_id: str
    backend: Backend
    width: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    unenforced: _containers.RepeatedCompositeFieldContainer[Unenforced]
    memory_bytes: int
    annotations: _containers.RepeatedCompositeFieldContainer[Unenforced]
    compiled_source: str
    vocab_size: int
    def __init__(self, id: _Optional[str] = ..., tokenizer_id: _Optional[str] = ..., backend: _Optional[_Union[Backend, str]] = ..., width: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., unenforced: _Optional[_Iterable[_Union[Unenforced, _Mapping]]] = ..., memory_bytes: _Optional[int] = ..., annotations: _Optional[_Iterable[_Union[Unenforced, _Mapping]]] = ..., compiled_source: _Optional[str] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class CompileGrammarRequest(_message.Message):
    __slots__ = ("tokenizer_id", "spec")
    TOKENIZER_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    tokenizer_id: str
    spec: GrammarSpec
    def __init__(self, tokenizer_id: _Optional[str] = ..., spec: _Optional[_Union[GrammarSpec, _Mapping]] = ...) -> None: ...

class CompileGrammarResponse(_message.Message):
    __slots__ = ("grammar", "cached", "compile_ms")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    COMPILE_MS_FIELD_NUMBER: _ClassVar[int]
    grammar: Grammar
    cached: bool
    compile_ms: float
    def __init__(self, grammar: _Optional[_Union[Grammar, _Mapping]] = ..., cached: bool = ..., compile_ms: _Optional[float] = ...) -> None: ...

class GetGrammarRequest(_message.Message):
    __slots__ = ("grammar_id",)
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    grammar_id: str
    def __init__(self, grammar_id: _Optional[str] = ...) -> None: ...

class GetGrammarResponse(_message.Message):
    __slots__ = ("grammar", "spec")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    grammar: Grammar
    spec: GrammarSpec
    def __init__(self, grammar: _Optional[_Union[Grammar, _Mapping]] = ..., spec: _Optional[_Union[GrammarSpec, _Mapping]] = ...) -> None: ...
