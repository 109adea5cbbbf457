"""Sequences: what is theirs alone, where they stand, how they end, how they are copied."""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from engine_client import GrammarClient, GrammarSpec, Outcome, Refused, Row
from engine_client.wire import sequences_pb2 as pb
from engine_client.wire.sequences_pb2_grpc import SequenceServiceStub
from tests.cases import (
    CLOSE,
    COLON,
    EOS,
    KEY,
    LETTER,
    OBJECT,
    OBJECT_TOKENS,
    ONE,
    OPEN,
    TEXT,
    Request,
)
from tests.support import ServiceProcess, allowed, running_service, toy

NewId = Callable[[], str]


@pytest.fixture
def begin(client: GrammarClient, new_id: NewId) -> Callable[[], Request]:
    grammar = client.compile(OBJECT, OBJECT_TOKENS)
    return lambda: Request(client, grammar, new_id())


@pytest.fixture
def stub(service: ServiceProcess) -> Iterator[SequenceServiceStub]:
    with grpc.insecure_channel(service.target) as channel:
        yield SequenceServiceStub(channel)


def fork(stub: SequenceServiceStub, *pairs: tuple[Request, Request]) -> None:
    """Copies in one call: all sources are read before any target is written."""
    forks = [pb.Fork(source_id=source.id, target_id=target.id) for source, target in pairs]
    answer = stub.ForkSequences(pb.ForkSequencesRequest(forks=forks), timeout=20)
    assert list(answer.outcomes) == [pb.OUTCOME_OK] * len(pairs)
    tokens = [list(source.tokens) for source, _ in pairs]
    for (_, target), copied in zip(pairs, tokens, strict=True):
        target.tokens = copied
        assert list(held(stub, target).tokens) == copied


def held(stub: SequenceServiceStub, request: Request) -> pb.GetSequenceResponse:
    return stub.GetSequence(pb.GetSequenceRequest(sequence_id=request.id), timeout=20)


# vllm-project/vllm#5329: two prompts in one call share one processor and corrupt each other
def test_two_sequences_of_one_grammar_take_turns(begin: Callable[[], Request]) -> None:
    first, second = begin(), begin()
    first.accept(OPEN)
    assert second.allowed() == [OPEN]
    assert first.allowed() == [KEY]
    second.accept(OPEN)
    first.accept(KEY, COLON)
    assert second.allowed() == [KEY]
    assert first.allowed() == [ONE]


# dottxt-ai/outlines#757: a new sequence resets the table, and the others stop
def test_opening_a_sequence_leaves_the_others_alone(begin: Callable[[], Request]) -> None:
    first = begin()
    first.accept(OPEN, KEY)
    begin().allowed()
    assert first.allowed() == [COLON]


# InternLM/lmdeploy#1856: a processor that is cached by its grammar shares progress
def test_a_cached_grammar_carries_no_progress(client: GrammarClient, new_id: NewId) -> None:
    first, second = (client.compile(OBJECT, OBJECT_TOKENS) for _ in range(2))
    assert second.cached
    assert second.id == first.id
    Request(client, first, new_id()).accept(OPEN)
    assert Request(client, second, new_id()).allowed() == [OPEN]


# huggingface/text-generation-inference#1661: constrained beside unconstrained, and both fail.
# Rows without a grammar never reach the service; a row whose constraint is yet to begin does.
def test_a_free_row_beside_a_constrained_one(client: GrammarClient, new_id: NewId) -> None:
    grammar = client.compile(OBJECT, OBJECT_TOKENS)
    free = Request(client, grammar, new_id(), constraint_start=100)
    free.tokens = [LETTER, EOS]
    result = client.step([Request(client, grammar, new_id()).row(), free.row(0)])
    assert list(result.outcomes) == [Outcome.OK, Outcome.OK]
    assert allowed(result.mask(0)) == [OPEN]
    assert allowed(result.mask(1)) == list(range(8))


# vllm-project/vllm#11312: n > 1 fails
def test_forks_go_on_by_themselves(client: GrammarClient, begin: Callable[[], Request]) -> None:
    parent, *children = (begin() for _ in range(3))
    parent.accept(OPEN)
    assert client.fork(parent.id, [child.id for child in children])
    for child in children:
        child.tokens = [OPEN]
    parent.accept(KEY, COLON)
    children[0].accept(KEY)
    assert [request.allowed() for request in (parent, *children)] == [[ONE], [COLON], [KEY]]
    assert "healed_unknown_sequence" not in client.stats.snapshot(), "no copy was a replay"


# mlc-ai/xgrammar#681: beam search reorders sequences at every step
def test_beams_follow_their_parents(
    stub: SequenceServiceStub, begin: Callable[[], Request]
) -> None:
    first, second = begin(), begin()
    first.accept(OPEN)
    fork(stub, (first, second))
    second.accept(KEY)
    fork(stub, (second, first), (second, second))
    assert first.allowed() == [COLON]
    first.accept(COLON)
    assert second.allowed() == [COLON]
    fork(stub, (first, second), (second, first))
    assert (first.allowed(), second.allowed()) == ([COLON], [ONE])


# vllm-project/vllm#28233: without ids, state is keyed by prefix, and the table grows
def test_equal_prefixes_are_two_sequences(
    stub: SequenceServiceStub, begin: Callable[[], Request]
) -> None:
    first, second = begin(), begin()
    first.accept(OPEN)
    second.accept(OPEN)
    first.accept(KEY)
    assert list(held(stub, first).tokens) == [OPEN, KEY]
    assert list(held(stub, second).tokens) == [OPEN]
    request = pb.CloseSequencesRequest(sequence_ids=[first.id, second.id])
    assert stub.CloseSequences(request, timeout=20).closed == 2


# vllm-project/vllm#7194: copies of the state in several ranks drift apart
def test_ranks_that_send_the_same_step_get_the_same_answer(
    service: ServiceProcess, stub: SequenceServiceStub, new_id: NewId
) -> None:
    sequence_id = new_id()
    with service.client() as one, service.client(shared=False) as other:
        ranks = [
            Request(rank, rank.compile(OBJECT, OBJECT_TOKENS), sequence_id) for rank in (one, other)
        ]
        for token, following in zip(TEXT, [[KEY], [COLON], [ONE], [CLOSE, ONE]], strict=False):
            for rank in ranks:
                position = len(rank.tokens)
                rank.tokens.append(token)
                result = rank.step(position)
                assert allowed(result.mask(0)) == following
                assert result.notes == {}, "nothing was rewound"
        assert list(held(stub, ranks[0]).tokens) == TEXT[:4]


# vllm-project/vllm#13433: the state stands still, and the old mask is used again
def test_a_step_too_far_is_a_gap_and_no_old_mask(
    stub: SequenceServiceStub, begin: Callable[[], Request]
) -> None:
    request = begin()
    request.accept(OPEN)
    bindings = [pb.Binding(row=0, sequence_id=request.id)]
    step = pb.StepRequest(bindings=bindings, rows=[0], positions=[2])
    answer = stub.Step(step, timeout=20)
    assert list(answer.outcomes) == [pb.OUTCOME_HISTORY_GAP]
    assert answer.notes[0].history_length == 1
    assert answer.masks == bytes(4)


# sgl-project/sglang#21172: the broken state is used again after a refused token
def test_a_refused_token_leaves_the_state_as_it_was(begin: Callable[[], Request]) -> None:
    request = begin()
    request.tokens = [LETTER]
    result = request.step(0)
    assert result.outcomes[0] is Outcome.REJECTED
    assert (result.notes[0].reason, result.notes[0].accepted) == ("TOKEN_ILLEGAL", 0)
    assert allowed(result.mask(0)) == [EOS], "fail closed"
    request.rewind(1)
    assert request.allowed() == [OPEN]
    assert request.accept(*TEXT) is Outcome.COMPLETE


# sgl-project/sglang#6803: an invalid grammar is dropped in silence, and its requests wait for ever
def test_a_bad_grammar_is_an_error_for_all_who_wait_for_it(
    service: ServiceProcess, client: GrammarClient, new_id: NewId
) -> None:
    bad = GrammarSpec.ebnf("root ::= nowhere")

    def reason(_: int) -> str:
        with service.client() as own, pytest.raises(Refused) as refused:
            own.compile(bad, OBJECT_TOKENS)
        return refused.value.reason

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(reason, range(4))) == ["SPEC_INVALID"] * 4
    good = client.compile(OBJECT, OBJECT_TOKENS)
    lost = dataclasses.replace(good, id="gra-" + "0" * 32, spec=bad)
    result = client.step([Row(new_id(), lost, []), Row(new_id(), good, [OPEN])])
    assert list(result.outcomes) == [Outcome.FAILED, Outcome.OK]
    assert result.notes[0].reason == "SPEC_INVALID"
    assert [allowed(mask) for mask in result.masks] == [[EOS], [KEY]]


# mlc-ai/xgrammar#164: a token that is refused in its middle leaves half its bytes behind
def test_a_token_is_refused_whole(client: GrammarClient, new_id: NewId) -> None:
    tokens = toy(["ab", "abX", "c", "cd", "<eos>"], stop=[4])
    grammar = client.compile(GrammarSpec.ebnf('root ::= "ab" "cd"'), tokens)
    request = Request(client, grammar, new_id())
    assert request.accept(1) is Outcome.REJECTED
    request.tokens = [0]
    assert request.step(0).outcomes[0] is Outcome.OK
    assert request.allowed() == [2, 3]
    assert request.accept(3) is Outcome.COMPLETE


# guidance-ai/llguidance#212: a list that ends with an illegal token never stops the matcher
def test_the_legal_part_of_a_step_counts(
    stub: SequenceServiceStub, begin: Callable[[], Request]
) -> None:
    request = begin()
    assert request.accept(*TEXT, LETTER) is Outcome.REJECTED
    state = held(stub, request)
    assert (state.outcome, list(state.tokens)) == (pb.OUTCOME_REJECTED, TEXT)
    assert f"token {LETTER}" in state.message
    result = request.step(0)
    assert result.notes[0].accepted == 5
    result = request.rewind(1)
    assert result.outcomes[0] is Outcome.COMPLETE
    assert request.allowed() == [EOS]
    assert held(stub, request).outcome == pb.OUTCOME_COMPLETE


# sgl-project/sglang#30937: the same thing is freed twice
def test_closing_twice_is_fine(stub: SequenceServiceStub, begin: Callable[[], Request]) -> None:
    request = begin()
    request.accept(OPEN)
    for closed in (1, 0):
        answer = stub.CloseSequences(
            pb.CloseSequencesRequest(sequence_ids=[request.id]), timeout=20
        )
        assert answer.closed == closed
    # The engine goes on with it all the same: it is opened anew, with its whole history.
    assert request.accept(KEY) is Outcome.OK
    assert request.allowed() == [COLON]


# sgl-project/sglang#21964: the decode node starts from nothing and refuses the first token
def test_another_service_takes_over(begin: Callable[[], Request], new_id: NewId) -> None:
    prefill = begin()
    prefill.accept(OPEN)
    with running_service() as decode, decode.client() as client:
        request = Request(client, client.compile(OBJECT, OBJECT_TOKENS), prefill.id)
        request.tokens = list(prefill.tokens)
        assert request.allowed() == [KEY]
        assert request.accept(KEY) is Outcome.OK


# vllm-project/vllm#29632: everything is allowed once the grammar is complete
def test_only_stop_tokens_after_the_end(begin: Callable[[], Request]) -> None:
    request = begin()
    assert request.accept(*TEXT) is Outcome.COMPLETE
    assert request.allowed() == [EOS]
    assert request.accept(EOS) is Outcome.TERMINATED
    assert request.allowed() == [EOS]


# vllm-project/vllm#42619: a scheduler goes on with a matcher that has ended
def test_tokens_after_the_end_are_counted_and_ignored(begin: Callable[[], Request]) -> None:
    request = begin()
    request.accept(*TEXT, EOS)
    request.tokens.append(LETTER)
    result = request.step(6)
    assert result.outcomes[0] is Outcome.TERMINATED
    assert result.notes[0].ignored == 1
    assert allowed(result.mask(0)) == [EOS]
    assert request.rewind(2).outcomes[0] is Outcome.COMPLETE


# dottxt-ai/outlines#515: the end is legal before the object is complete
@pytest.mark.parametrize("length", range(5))
def test_no_stop_token_before_the_end(begin: Callable[[], Request], length: int) -> None:
    request = begin()
    assert request.accept(*TEXT[:length]) is Outcome.OK
    assert EOS not in request.allowed()
    assert request.accept(EOS) is Outcome.REJECTED


# guidance-ai/llguidance#161: a grammar that can always go on never allows an end
def test_the_end_is_legal_wherever_the_grammar_may_end(
    client: GrammarClient, new_id: NewId
) -> None:
    tokens = toy(["a", " ", "<eos>"], stop=[2])
    grammar = client.compile(GrammarSpec.ebnf("root ::= [a-z ]*"), tokens)
    request = Request(client, grammar, new_id())
    assert request.accept() is Outcome.COMPLETE
    assert request.allowed() == [0, 1, 2]
    assert request.accept(0, 1, 0) is Outcome.COMPLETE
    assert request.allowed() == [0, 1, 2]


# vllm-project/vllm#47027: a JSON request can't think first, as its grammar starts at token one
def test_thinking_before_the_constraint_is_free(client: GrammarClient, new_id: NewId) -> None:
    grammar = client.compile(OBJECT, OBJECT_TOKENS)
    request = Request(client, grammar, new_id(), constraint_start=3)
    assert request.accept(LETTER, EOS) is Outcome.OK
    assert request.allowed() == list(range(8))
    # Thinking ends in the middle of a step's tokens, and of a chain of drafts.
    legal, masks = request.chain(LETTER, OPEN, KEY, LETTER)
    assert legal == 3
    assert masks == [list(range(8)), [OPEN], [KEY], [COLON], [COLON]]
    assert request.accept(LETTER, *TEXT) is Outcome.COMPLETE
    assert request.allowed() == [EOS]
