"""Speculative decoding: chains of drafts, and what may go wrong with where they begin."""

import itertools
from collections.abc import Callable, Iterator

import grpc
import pytest

from engine_client import GrammarClient, GrammarSpec, Outcome
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
    SCHEMA,
    SPACE,
    TEXT,
    Request,
)
from tests.support import ServiceProcess, allowed, toy

NewId = Callable[[], str]


@pytest.fixture
def begin(client: GrammarClient, new_id: NewId) -> Callable[[], Request]:
    grammar = client.compile(OBJECT, OBJECT_TOKENS)
    return lambda: Request(client, grammar, new_id())


@pytest.fixture
def stub(service: ServiceProcess) -> Iterator[SequenceServiceStub]:
    with grpc.insecure_channel(service.target) as channel:
        yield SequenceServiceStub(channel)


def held(stub: SequenceServiceStub, request: Request) -> list[int]:
    """The history that the service holds."""
    answer = stub.GetSequence(pb.GetSequenceRequest(sequence_id=request.id), timeout=20)
    return list(answer.tokens)


# vllm-project/vllm#11484: drafts with a grammar bring the engine down
def test_a_chain_has_a_mask_for_each_draft_and_commits_nothing(
    stub: SequenceServiceStub, begin: Callable[[], Request]
) -> None:
    request = begin()
    request.accept(OPEN)
    legal, masks = request.chain(KEY, COLON, ONE)
    assert legal == 3
    assert masks == [[KEY], [COLON], [ONE], [CLOSE, ONE]]
    assert held(stub, request) == [OPEN]
    request.accept(KEY, COLON)
    assert request.allowed() == [ONE]


# vllm-project/vllm#27969: an illegal draft crashes the server under load
@pytest.mark.parametrize("illegal", [LETTER, EOS, -1, 8, 2**31 - 1])
def test_an_illegal_draft_is_no_error(
    client: GrammarClient, begin: Callable[[], Request], illegal: int
) -> None:
    request = begin()
    neighbour = begin().row(drafts=(OPEN, KEY, COLON))
    result = client.step([request.row(drafts=(OPEN, illegal)), neighbour])
    assert list(result.legal_drafts) == [1, 3]
    assert result.notes == {}
    assert request.chain(*[illegal] * 4) == (0, [[OPEN]] * 5)
    legal, masks = request.chain(OPEN, KEY, illegal, COLON)
    assert legal == 2
    assert masks == [[OPEN], [KEY], [COLON], [COLON], [COLON]], "they repeat the last legal one"
    assert request.accept(*TEXT) is Outcome.COMPLETE


# vllm-project/vllm#26586: other processors see another number of rows
def test_each_row_says_where_its_masks_are(
    client: GrammarClient, begin: Callable[[], Request]
) -> None:
    drafts: list[tuple[int, ...]] = [(), (OPEN, LETTER), (), (OPEN,)]
    result = client.step([begin().row(drafts=chain) for chain in drafts])
    assert list(result.mask_rows) == [0, 1, 4, 5]
    assert list(result.legal_drafts) == [0, 1, 0, 1]
    assert [allowed(mask) for mask in result.masks] == [
        *([OPEN],),
        *([OPEN], [KEY], [KEY]),
        *([OPEN],),
        *([OPEN], [KEY]),
    ]


# NVIDIA/TensorRT-LLM#15022: the number of drafts falls to 0, and the rows don't match the logits
@pytest.mark.parametrize("count", [0, 1, 256])
def test_from_no_drafts_to_the_most(begin: Callable[[], Request], count: int) -> None:
    request = begin()
    request.accept(*TEXT[:4])
    legal, masks = request.chain(*[ONE] * count)
    assert legal == count
    assert masks == [[CLOSE, ONE]] * (count + 1)


# vllm-project/vllm#44006: strict tool calls fail to advance when there are drafts
def test_drafts_into_and_out_of_a_tool_call(client: GrammarClient, new_id: NewId) -> None:
    tokens = toy(["<call>", "</call>", "{", "}", '"a"', ":", "1", "x", "<eos>"], stop=[8])
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<call>",
            "content": {"type": "json_schema", "json_schema": SCHEMA},
            "end": "</call>",
        },
    }
    spec = GrammarSpec.structural_tag(tag)
    request = Request(client, client.compile(spec, tokens), new_id())
    legal, masks = request.chain(0, 2, 4, 5, 6, 3, 1, 8, 7)
    assert legal == 8
    assert masks == [[0], [2], [4], [5], [6], [3, 6], [1], [8], [8], [8]]
    assert request.accept(0, 2, 4) is Outcome.OK
    assert request.allowed() == [5]


# vllm-project/vllm#30916: a request resumes with drafts of an older position, and the engine dies.
# A position is where the engine says that it stands: the service goes there, and says how far.
def test_stale_drafts_are_answered_for_their_position(begin: Callable[[], Request]) -> None:
    request = begin()
    request.accept(OPEN)
    request.accept(KEY)
    stale = begin()
    stale.id, stale.tokens = request.id, [OPEN]
    result = stale.step(drafts=(COLON, ONE))
    assert result.notes[0].rewound == 1
    assert result.legal_drafts[0] == 0
    assert allowed(result.mask(0)) == [KEY]
    # It costs the next step a healing, and never a wrong mask.
    assert request.allowed() == [COLON]


# vllm-project/vllm#49694: late drafts are verified against another state, and illegal ones pass
def test_a_late_draft_request_is_no_harm(begin: Callable[[], Request]) -> None:
    request = begin()
    assert request.chain(KEY, COLON) == (0, [[OPEN]] * 3)
    request.accept(OPEN)
    late = begin()
    late.id = request.id
    result = late.step(drafts=(KEY,))
    assert result.legal_drafts[0] == 0
    assert result.notes[0].rewound == 1
    assert request.chain(KEY, COLON) == (2, [[KEY], [COLON], [ONE]])


# sgl-project/sglang#29110: a token that was accepted is accepted again, and the request aborts
def test_a_repeated_step_is_recognised(
    stub: SequenceServiceStub, begin: Callable[[], Request]
) -> None:
    request = begin()
    request.accept(OPEN)
    again = request.step(0)
    assert again.outcomes[0] is Outcome.OK
    assert again.notes == {}
    assert held(stub, request) == [OPEN]
    assert request.accept(KEY) is Outcome.OK
    assert held(stub, request) == [OPEN, KEY]


# vllm-project/vllm#52805: one step holds the stop token and drafts after it
def test_a_step_says_where_it_ended(
    stub: SequenceServiceStub, begin: Callable[[], Request]
) -> None:
    request = begin()
    request.tokens = [*TEXT, EOS, SPACE, LETTER]
    result = request.step(0)
    assert result.outcomes[0] is Outcome.TERMINATED
    assert result.notes[0].ignored == 2
    assert held(stub, request) == request.tokens
    # Drafts that run past the end are legal up to it.
    other = begin()
    other.accept(*TEXT)
    assert other.chain(EOS, SPACE, LETTER) == (1, [[EOS]] * 4)


# sgl-project/sglang#9187: the output stops where drafter and grammar disagree
def test_a_drafter_that_is_always_wrong_ends_nothing(begin: Callable[[], Request]) -> None:
    wanted = [*TEXT[:4], ONE, ONE, CLOSE, EOS]
    request = begin()
    proposals = [(LETTER, LETTER), (EOS,), (KEY, LETTER), (CLOSE, OPEN, ONE), (), (-1, KEY)]
    for drafts in itertools.cycle(proposals):
        done = len(request.tokens)
        result = request.step(drafts=drafts)
        assert result.outcomes[0] in (Outcome.OK, Outcome.COMPLETE)
        # The verifier takes what it would have sampled itself, and one token of its own.
        taken = 0
        while taken < result.legal_drafts[0] and drafts[taken] == wanted[done + taken]:
            taken += 1
        new = wanted[done : done + taken + 1]
        for index, token in enumerate(new):
            assert token in allowed(result.masks[index])
        if request.accept(*new) is Outcome.TERMINATED:
            break
    assert request.tokens == wanted


# guidance-ai/llguidance#364: rewinding counts bytes, where tokens are named by id
def test_rewinding_counts_tokens_of_every_kind(client: GrammarClient, new_id: NewId) -> None:
    tokens = toy(["a", "<return>", "b", "<eos>"], stop=[3], special=[1])
    grammar = client.compile(GrammarSpec.ebnf('root ::= "a" Token(1) "b"'), tokens)
    request = Request(client, grammar, new_id())
    assert request.accept(0, 1, 2) is Outcome.COMPLETE
    assert allowed(request.rewind(2).mask(0)) == [1]
    assert request.accept(1, 2, 3) is Outcome.TERMINATED
    assert allowed(request.rewind(1).mask(0)) == [3]


# sgl-project/sglang#31728: rewinding by nothing clears the history
def test_rewinding_by_nothing_by_all_and_by_too_much(
    stub: SequenceServiceStub, begin: Callable[[], Request]
) -> None:
    request = begin()
    request.accept(OPEN, KEY)
    result = request.rewind(0)
    assert result.notes == {}
    assert allowed(result.mask(0)) == [COLON]
    result = request.rewind(2)
    assert result.notes[0].rewound == 2
    assert allowed(result.mask(0)) == [OPEN]
    assert held(stub, request) == []
    # There is nothing before the start: positions have no sign.
    with pytest.raises(ValueError, match="-1"):
        pb.StepRequest(positions=[-1])
