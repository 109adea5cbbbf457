"""Shared-memory regions: what may be named, and that nothing is written elsewhere."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine_client import GrammarClient, Row
from engine_client.wire import sequences_pb2 as pb
from tests.server import (
    COLON,
    EOS,
    KEY,
    OBJECT,
    OPEN,
    TOKENS,
    Refusal,
    Stream,
    Stubs,
    grammar_id_of,
    masks_of,
    step_of,
    stubs_of,
)
from tests.support import ServiceProcess, allowed, running_service, toy

NewId = Callable[[], str]
Ask = Callable[[pb.StepRequest], pb.StepResponse | Refusal]

UNTOUCHED = 0xA5
KEY_ALONE = (1 << KEY).to_bytes(4, "little")


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
def region(service: ServiceProcess, new_id: NewId) -> Iterator[Path]:
    """A name in the service's directory; whatever a test puts there is removed."""
    path = service.region_dir / new_id()
    yield path
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@pytest.fixture
def step(client: GrammarClient, new_id: NewId) -> Callable[..., pb.StepRequest]:
    """Makes a good step into a region."""
    grammar_id = grammar_id_of(client)

    def make(name: str, *, offset: int = 0, rows: int = 1) -> pb.StepRequest:
        request = step_of(*(new_id() for _ in range(rows)), grammar_id=grammar_id)
        request.region.name = name
        request.region.offset = offset
        return request

    return make


Step = Callable[..., pb.StepRequest]


def fill(path: Path, size: int) -> None:
    path.write_bytes(bytes([UNTOUCHED]) * size)


def refuses(answer: object, reason: str, says: str = "") -> None:
    assert isinstance(answer, Refusal), answer
    code = "NOT_FOUND" if reason == "REGION_NOT_FOUND" else "INVALID_ARGUMENT"
    assert answer[:2] == (code, reason)
    assert says in answer.message


def goes_on(ask: Ask, step: Step, region: Path) -> None:
    """A sound region on the same stream is filled."""
    sound = region.with_name(f"{region.name}.sound")
    fill(sound, 64)
    try:
        answer = ask(step(sound.name))
        assert isinstance(answer, pb.StepResponse), answer
        assert sound.read_bytes() == KEY_ALONE + bytes([UNTOUCHED]) * 60
    finally:
        sound.unlink()


def test_only_the_rows_of_a_step_are_written(ask: Ask, step: Step, region: Path) -> None:
    fill(region, 4096)
    request = step(region.name, offset=64, rows=3)
    request.mask_rows.extend([4, 0, 2])
    answer = ask(request)
    assert isinstance(answer, pb.StepResponse), answer
    assert answer.masks == b"", "they are in the region"
    words = np.frombuffer(region.read_bytes(), dtype="<u4").tolist()
    untouched = int.from_bytes(bytes([UNTOUCHED]) * 4, "little")
    written = {16 + row for row in (0, 2, 4)}
    assert [words[index] for index in sorted(written)] == [1 << KEY] * 3
    assert {word for index, word in enumerate(words) if index not in written} == {untouched}


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", ".hidden", "a/b", "/etc/passwd", "../outside", "a\\..\\b/"),
        *("a\0b", "nul\0", "a b", "new\nline", "line\n", "ü", "x" * 129, "x" * 100_000, "%2e%2e"),
    ],
)
def test_names_that_are_no_names(ask: Ask, step: Step, region: Path, name: str) -> None:
    answer = ask(step(name))
    refuses(answer, "REGION_INVALID", "A-Z a-z 0-9 . _ -")
    assert isinstance(answer, Refusal)
    assert len(answer.message) < 500
    goes_on(ask, step, region)


def test_a_name_may_be_128_long(ask: Ask, step: Step, region: Path) -> None:
    path = region.with_name(region.name.ljust(128, "_"))
    fill(path, 64)
    try:
        assert isinstance(ask(step(path.name)), pb.StepResponse)
        assert path.read_bytes()[:4] == KEY_ALONE
    finally:
        path.unlink()


def test_a_region_that_is_not_there(ask: Ask, step: Step, region: Path) -> None:
    refuses(ask(step(region.name)), "REGION_NOT_FOUND", "do both mount the same one?")
    goes_on(ask, step, region)


def test_links_are_not_followed(ask: Ask, step: Step, region: Path, tmp_path: Path) -> None:
    inside = region.with_name(f"{region.name}.inside")
    outside = tmp_path / "outside"
    for target in (inside, outside):
        fill(target, 64)
        region.symlink_to(target)
        refuses(ask(step(region.name)), "REGION_INVALID", region.name)
        assert target.read_bytes() == bytes([UNTOUCHED]) * 64
        region.unlink()
    os.link(inside, region)
    refuses(ask(step(region.name)), "REGION_INVALID", "link")
    assert inside.read_bytes() == bytes([UNTOUCHED]) * 64
    inside.unlink()
    # Now that it has one name only, it is a region like any other.
    assert isinstance(ask(step(region.name)), pb.StepResponse)
    goes_on(ask, step, region)


def test_what_is_no_file(ask: Ask, step: Step, region: Path) -> None:
    region.symlink_to("nowhere")
    refuses(ask(step(region.name)), "REGION_INVALID", region.name)
    region.unlink()
    region.mkdir()
    refuses(ask(step(region.name)), "REGION_INVALID", region.name)
    region.rmdir()
    os.mkfifo(region)
    refuses(ask(step(region.name)), "REGION_INVALID", region.name)
    region.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(region))
        refuses(ask(step(region.name)), "REGION_INVALID", region.name)
    region.unlink()
    goes_on(ask, step, region)


@pytest.mark.parametrize("size", [0, 3, 4, 11])
def test_too_small(ask: Ask, step: Step, region: Path, size: int) -> None:
    fill(region, size)
    refuses(ask(step(region.name, rows=3)), "REGION_TOO_SMALL", region.name)
    assert region.read_bytes() == bytes([UNTOUCHED]) * size
    goes_on(ask, step, region)


def test_larger_than_allowed(ask: Ask, step: Step, region: Path) -> None:
    region.touch()
    os.truncate(region, (1 << 30) + 4096)
    refuses(ask(step(region.name)), "REGION_INVALID", "max_region_bytes")
    goes_on(ask, step, region)


@pytest.mark.parametrize("offset", [1, 4, 63, 2**64 - 1])
def test_an_offset_that_is_not_aligned(ask: Ask, step: Step, region: Path, offset: int) -> None:
    fill(region, 4096)
    refuses(ask(step(region.name, offset=offset)), "REGION_INVALID", "multiple of 64")
    assert set(region.read_bytes()) == {UNTOUCHED}
    goes_on(ask, step, region)


@pytest.mark.parametrize("offset", [4096, 8192, 2**63, 2**64 - 64])
def test_an_offset_past_the_end(ask: Ask, step: Step, region: Path, offset: int) -> None:
    fill(region, 4096)
    refuses(ask(step(region.name, offset=offset)), "REGION_TOO_SMALL", "4096 bytes")
    assert set(region.read_bytes()) == {UNTOUCHED}
    goes_on(ask, step, region)


def test_a_region_that_is_cut_short_between_steps(stream: Stream, step: Step, region: Path) -> None:
    fill(region, 4096)
    stream.step(step(region.name, offset=64))
    os.truncate(region, 64)
    # Writing there would be a bus error, the end of the service.
    refuses(stream.ask(step(region.name, offset=64)), "REGION_TOO_SMALL", "64 bytes")
    stream.step(step(region.name))
    assert region.read_bytes()[:4] == KEY_ALONE
    os.truncate(region, 4096)
    stream.step(step(region.name, offset=64))
    assert region.read_bytes()[64:68] == KEY_ALONE
    goes_on(stream.ask, step, region)


def test_a_region_that_is_cut_short_within_a_step() -> None:
    """A caller that truncates while masks are written ends its own step, not the service."""
    wide = toy(TOKENS.tokens, stop=[EOS], width=1_000_000)
    size = 40 * 125_000
    with (
        running_service() as service,
        service.client() as client,
        stubs_of(service.target) as stubs,
    ):
        step = step_of(
            *(f"s{row}" for row in range(40)), grammar_id=client.compile(OBJECT, wide).id
        )
        path = service.region_dir / "short"
        fill(path, size)
        step.region.name = path.name
        stop = threading.Event()

        def flip() -> None:
            while not stop.is_set():
                os.truncate(path, 0)
                os.truncate(path, size)

        with ThreadPoolExecutor(1) as pool:
            flipping = pool.submit(flip)
            try:
                answers = [stubs.unary(step) for _ in range(40)]
            finally:
                stop.set()
            flipping.result()
        reasons = {answer.reason for answer in answers if isinstance(answer, Refusal)}
        assert reasons <= {"REGION_TOO_SMALL", "REGION_INVALID"}
        os.truncate(path, size)
        assert isinstance(stubs.unary(step), pb.StepResponse)
        assert path.read_bytes()[:4] == KEY_ALONE


def test_a_refused_step_leaves_its_sequences_alone(
    ask: Ask, stubs: Stubs, step: Step, region: Path
) -> None:
    request = step(region.name)
    sequence_id = request.bindings[0].sequence_id
    refuses(ask(request), "REGION_NOT_FOUND")
    assert stubs.held(sequence_id) in ([], ("NOT_FOUND", "UNKNOWN_SEQUENCE"))
    fill(region, 64)
    assert isinstance(ask(request), pb.StepResponse)
    assert stubs.held(sequence_id) == [OPEN]


def test_a_mapped_region_may_be_unlinked(stream: Stream, step: Step, region: Path) -> None:
    fill(region, 4096)
    with region.open("rb") as ours:
        stream.step(step(region.name))
        region.unlink()
        stream.step(step(region.name, offset=64))
        ours.seek(64)
        assert ours.read(4) == KEY_ALONE


def test_many_regions_on_one_stream(stream: Stream, step: Step, region: Path) -> None:
    """A stream keeps a few mappings; older ones are mapped again when they are named again."""
    paths = [region.with_name(f"{region.name}.{index}") for index in range(10)]
    try:
        for path in paths:
            fill(path, 64)
        for path in [*paths, *reversed(paths)]:
            stream.step(step(path.name))
            assert path.read_bytes()[:4] == KEY_ALONE
            fill(path, 64)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


# Where masks go is said by mask_rows, too.
@pytest.mark.parametrize("mask_rows", [[0, 0], [0, 2], [2, 3], [1, 0]])
def test_mask_rows_that_overlap(ask: Ask, step: Step, region: Path, mask_rows: list[int]) -> None:
    fill(region, 64)
    request = step(region.name, rows=2)
    request.mask_rows.extend(mask_rows)
    request.draft_counts.extend([2, 2])
    request.drafts.extend([KEY, COLON] * 2)
    answer = ask(request)
    refuses(answer, "STEP_MALFORMED", "belongs to two entries")
    assert set(region.read_bytes()) == {UNTOUCHED}
    request.mask_rows[:] = [3, 0]
    assert isinstance(ask(request), pb.StepResponse)
    words = np.frombuffer(region.read_bytes()[:24], dtype="<u4").tolist()
    assert [word.bit_length() - 1 for word in words] == [KEY, COLON, 4] * 2


def test_mask_rows_apart_inline(stream: Stream, step: Step) -> None:
    request = step("", rows=8)
    request.ClearField("region")
    stream.step(request)
    request = step("", rows=2)
    request.ClearField("region")
    request.mask_rows.extend([5, 2])
    # The rows between belong to nobody, so there is nothing in them: not what others had there.
    assert masks_of(stream.step(request)) == [[], [], [KEY], [], [], [KEY]]


def test_the_client_goes_inline_where_directories_differ(
    service: ServiceProcess, new_id: NewId, tmp_path: Path
) -> None:
    with GrammarClient(service.target, region_dir=tmp_path, step_timeout=20) as client:
        grammar = client.compile(OBJECT, TOKENS)
        sequence_id = new_id()
        for tokens, following in (([OPEN], [KEY]), ([OPEN, KEY], [COLON])):
            result = client.step([Row(sequence_id, grammar, tokens)])
            assert allowed(result.mask(0)) == following
        assert client.stats.snapshot()["regions_given_up"] == 1
        assert list(tmp_path.iterdir()) == []


def test_the_client_leaves_no_region_behind(service: ServiceProcess, new_id: NewId) -> None:
    before = set(service.region_dir.iterdir())
    with service.client() as client:
        grammar = client.compile(OBJECT, TOKENS)
        rows = [Row(new_id(), grammar, [OPEN]) for _ in range(40)]
        for count in (1, 40, 2):
            client.step(rows[:count])
        assert client.stats.snapshot()["regions_made"] >= 2
    assert set(service.region_dir.iterdir()) <= before
