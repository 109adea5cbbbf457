"""The client of the grammar service, for the process of an engine's worker."""

import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from grpc_status import rpc_status

from engine_client.errors import (
    ClientError,
    Refused,
    ServiceError,
    Unenforced,
    Unreachable,
    UsageError,
)
from engine_client.fallback import Fallback
from engine_client.pending import PendingStep, Unanswered
from engine_client.session import Session
from engine_client.spec import GrammarSpec
from engine_client.stats import Stats
from engine_client.stream import StepStream
from engine_client.translate import grammar_from_wire, spec_from_wire, spec_to_wire
from engine_client.types import Grammar, Policy, Row, StepResult
from engine_client.vocabulary import Vocabulary
from engine_client.wire import grammars_pb2, sequences_pb2, tokenizers_pb2
from engine_client.wire.grammars_pb2_grpc import GrammarServiceStub
from engine_client.wire.sequences_pb2_grpc import SequenceServiceStub
from engine_client.wire.tokenizers_pb2_grpc import TokenizerServiceStub

_CLOSE_SECONDS = 1.0
_CHUNK = 8192
"""Tokens a message of an upload: about 70 kB."""
_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": f"grammar.v1.{name}Service"} for name in ("Tokenizer", "Grammar")],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A sidecar restarts in seconds; gRPC's own back-off would let minutes pass.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_RETRIES)),
]

_log = logging.getLogger("engine_client")


class GrammarClient:
    """Compiles grammars at the service, and steps sequences for their masks.

    `submit` and `collect` (and `step`, which is both) never raise for anything that the service
    does: a row that can't be answered within the deadline is settled by its policy. Each thread
    that steps has a stream and a region of its own; everything else may be called from any thread.

    Args:
        target: Where the service listens: unix:PATH or HOST:PORT.
        region_dir: Directory for shared-memory masks that the service has as its region_dir, on
            tmpfs. Without it, or where it can't be used, masks come inline.
        step_timeout: Seconds that a collect waits at most, healing and reconnecting included.
        timeout: Seconds that the other calls may take, compiles included.
        policy: What becomes of rows when the service doesn't answer in time.
        cool_down: Seconds that steps aren't sent after one timed out; they go by policy at once,
            so that a service that is gone doesn't cost every step its timeout.
    """

    def __init__(
        self,
        target: str,
        *,
        region_dir: str | Path | None = None,
        step_timeout: float = 2.0,
        timeout: float = 30.0,
        policy: Policy = Policy.FAIL,
        cool_down: float = 1.0,
    ) -> None:
        if step_timeout <= 0 or timeout <= 0 or cool_down < 0:
            raise UsageError("timeouts are seconds above 0")
        self._step_timeout = step_timeout
        self._timeout = timeout
        self._cool_down = cool_down
        self._region_dir = Path(region_dir) if region_dir is not None else None
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._tokenizers = TokenizerServiceStub(self._channel)
        self._grammars = GrammarServiceStub(self._channel)
        self._sequences = SequenceServiceStub(self._channel)
        self._stats = Stats()
        self._fallback = Fallback(policy, self._stats)
        self._unanswered = Unanswered()
        self._local = threading.local()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._sessions_lock = threading.Lock()
        self._closes: set[grpc.Future[sequences_pb2.CloseSequencesResponse]] = set()
        """Closes on their way; the end of the channel would cancel them."""
        self._down_until = 0.0
        self._closed = False

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        return self._stats

    def register_tokenizer(self, vocabulary: Vocabulary) -> str:
        """Uploads a vocabulary unless the service has it; returns its id. Raises ServiceError."""
        request = tokenizers_pb2.GetTokenizerRequest(tokenizer_id=vocabulary.id)
        try:
            with _errors():
                self._tokenizers.GetTokenizer(request, timeout=self._timeout, wait_for_ready=True)
        except Refused as error:
            if error.reason != "UNKNOWN_TOKENIZER":
                raise
            with _errors():
                self._tokenizers.RegisterTokenizer(_upload(vocabulary), timeout=self._timeout)
        return vocabulary.id

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> Grammar:
        """Compiles a spec against a vocabulary, which is registered on the way if need be.

        Raises Refused (SPEC_INVALID, SPEC_UNENFORCED, COMPILE_DEADLINE ...) or Unreachable.
        """
        response = self._compile(spec, vocabulary.id, vocabulary, self._timeout)
        if (response.grammar.width, response.grammar.vocab_size) != (
            vocabulary.width,
            len(vocabulary.tokens),
        ):
            raise Refused("TOKENIZER_INVALID", "the service has another tokenizer by this id")
        grammar = grammar_from_wire(
            response.grammar, spec, vocabulary, response.compile_ms, response.cached
        )
        self._fallback.prepare(grammar)
        return grammar

    def get_grammar(self, grammar_id: str) -> Grammar:
        """A grammar that was compiled before, perhaps by another client, by its id.

        Its vocabulary isn't needed here, and isn't had: where the service loses the tokenizer, its
        rows fail. Raises Refused (UNKNOWN_GRAMMAR) or Unreachable.
        """
        request = grammars_pb2.GetGrammarRequest(grammar_id=grammar_id)
        with _errors():
            response = self._grammars.GetGrammar(
                request, timeout=self._timeout, wait_for_ready=True
            )
        try:
            spec = spec_from_wire(response.spec)
        except ValueError as error:
            raise Refused("SPEC_UNSUPPORTED", str(error)) from None
        return grammar_from_wire(response.grammar, spec, None, 0.0, True)

    def step(self, rows: Sequence[Row]) -> StepResult:
        """Steps the rows and waits for their masks."""
        return self.collect(self.submit(rows))

    def submit(self, rows: Sequence[Row]) -> PendingStep:
        """Sends a step; read it with `collect` once, on the same thread.

        Send it before the forward pass, and collect after it. Two steps may be in flight. Raises
        UsageError for rows that can't be sent.
        """
        session = self._session()
        step = session.begin(rows)
        self._stats.add("steps")
        self._stats.add("rows", len(rows))
        if time.monotonic() < self._down_until:
            self._stats.add("skipped")
        else:
            session.send(step)
        return step

    def collect(self, step: PendingStep) -> StepResult:
        """Waits for a step's masks, for `step_timeout` seconds at most."""
        if step.collected:
            raise UsageError("a step is collected once")
        step.collected = True
        session = self._session()
        if step.stream is not None:
            self._receive(session, step)
        if step.unsettled():
            self._unanswered.add(step)
            self._fallback.settle(step)
        self._fallback.close_failed(step)
        return StepResult(
            masks=step.writable(),
            outcomes=[outcome for outcome in step.outcomes if outcome is not None],
            legal_drafts=step.legal_drafts,
            mask_rows=step.mask_rows,
            notes=step.notes,
        )

    def fork(self, source_id: str, target_ids: Sequence[str]) -> bool:
        """Copies a sequence at the service, for n > 1 or beams; True when all copies were made.

        Saves the copies a replay, no more: a sequence that the service lacks is opened by its first
        step. So this never raises for what the service does.
        """
        forks = [
            sequences_pb2.Fork(source_id=source_id, target_id=target_id) for target_id in target_ids
        ]
        request = sequences_pb2.ForkSequencesRequest(forks=forks)
        try:
            with _errors():
                response = self._sequences.ForkSequences(request, timeout=self._step_timeout)
        except ServiceError as error:
            _log.warning("fork of %s was dropped: %s", source_id, error)
            self._stats.add("dropped_calls")
            return False
        return all(outcome == sequences_pb2.OUTCOME_OK for outcome in response.outcomes)

    def close_sequences(self, sequence_ids: Sequence[str]) -> None:
        """Frees sequences. Doesn't wait, and never raises: what is lost expires."""
        if not sequence_ids:
            return
        self._unanswered.discard(sequence_ids)
        with self._sessions_lock:
            for session in self._sessions:
                session.release(sequence_ids)
        request = sequences_pb2.CloseSequencesRequest(sequence_ids=sequence_ids)
        try:
            call = self._sequences.CloseSequences.future(request, timeout=self._timeout)
        except ValueError:  # the client is closed
            self._stats.add("dropped_calls")
            return
        self._closes.add(call)
        call.add_done_callback(self._settle_close)

    def close(self) -> None:
        """Ends all streams, removes all regions and closes the channel.

        Waits a second at most for sequences that are being closed.
        """
        self._closed = True
        end = time.monotonic() + _CLOSE_SECONDS
        for call in list(self._closes):
            with contextlib.suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.exception(max(end - time.monotonic(), 0.0))
        with self._sessions_lock:
            for session in self._sessions:
                session.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _receive(self, session: Session, step: PendingStep) -> None:
        """Waits for a step; what it can't have in time is left without an outcome."""
        try:
            answered = session.receive(step, time.monotonic() + self._step_timeout)
        except Exception:  # whatever it is, the engine's thread must go on
            if not self._closed:
                _log.exception("collecting a grammar step failed")
            self._stats.add("errors")
            answered = False
        if not answered:
            self._stats.add("timeouts")
            session.abandon(step)
            step.forget()
            self._down_until = time.monotonic() + self._cool_down

    def _session(self) -> Session:
        if self._closed:
            raise UsageError("the client is closed")
        session: Session | None = getattr(self._local, "session", None)
        if session is None:
            session = Session(
                self._connect, self._recompile, self._unanswered, self._region_dir, self._stats
            )
            self._local.session = session
            with self._sessions_lock:
                self._sessions.add(session)
        return session

    def _connect(self) -> StepStream:
        self._stats.add("connects")
        try:
            return StepStream(self._sequences)
        except ValueError:
            raise UsageError("the client is closed") from None

    def _recompile(self, grammar: Grammar, seconds: float) -> None:
        """Has the service compile a grammar that it lost. Raises ServiceError."""
        seconds = max(seconds, 0.001)
        self._compile(grammar.spec, grammar.tokenizer_id, grammar.vocabulary, seconds)

    def _compile(
        self, spec: GrammarSpec, tokenizer_id: str, vocabulary: Vocabulary | None, seconds: float
    ) -> grammars_pb2.CompileGrammarResponse:
        """Compiles against a tokenizer, which is registered if it isn't and can be."""
        request = grammars_pb2.CompileGrammarRequest(
            tokenizer_id=tokenizer_id, spec=spec_to_wire(spec)
        )
        end = time.monotonic() + seconds
        for _ in range(2):
            try:
                with _errors():
                    return self._grammars.CompileGrammar(
                        request, timeout=max(end - time.monotonic(), 0.001), wait_for_ready=True
                    )
            except Refused as error:
                if error.reason != "UNKNOWN_TOKENIZER" or vocabulary is None:
                    raise
                self.register_tokenizer(vocabulary)
        raise Unreachable("the service forgets the tokenizer as fast as it is registered")

    def _settle_close(self, call: "grpc.Future[sequences_pb2.CloseSequencesResponse]") -> None:
        self._closes.discard(call)
        with contextlib.suppress(grpc.FutureCancelledError):
            if call.exception() is not None:
                self._stats.add("dropped_calls")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turns gRPC's errors into the client's."""
    try:
        yield
    except grpc.RpcError as error:
        raise _error(error) from None
    except ValueError as error:  # a closed channel
        raise UsageError(str(error)) from None


def _error(error: Any) -> ClientError:
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # details that don't fit the status: a proxy's, or cut short
        status = None
    reason, unenforced = "", []
    for detail in status.details if status is not None else ():
        if detail.Is(ErrorInfo.DESCRIPTOR):
            info = ErrorInfo()
            detail.Unpack(info)
            reason = info.reason
        elif detail.Is(BadRequest.DESCRIPTOR):
            bad = BadRequest()
            detail.Unpack(bad)
            unenforced = [Unenforced(v.field, v.description) for v in bad.field_violations]
    code = error.code()
    if reason and reason != "DRAINING":
        return Refused(reason, error.details(), tuple(unenforced))
    if code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    ):
        return Unreachable(f"{code.name}: {error.details()}")
    return Refused(code.name, error.details())


def _upload(vocabulary: Vocabulary) -> Iterator[tokenizers_pb2.RegisterTokenizerRequest]:
    yield tokenizers_pb2.RegisterTokenizerRequest(
        header=tokenizers_pb2.TokenizerHeader(
            vocab_size=len(vocabulary.tokens),
            width=vocabulary.width,
            stop_token_ids=vocabulary.stop_token_ids,
            special_token_ids=vocabulary.special_token_ids,
        )
    )
    for start in range(0, len(vocabulary.tokens), _CHUNK):
        chunk = tokenizers_pb2.TokenizerChunk(tokens=vocabulary.tokens[start : start + _CHUNK])
        yield tokenizers_pb2.RegisterTokenizerRequest(chunk=chunk)
