"""TokenizerService and GrammarService: uploads, compiles, and what is held."""

import threading
from collections.abc import Iterable, Iterator

import grpc

from engine_client.spec import GrammarSpec
from engine_client.translate import BACKENDS, spec_from_wire, spec_to_wire
from engine_client.vocabulary import Vocabulary
from engine_client.wire import grammars_pb2, tokenizers_pb2
from engine_client.wire.grammars_pb2_grpc import GrammarServiceServicer
from engine_client.wire.tokenizers_pb2_grpc import TokenizerServiceServicer
from grammar_service.errors import Exhausted, Invalid, ServiceError, Unenforced
from grammar_service.grammars.catalog import Catalog, Grammar
from grammar_service.grammars.spec import canonical
from grammar_service.grammars.tokenizers import Tokenizers
from grammar_service.server.status import abort
from grammar_service.settings import ServiceSettings

_MAX_VOCABULARY = 1 << 22


class TokenizerService(TokenizerServiceServicer):
    """Takes in vocabularies."""

    def __init__(self, tokenizers: Tokenizers, catalog: Catalog, settings: ServiceSettings) -> None:
        self._tokenizers = tokenizers
        self._catalog = catalog
        self._settings = settings

    def RegisterTokenizer(
        self,
        request_iterator: Iterator[tokenizers_pb2.RegisterTokenizerRequest],
        context: grpc.ServicerContext,
    ) -> tokenizers_pb2.RegisterTokenizerResponse:
        """Takes in one vocabulary."""
        try:
            vocabulary = self._read(request_iterator)
            known = self._tokenizers.add(vocabulary)
            if not known:
                self._catalog.prepare(vocabulary)
        except ServiceError as error:
            abort(context, error)
        return tokenizers_pb2.RegisterTokenizerResponse(
            tokenizer=_tokenizer(vocabulary), known=known
        )

    def GetTokenizer(
        self, request: tokenizers_pb2.GetTokenizerRequest, context: grpc.ServicerContext
    ) -> tokenizers_pb2.GetTokenizerResponse:
        """Shows a tokenizer."""
        try:
            vocabulary = self._tokenizers.get(request.tokenizer_id)
        except ServiceError as error:
            abort(context, error)
        return tokenizers_pb2.GetTokenizerResponse(tokenizer=_tokenizer(vocabulary))

    def ListTokenizers(
        self, request: tokenizers_pb2.ListTokenizersRequest, context: grpc.ServicerContext
    ) -> tokenizers_pb2.ListTokenizersResponse:
        """Lists all tokenizers."""
        tokenizers = [_tokenizer(vocabulary) for vocabulary in self._tokenizers.all()]
        return tokenizers_pb2.ListTokenizersResponse(tokenizers=tokenizers)

    def _read(self, requests: Iterator[tokenizers_pb2.RegisterTokenizerRequest]) -> Vocabulary:
        first = next(requests, None)
        if first is None or not first.HasField("header"):
            raise Invalid("TOKENIZER_INVALID", "an upload begins with its header")
        header = first.header
        if header.vocab_size == 0:
            raise Invalid("TOKENIZER_INVALID", "the header announces no tokens (vocab_size)")
        if max(header.vocab_size, header.width) > _MAX_VOCABULARY:
            raise Exhausted("TOKENIZER_TOO_LARGE", f"vocab_size and width: 1 to {_MAX_VOCABULARY}")
        tokens: list[bytes] = []
        size = 0
        for request in requests:
            if not request.HasField("chunk"):
                raise Invalid("TOKENIZER_INVALID", "after the header come chunks only")
            tokens += request.chunk.tokens
            size += request.ByteSize()
            if size > self._settings.max_message_bytes:
                limit = self._settings.max_message_bytes
                raise Exhausted("TOKENIZER_TOO_LARGE", f"over {limit} bytes (max_message_bytes)")
            if len(tokens) > header.vocab_size:
                break
        if len(tokens) != header.vocab_size:
            raise Invalid(
                "TOKENIZER_INVALID",
                f"{header.vocab_size} tokens announced, {len(tokens)} came",
            )
        try:
            return Vocabulary(
                tokens=tokens,
                width=header.width or header.vocab_size,
                stop_token_ids=tuple(header.stop_token_ids),
                special_token_ids=tuple(header.special_token_ids),
            )
        except ValueError as error:
            raise Invalid("TOKENIZER_INVALID", str(error)) from None


class GrammarService(GrammarServiceServicer):
    """Compiles specs."""

    def __init__(self, tokenizers: Tokenizers, catalog: Catalog, settings: ServiceSettings) -> None:
        self._tokenizers = tokenizers
        self._catalog = catalog
        self._settings = settings
        # Handlers that wait for a compile hold threads, which steps need.
        self._places = threading.Semaphore(settings.compile_queue)

    def CompileGrammar(
        self, request: grammars_pb2.CompileGrammarRequest, context: grpc.ServicerContext
    ) -> grammars_pb2.CompileGrammarResponse:
        """Compiles a spec, or answers from the cache."""
        try:
            vocabulary = self._tokenizers.get(request.tokenizer_id)
            spec = canonical(_spec(request.spec), self._settings.max_spec_bytes)
            if not self._places.acquire(blocking=False):
                raise Exhausted(
                    "COMPILE_QUEUE_FULL",
                    f"{self._settings.compile_queue} compiles are under way (compile_queue); "
                    "try again later",
                )
            try:
                grammar, cached = self._catalog.compile(spec, vocabulary)
            finally:
                self._places.release()
        except ServiceError as error:
            abort(context, error)
        return grammars_pb2.CompileGrammarResponse(
            grammar=_grammar(grammar), cached=cached, compile_ms=grammar.compile_ms
        )

    def GetGrammar(
        self, request: grammars_pb2.GetGrammarRequest, context: grpc.ServicerContext
    ) -> grammars_pb2.GetGrammarResponse:
        """Shows a compiled grammar."""
        try:
            grammar = self._catalog.get(request.grammar_id)
        except ServiceError as error:
            abort(context, error)
        return grammars_pb2.GetGrammarResponse(
            grammar=_grammar(grammar), spec=spec_to_wire(grammar.spec)
        )


def _spec(spec: grammars_pb2.GrammarSpec) -> GrammarSpec:
    try:
        return spec_from_wire(spec)
    except ValueError as error:
        raise Invalid("SPEC_UNSUPPORTED", str(error)) from None


def _grammar(grammar: Grammar) -> grammars_pb2.Grammar:
    return grammars_pb2.Grammar(
        id=grammar.id,
        tokenizer_id=grammar.vocabulary.id,
        backend=BACKENDS[grammar.backend.name],
        vocab_size=len(grammar.vocabulary.tokens),
        width=grammar.vocabulary.width,
        stop_token_ids=grammar.vocabulary.stop_token_ids,
        unenforced=_named(grammar.unenforced),
        annotations=_named(grammar.annotations),
        compiled_source=grammar.compiled_source,
        memory_bytes=grammar.memory_bytes,
    )


def _named(items: Iterable[Unenforced]) -> list[grammars_pb2.Unenforced]:
    return [grammars_pb2.Unenforced(pointer=i.pointer, keyword=i.keyword) for i in items]


def _tokenizer(vocabulary: Vocabulary) -> tokenizers_pb2.Tokenizer:
    return tokenizers_pb2.Tokenizer(
        id=vocabulary.id,
        vocab_size=len(vocabulary.tokens),
        width=vocabulary.width,
        stop_token_ids=vocabulary.stop_token_ids,
        special_count=len(vocabulary.special_token_ids),
        empty_count=sum(not token for token in vocabulary.tokens),
    )
