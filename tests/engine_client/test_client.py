"""The client against a service that is well; those that aren't are in test_client_failures."""

import gc
import os
import signal
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import pytest

import engine_client
from engine_client import (
    Grammar,
    GrammarClient,
    GrammarSpec,
    Outcome,
    Refused,
    Row,
    UsageError,
)
from tests.support import ServiceProcess, allowed, running_service, toy, wait_until

VOCABULARY = toy(["{", "}", '"a"', ":", "1", " ", "x", "<eos>"], stop=[7], width=40)
SPEC = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    max_whitespace=0,
)


@pytest.fixture
def grammar(client: GrammarClient) -> Grammar:
    return client.compile(SPEC, VOCABULARY)


def test_the_public_names_are_sorted_and_there() -> None:
    assert engine_client.__all__ == sorted(engine_client.__all__)
    assert all(hasattr(engine_client, name) for name in engine_client.__all__)


def test_two_steps_in_flight_have_masks_of_their_own(
    client: GrammarClient, grammar: Grammar, new_id: Callable[[], str]
) -> None:
    one, other = new_id(), new_id()
    first = client.submit([Row(one, grammar, [])])
    second = client.submit([Row(other, grammar, [0])])
    first_masks = client.collect(first)
    second_masks = client.collect(second)
    assert allowed(first_masks.mask(0)) == [0]
    assert allowed(second_masks.mask(0)) == [2]


def test_a_third_step_in_flight_is_refused_and_dropped_ones_dont_count(
    client: GrammarClient, grammar: Grammar, new_id: Callable[[], str]
) -> None:
    rows = [Row(new_id(), grammar, [])]
    steps = [client.submit(rows), client.submit(rows)]
    with pytest.raises(UsageError, match="collect one"):
        client.submit(rows)
    steps.clear()
    assert allowed(client.step(rows).mask(0)) == [0]


def test_a_batch_that_grows_gets_a_larger_region(
    client: GrammarClient, grammar: Grammar, new_id: Callable[[], str]
) -> None:
    ids = [new_id() for _ in range(200)]
    for count in (1, 20, 200, 3):
        result = client.step([Row(name, grammar, [0], drafts=[2, 3]) for name in ids[:count]])
        assert [allowed(mask) for mask in result.masks[-3:]] == [[2], [3], [4]]
        assert list(result.legal_drafts) == [2] * count
    assert client.stats.snapshot()["regions_made"] == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (lambda g: Row("r", g, [0], position=2), "position 2"),
        (lambda g: Row("r", g, [0], position=-1), "position -1"),
        (lambda g: Row("r", g, [1 << 40]), "32-bit"),
        (lambda g: Row("r", g, ["x"]), "32-bit"),  # type: ignore[list-item]
        (lambda g: Row("r", g, [], drafts=[None]), "32-bit"),  # type: ignore[list-item]
    ],
)
def test_misuse_is_told_at_submit_and_the_next_step_works(
    client: GrammarClient,
    grammar: Grammar,
    new_id: Callable[[], str],
    row: Callable[[Grammar], Row],
    message: str,
) -> None:
    with pytest.raises(UsageError, match=message):
        client.submit([row(grammar)])
    assert client.step([Row(new_id(), grammar, [])]).outcomes == [Outcome.OK]


def test_rows_of_two_widths_are_refused(client: GrammarClient, grammar: Grammar) -> None:
    other = client.compile(SPEC, toy(["{", "}", '"a"', ":", "1", "<eos>"], stop=[5], width=500))
    with pytest.raises(UsageError, match="one mask width"):
        client.submit([Row("a", grammar, []), Row("b", other, [])])
    assert allowed(client.step([Row("b", other, [0])]).mask(0)) == [2]
    assert allowed(client.step([Row("a", grammar, [0])]).mask(0)) == [2]


def test_no_rows_is_a_step_without_masks(client: GrammarClient) -> None:
    result = client.step([])
    assert result.outcomes == []
    assert result.masks.shape[0] == 0


def test_a_step_is_collected_once(client: GrammarClient, grammar: Grammar) -> None:
    step = client.submit([Row("once", grammar, [])])
    client.collect(step)
    with pytest.raises(UsageError, match="once"):
        client.collect(step)


def test_every_thread_has_a_stream_of_its_own(
    client: GrammarClient, grammar: Grammar, new_id: Callable[[], str]
) -> None:
    """Two threads that step one sequence at once, as tensor-parallel ranks do."""
    name, histories = new_id(), [[], [0], [0, 2], [0, 2, 3], [0, 2, 3, 4]]
    wanted = [[0], [2], [3], [4], [1, 4]]
    seen: list[list[list[int]]] = []

    def rank() -> None:
        seen.append([allowed(client.step([Row(name, grammar, h)]).mask(0)) for h in histories])

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [wanted] * 4
    assert client.stats.snapshot()["connects"] == 4


def test_a_thread_that_ends_takes_its_stream_along(
    client: GrammarClient, grammar: Grammar, new_id: Callable[[], str]
) -> None:
    def readers() -> int:
        return sum(thread.name == "grammar-stream" for thread in threading.enumerate())

    before = readers()
    thread = threading.Thread(target=lambda: client.step([Row(new_id(), grammar, [])]))
    thread.start()
    thread.join(30)
    del thread
    gc.collect()
    wait_until(lambda: readers() <= before)


def test_a_refused_spec_has_a_reason(client: GrammarClient) -> None:
    with pytest.raises(Refused) as refused:
        client.compile(GrammarSpec.json_schema({"type": "array", "uniqueItems": True}), VOCABULARY)
    assert refused.value.reason == "SPEC_UNENFORCED"
    assert refused.value.unenforced == (("", "uniqueItems"),)


def test_unusable_region_directories_fall_back_to_inline(
    service: ServiceProcess, tmp_path: Path, new_id: Callable[[], str]
) -> None:
    """A directory that the service doesn't have, and one that isn't there."""
    for directory in (tmp_path, tmp_path / "missing"):
        with GrammarClient(service.target, region_dir=directory) as client:
            grammar = client.compile(SPEC, VOCABULARY)
            for _ in range(3):
                result = client.step([Row(new_id(), grammar, [0])])
                assert allowed(result.mask(0)) == [2]
            assert client.stats.snapshot()["regions_given_up"] == 1
            assert list(tmp_path.iterdir()) == []


def test_regions_leave_nothing_behind(service: ServiceProcess, new_id: Callable[[], str]) -> None:
    with service.client() as client:
        grammar = client.compile(SPEC, VOCABULARY)
        client.step([Row(new_id(), grammar, [])])
        assert not [f for f in os.listdir(service.region_dir) if f.endswith(".masks")]


def test_an_id_with_another_opening_starts_anew(
    client: GrammarClient, new_id: Callable[[], str]
) -> None:
    tokens = toy([*"abcdefgh", "<eos>"], stop=[8])
    ab = client.compile(GrammarSpec.regex("a[bc]*"), tokens)
    de = client.compile(GrammarSpec.regex("d[ef]*"), tokens)
    name = new_id()
    assert allowed(client.step([Row(name, ab, [0])]).mask(0)) == [1, 2, 8]
    assert allowed(client.step([Row(name, de, [])]).mask(0)) == [3]
    assert allowed(client.step([Row(name, de, [3])]).mask(0)) == [4, 5, 8]
    # A stop token that the request brings isn't text any more.
    assert allowed(client.step([Row(name, de, [3], stop_token_ids=(4,))]).mask(0)) == [4, 5, 8]
    assert client.step([Row(name, de, [3, 4], stop_token_ids=(4,))]).outcomes == [
        Outcome.TERMINATED
    ]
    assert allowed(client.step([Row(name, de, [], constraint_start=1)]).mask(0)) == list(range(9))


def test_two_threads_that_open_an_id_differently_each_get_their_own(
    client: GrammarClient, new_id: Callable[[], str]
) -> None:
    tokens = toy([*"abcdefgh", "<eos>"], stop=[8])
    ab = client.compile(GrammarSpec.regex("a[bc]*"), tokens)
    de = client.compile(GrammarSpec.regex("d[ef]*"), tokens)
    name = new_id()
    with futures.ThreadPoolExecutor(1) as other:
        for _ in range(3):
            assert allowed(client.step([Row(name, ab, [0], 1)]).mask(0)) == [1, 2, 8]
            row = Row(name, de, [3], 1)
            assert allowed(other.submit(client.step, [row]).result(30).mask(0)) == [4, 5, 8]


def test_masks_of_steps_in_flight_and_of_the_last_one_are_never_written_over(
    client: GrammarClient, new_id: Callable[[], str]
) -> None:
    tokens = toy([*"abcdefgh", "<eos>"], stop=[8])
    ab = client.compile(GrammarSpec.regex("a[bc]*"), tokens)
    de = client.compile(GrammarSpec.regex("d[ef]*"), tokens)
    a, b, c = Row(new_id(), ab, [0]), Row(new_id(), ab, []), Row(new_id(), de, [3])
    for meanwhile in ("a refused submit", "a step in between", "a dropped step"):
        first = client.submit([a])
        if meanwhile == "a refused submit":
            with pytest.raises(UsageError):
                client.submit([Row("bad", ab, [1 << 40])])
        elif meanwhile == "a step in between":
            between = client.collect(client.submit([b]))
        else:
            client.submit([b])
        last = client.collect(client.submit([c]))
        if meanwhile == "a step in between":
            assert allowed(between.mask(0)) == [0]
        assert allowed(client.collect(first).mask(0)) == [1, 2, 8], meanwhile
        assert allowed(last.mask(0)) == [4, 5, 8], meanwhile


def test_a_refused_submit_binds_nothing(client: GrammarClient, new_id: Callable[[], str]) -> None:
    tokens = toy([*"abcdefgh", "<eos>"], stop=[8])
    ab = client.compile(GrammarSpec.regex("a[bc]*"), tokens)
    de = client.compile(GrammarSpec.regex("d[ef]*"), tokens)
    old, new = new_id(), new_id()
    client.step([Row(old, ab, [0])])
    for bad in ([1 << 40], None):
        with pytest.raises(UsageError):
            client.submit([Row(new, de, bad)])  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        client.submit([Row(new, de, [], stop_token_ids=(-1,))])
    with pytest.raises(UsageError, match="at most 4096 rows"):
        client.submit([Row(f"{new}-{i}", de, []) for i in range(5000)])
    assert allowed(client.step([Row(new, de, [])]).mask(0)) == [3]
    after = client.step([Row(old, ab, [0, 1], 1)])
    assert allowed(after.mask(0)) == [1, 2, 8]
    assert after.notes == {}


def test_a_service_with_few_rows_is_enough_for_many_sequences() -> None:
    with running_service("--max-rows", "8") as service, service.client() as client:
        grammar = client.compile(SPEC, VOCABULARY)
        for turn in range(2):
            for index in range(30):
                result = client.step([Row(f"few-{index}", grammar, [0])])
                assert allowed(result.mask(0)) == [2], (turn, index)


def test_what_is_closed_just_before_the_client_is_closed_too() -> None:
    with running_service(metrics=True) as service:
        with service.client() as client:
            client.step([Row("brief", client.compile(SPEC, VOCABULARY), [])])
            service.freeze()  # so that the call is still on its way when the client ends
            client.close_sequences(["brief"])
            threading.Timer(0.3, service.signal, [signal.SIGCONT]).start()
        wait_until(lambda: service.counted("grammar_sequences") == 0)


def test_closing_what_a_closed_client_knew_is_quiet(service: ServiceProcess) -> None:
    client = service.client()
    client.close()
    client.close_sequences(["late"])
