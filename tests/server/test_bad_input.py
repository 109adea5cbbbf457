"""Whatever steps a caller sends: a clear answer, its neighbours are served, the next one works."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from engine_client import GrammarClient, Row
from engine_client.wire import sequences_pb2 as pb
from tests.server import (
    COLON,
    EOS,
    KEY,
    LETTER,
    OBJECT,
    OPEN,
    SECONDS,
    TOKENS,
    Refusal,
    Stream,
    Stubs,
    grammar_id_of,
    masks_of,
    refused,
    step_of,
    stubs_of,
)
from tests.support import ServiceProcess, allowed, toy

NewId = Callable[[], str]
Ask = Callable[[pb.StepRequest], pb.StepResponse | Refusal]
OK, REJECTED, FAILED = pb.OUTCOME_OK, pb.OUTCOME_REJECTED, pb.OUTCOME_FAILED
GAP, UNKNOWN = pb.OUTCOME_HISTORY_GAP, pb.OUTCOME_UNKNOWN_SEQUENCE
NO_GRAMMAR = pb.OUTCOME_UNKNOWN_GRAMMAR


@pytest.fixture
def stubs(service: ServiceProcess) -> Iterator[Stubs]:
    with stubs_of(service.target) as stubs:
        yield stubs


@pytest.fixture
def stream(stubs: Stubs) -> Iterator[Stream]:
    with stubs.stream() as stream:
        yield stream


@pytest.fixture(params=["stream", "unary"])
def ask(request: pytest.FixtureRequest, stubs: Stubs, stream: Stream) -> Ask:
    """Both ways to send a step."""
    return stream.ask if request.param == "stream" else stubs.unary


@pytest.fixture
def grammar_id(client: GrammarClient) -> str:
    return grammar_id_of(client)


@pytest.fixture
def good(grammar_id: str, new_id: NewId) -> Callable[[Ask], None]:
    """Checks that the next call works."""

    def check(ask: Ask) -> None:
        answer = ask(step_of(new_id(), grammar_id=grammar_id))
        assert isinstance(answer, pb.StepResponse), answer
        assert list(answer.outcomes) == [OK]
        assert masks_of(answer) == [[KEY]]

    return check


MALFORMED: dict[str, tuple[dict[str, Sequence[int]], str]] = {
    "no position": ({"positions": []}, "positions has 0 entries, rows has 1"),
    "two positions": ({"positions": [0, 0]}, "positions has 2 entries, rows has 1"),
    "two token counts": ({"token_counts": [1, 0]}, "token_counts has 2 entries"),
    "tokens without counts": ({"token_counts": []}, "tokens has 1 values"),
    "fewer tokens than counted": ({"token_counts": [2]}, "tokens has 1 values"),
    "a count past all tokens": ({"token_counts": [2**32 - 1]}, "tokens has 1 values"),
    "more tokens than counted": ({"tokens": [OPEN, KEY]}, "tokens has 2 values"),
    "two draft counts": ({"draft_counts": [0, 0]}, "draft_counts has 2 entries"),
    "drafts without counts": ({"drafts": [KEY]}, "drafts has 1 values"),
    "fewer drafts than counted": ({"draft_counts": [2], "drafts": [KEY]}, "drafts has 1 values"),
    "two mask rows": ({"mask_rows": [0, 1]}, "mask_rows has 2 entries"),
    "a mask row past the limit": ({"mask_rows": [8192]}, "max_mask_rows"),
    "a mask row far past the limit": ({"mask_rows": [2**32 - 1]}, "max_mask_rows"),
    "a position without a row": ({"rows": [], "token_counts": [], "tokens": []}, "positions has 1"),
    "a token without a row": ({"rows": [], "positions": [], "token_counts": []}, "tokens has 1"),
}


@pytest.mark.parametrize(("columns", "says"), MALFORMED.values(), ids=MALFORMED)
def test_columns_that_do_not_fit(
    ask: Ask,
    good: Callable[[Ask], None],
    grammar_id: str,
    new_id: NewId,
    columns: dict[str, Sequence[int]],
    says: str,
) -> None:
    answer = ask(step_of(new_id(), grammar_id=grammar_id, taking=(OPEN,), **columns))
    assert isinstance(answer, Refusal)
    assert answer[:2] == ("INVALID_ARGUMENT", "STEP_MALFORMED")
    assert says in answer.message
    good(ask)


@pytest.mark.parametrize(
    ("rows", "drafts", "setting"),
    [(4097, 0, "max_rows"), (1, 257, "max_drafts"), (40, 256, "max_mask_rows")],
)
def test_more_than_is_allowed(
    ask: Ask, good: Callable[[Ask], None], rows: int, drafts: int, setting: str
) -> None:
    counts, chains = [drafts] * rows, [KEY] * drafts * rows
    step = pb.StepRequest(rows=range(rows), draft_counts=counts, drafts=chains)
    step.positions.extend([0] * rows)
    answer = ask(step)
    assert isinstance(answer, Refusal)
    assert answer[:2] == ("RESOURCE_EXHAUSTED", "STEP_TOO_LARGE")
    assert setting in answer.message, "it says which setting it is"
    good(ask)


def test_a_row_number_past_the_limit(
    ask: Ask, good: Callable[[Ask], None], grammar_id: str, new_id: NewId
) -> None:
    step = step_of(new_id(), grammar_id=grammar_id)
    step.bindings[0].row = step.rows[0] = 4096
    answer = ask(step)
    assert isinstance(answer, Refusal)
    assert answer[:2] == ("INVALID_ARGUMENT", "STEP_MALFORMED")
    assert "max_rows" in answer.message
    good(ask)


def test_a_step_without_rows(ask: Ask, good: Callable[[Ask], None], client: GrammarClient) -> None:
    assert ask(pb.StepRequest()) == pb.StepResponse()
    good(ask)
    result = client.step([])
    assert (list(result.outcomes), len(result.masks)) == ([], 0)


Change = Callable[[pb.StepRequest], None]


def put(column: str, value: int) -> Change:
    """Entry 1 has another value in a column."""
    return lambda step: getattr(step, column).__setitem__(1, value)


def bound(sequence_id: str) -> Change:
    """Entry 1 is bound to another sequence."""
    return lambda step: setattr(step.bindings[1], "sequence_id", sequence_id)


def opened(grammar_id: str = "", stop_token_ids: Sequence[int] = ()) -> Change:
    """Entry 1 is opened in another way."""
    opening = pb.Opening(grammar_id=grammar_id, stop_token_ids=stop_token_ids)
    return lambda step: step.bindings[1].opening.MergeFrom(opening)


# What entry 1 of 3 has wrong; its outcome, reason and message; and its mask: stop tokens only, or
# none where they aren't known.
BAD_ROWS: dict[str, tuple[Change, int, str, str, list[int]]] = {
    "an illegal token": (put("tokens", LETTER), REJECTED, "TOKEN_ILLEGAL", "token 6", [EOS]),
    "a token past all": (put("tokens", 8), REJECTED, "TOKEN_OUT_OF_RANGE", "token 8 is", [EOS]),
    "a negative token": (put("tokens", -1), REJECTED, "TOKEN_OUT_OF_RANGE", "token -1 is", [EOS]),
    "the least token": (put("tokens", -(2**31)), REJECTED, "TOKEN_OUT_OF_RANGE", "", [EOS]),
    "the greatest token": (put("tokens", 2**31 - 1), REJECTED, "TOKEN_OUT_OF_RANGE", "", [EOS]),
    "a position past the history": (put("positions", 1), GAP, "", "", []),
    "the greatest position": (put("positions", 2**32 - 1), GAP, "", "", []),
    "an entry twice": (put("rows", 0), FAILED, "DUPLICATE_SEQUENCE", "already", [EOS]),
    "a sequence in two rows": (
        lambda step: bound(step.bindings[0].sequence_id)(step),
        *(FAILED, "DUPLICATE_SEQUENCE", "already", [EOS]),
    ),
    "an empty id": (
        bound(""),
        *(FAILED, "SEQUENCE_ID_INVALID", "1 to 256 characters", []),
    ),
    "a long id": (
        bound("x" * 257),
        *(FAILED, "SEQUENCE_ID_INVALID", "1 to 256 characters", []),
    ),
    "a stop token past all": (
        opened(stop_token_ids=[8]),
        *(FAILED, "STOP_TOKENS_INVALID", "stop token 8 can't be produced", []),
    ),
    "too many stop tokens": (
        opened(stop_token_ids=[EOS] * 1025),
        *(FAILED, "STOP_TOKENS_INVALID", "1024 stop tokens", []),
    ),
    "an unknown grammar": (
        opened("gra-" + "0" * 32),
        *(NO_GRAMMAR, "UNKNOWN_GRAMMAR", "compile its spec again", []),
    ),
    "no opening": (lambda step: step.bindings[1].ClearField("opening"), UNKNOWN, "", "", []),
    "an unbound row": (put("rows", 77), UNKNOWN, "ROW_UNBOUND", "no sequence is bound", []),
    "the greatest row": (put("rows", 2**32 - 1), UNKNOWN, "ROW_UNBOUND", "", []),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_fails_alone(ask: Ask, grammar_id: str, new_id: NewId, name: str) -> None:
    change, outcome, reason, says, mask = BAD_ROWS[name]
    ids = [new_id() for _ in range(3)]
    step = step_of(*ids, grammar_id=grammar_id)
    change(step)
    answer = ask(step)
    assert isinstance(answer, pb.StepResponse), answer
    assert list(answer.outcomes) == [OK, outcome, OK]
    notes = {note.index: note for note in answer.notes}
    assert not {0, 2} & notes.keys()
    if reason:
        assert notes[1].reason == reason
        assert says in notes[1].message
    assert masks_of(answer) == [[KEY], mask, [KEY]]
    # The same rows, sound, on the same stream.
    answer = ask(step_of(*ids, grammar_id=grammar_id, taking=(OPEN, KEY)))
    assert isinstance(answer, pb.StepResponse), answer
    assert list(answer.outcomes) == [OK] * 3
    assert masks_of(answer) == [[COLON]] * 3


@pytest.mark.parametrize("shared", [True, False])
def test_the_client_says_why_a_row_failed(
    service: ServiceProcess, new_id: NewId, shared: bool
) -> None:
    with service.client(shared=shared) as client:
        grammar = client.compile(OBJECT, TOKENS)
        twice = Row(new_id(), grammar, [OPEN])
        rows = [twice, twice, Row("", grammar, []), Row(new_id(), grammar, [-1])]
        result = client.step(rows)
        assert [outcome.name for outcome in result.outcomes] == [
            "OK",
            "FAILED",
            "FAILED",
            "REJECTED",
        ]
        reasons = [result.notes[index].reason for index in (1, 2, 3)]
        assert reasons == ["DUPLICATE_SEQUENCE", "SEQUENCE_ID_INVALID", "TOKEN_OUT_OF_RANGE"]
        assert [allowed(mask) for mask in result.masks] == [[KEY], [EOS], [EOS], [EOS]]


def test_a_sequence_without_any_stop_token(
    stream: Stream, client: GrammarClient, new_id: NewId
) -> None:
    endless = toy(TOKENS.tokens, stop=[])
    step = step_of(new_id(), grammar_id=client.compile(OBJECT, endless).id)
    answer = stream.step(step)
    assert list(answer.outcomes) == [FAILED]
    assert answer.notes[0].reason == "STOP_TOKENS_INVALID"
    assert "stop_token_ids" in answer.notes[0].message
    step.bindings[0].opening.stop_token_ids.append(EOS)
    answer = stream.step(step)
    assert (list(answer.outcomes), masks_of(answer)) == ([OK], [[KEY]])


def test_rows_of_two_widths(
    stream: Stream, client: GrammarClient, grammar_id: str, new_id: NewId
) -> None:
    wide = client.compile(OBJECT, toy(TOKENS.tokens, stop=[EOS], width=65))
    step = step_of(new_id(), new_id(), grammar_id=grammar_id)
    step.bindings[1].opening.grammar_id = wide.id
    answer = stream.step(step)
    assert list(answer.outcomes) == [OK, FAILED]
    assert answer.notes[0].reason == "WIDTH_MISMATCH"
    assert masks_of(answer) == [[KEY], []]
    # A step of its own is fine.
    answer = stream.step(pb.StepRequest(rows=[1], positions=[0], token_counts=[1], tokens=[OPEN]))
    assert (list(answer.outcomes), masks_of(answer, 65)) == ([OK], [[KEY]])


def test_released_rows_are_unbound(stream: Stream, grammar_id: str, new_id: NewId) -> None:
    first, second = new_id(), new_id()
    stream.step(step_of(first, second, grammar_id=grammar_id))
    step = pb.StepRequest(releases=[0, 0, 99, 2**32 - 1], rows=[0, 1], positions=[1, 1])
    answer = stream.step(step)
    assert list(answer.outcomes) == [UNKNOWN, OK]
    assert answer.notes[0].reason == "ROW_UNBOUND"
    # The row is free for another sequence, and the one that had it is still there.
    swapped = [pb.Binding(row=0, sequence_id=second), pb.Binding(row=1, sequence_id=first)]
    answer = stream.step(pb.StepRequest(bindings=swapped, rows=[1, 0], positions=[1, 1]))
    assert (list(answer.outcomes), masks_of(answer)) == ([OK, OK], [[KEY], [KEY]])


def test_bad_forks_and_closes(stubs: Stubs, stream: Stream, grammar_id: str, new_id: NewId) -> None:
    source, first, second = new_id(), new_id(), new_id()
    stream.step(step_of(source, grammar_id=grammar_id))
    forks = [
        pb.Fork(source_id=source, target_id=first),
        pb.Fork(source_id="nobody", target_id=new_id()),
        pb.Fork(source_id=source, target_id=new_id(), position=2),
        pb.Fork(source_id=source, target_id=""),
        pb.Fork(source_id=source, target_id="x" * 257),
        pb.Fork(source_id=source, target_id=second, position=0),
        pb.Fork(source_id=source, target_id=source),
    ]
    answer = stubs.sequences.ForkSequences(pb.ForkSequencesRequest(forks=forks), timeout=SECONDS)
    assert list(answer.outcomes) == [OK, UNKNOWN, GAP, FAILED, FAILED, OK, OK]
    held = [stubs.held(id_) for id_ in (source, first, second, forks[2].target_id)]
    assert held[:3] == [[OPEN], [OPEN], []]
    assert isinstance(held[3], Refusal)
    many = pb.ForkSequencesRequest(forks=forks[:1] * 4097)
    refusal = refused(lambda: stubs.sequences.ForkSequences(many, timeout=SECONDS))
    assert refusal[:2] == ("RESOURCE_EXHAUSTED", "STEP_TOO_LARGE")
    assert "max_rows" in refusal.message
    ids = pb.CloseSequencesRequest(sequence_ids=[first] * 4097)
    refusal = refused(lambda: stubs.sequences.CloseSequences(ids, timeout=SECONDS))
    assert refusal[:2] == ("RESOURCE_EXHAUSTED", "STEP_TOO_LARGE")
    ids = pb.CloseSequencesRequest(sequence_ids=[first, first, "nobody", "", source])
    assert stubs.sequences.CloseSequences(ids, timeout=SECONDS).closed == 2
