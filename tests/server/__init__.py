"""What tests of the server share: the bare stubs, for what the client library would never send."""

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import grpc
import numpy as np
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from engine_client import GrammarClient, GrammarSpec
from engine_client.wire import sequences_pb2 as pb
from engine_client.wire.grammars_pb2_grpc import GrammarServiceStub
from engine_client.wire.sequences_pb2_grpc import SequenceServiceStub
from engine_client.wire.tokenizers_pb2_grpc import TokenizerServiceStub
from tests.support import toy

SECONDS = 30

# {"a":1}, with any integer, and white space nowhere.
OPEN, CLOSE, KEY, COLON, ONE, SPACE, LETTER, EOS = range(8)
TOKENS = toy(["{", "}", '"a"', ":", "1", " ", "x", "<eos>"], stop=[EOS])
OBJECT = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    max_whitespace=0,
)


class Refusal(NamedTuple):
    """Why something was refused."""

    code: str
    reason: str
    message: str


class Stream:
    """A StepStream, step by step."""

    def __init__(self, stub: SequenceServiceStub) -> None:
        self._requests: queue.SimpleQueue[pb.StepStreamRequest | None] = queue.SimpleQueue()
        self._call = stub.StepStream(iter(self._requests.get, None), wait_for_ready=True)
        self._steps = 0

    def ask(self, request: pb.StepRequest) -> pb.StepResponse | Refusal:
        """Sends a step and waits for what comes of it."""
        self._steps += 1
        self._requests.put(pb.StepStreamRequest(step=self._steps, request=request))
        answer = next(self._call)
        assert answer.step == self._steps
        if answer.WhichOneof("result") == "response":
            return answer.response
        code = next(code for code in grpc.StatusCode if code.value[0] == answer.error.code)
        return Refusal(code.name, answer.error.reason, answer.error.message)

    def step(self, request: pb.StepRequest) -> pb.StepResponse:
        """Sends a step that is answered."""
        answer = self.ask(request)
        assert isinstance(answer, pb.StepResponse), answer
        return answer

    def end(self) -> None:
        """Ends the stream."""
        self._requests.put(None)
        self._call.cancel()


class Stubs:
    """The services on one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.tokenizers = TokenizerServiceStub(channel)
        self.grammars = GrammarServiceStub(channel)
        self.sequences = SequenceServiceStub(channel)

    def unary(self, request: pb.StepRequest) -> pb.StepResponse | Refusal:
        """A step of its own, or its refusal."""
        try:
            return self.sequences.Step(request, timeout=SECONDS)
        except grpc.RpcError as error:
            return refusal_of(error)

    @contextmanager
    def stream(self) -> Iterator[Stream]:
        """A stream within the block."""
        stream = Stream(self.sequences)
        try:
            yield stream
        finally:
            stream.end()

    def held(self, sequence_id: str) -> list[int] | Refusal:
        """The history of a sequence."""
        request = pb.GetSequenceRequest(sequence_id=sequence_id)
        try:
            return list(self.sequences.GetSequence(request, timeout=SECONDS).tokens)
        except grpc.RpcError as error:
            return refusal_of(error)


@contextmanager
def stubs_of(target: str) -> Iterator[Stubs]:
    """Stubs on a channel of their own."""
    with grpc.insecure_channel(target) as channel:
        yield Stubs(channel)


def refused(call: Callable[[], object]) -> Refusal:
    """The refusal that a call ends with."""
    try:
        answer = call()
    except grpc.RpcError as error:
        return refusal_of(error)
    raise AssertionError(f"it isn't refused: {answer}")


def refusal_of(error: grpc.RpcError) -> Refusal:
    """What an error says, by google.rpc.ErrorInfo."""
    assert isinstance(error, grpc.Call)
    code, message = error.code().name, error.details() or ""
    status = rpc_status.from_call(error)
    assert status is not None, f"{code} without details: {message}"
    info = ErrorInfo()
    assert status.details[0].Unpack(info), f"{code} without ErrorInfo: {message}"
    assert info.domain == "grammar.v1"
    return Refusal(code, info.reason, message)


def step_of(
    *ids: str, grammar_id: str, taking: tuple[int, ...] = (OPEN,), **columns: Sequence[int]
) -> pb.StepRequest:
    """A good step: rows 0, 1 ... are opened, and take the same tokens each. Columns replace it."""
    opening = pb.Opening(grammar_id=grammar_id)
    request = pb.StepRequest(
        bindings=[pb.Binding(row=i, sequence_id=id_, opening=opening) for i, id_ in enumerate(ids)],
        rows=range(len(ids)),
        positions=[0] * len(ids),
        token_counts=[len(taking)] * len(ids),
        tokens=taking * len(ids),
    )
    for name, values in columns.items():
        getattr(request, name)[:] = values
    return request


def masks_of(response: pb.StepResponse, width: int = 8) -> list[list[int]]:
    """The tokens that each inline mask row allows."""
    rows = np.frombuffer(response.masks, dtype=np.uint8).reshape(-1, (width + 31) // 32 * 4)
    return [np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist() for row in rows]


def grammar_id_of(client: GrammarClient) -> str:
    """The object's grammar, compiled."""
    return client.compile(OBJECT, TOKENS).id
