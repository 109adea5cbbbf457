"""Random interleavings of everything that can happen to sequences, against the oracle."""

from dataclasses import dataclass, field
from itertools import count

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from engine_client import Grammar, Outcome, Row, StepResult
from tests.oracle.plain import END, EOS, PIECES, VOCABULARY, Answer, Case, answer, cases, ids
from tests.support import ServiceProcess, running_service

_MACHINES = count()
_TOKEN = st.integers(-1, len(PIECES) + 2)


@dataclass
class Sequence:
    """What the test knows of a sequence: all that the law needs."""

    id: str
    case: int
    stops: tuple[int, ...]
    start: int
    history: list[int] = field(default_factory=list)
    stepped: list[int] = field(default_factory=list)
    """The history as the last step had it."""
    past: list[list[int]] = field(default_factory=list)


class Lives(RuleBasedStateMachine):
    """Sequences that live side by side; each rule steps some of them and checks all masks."""

    service: ServiceProcess
    cases: list[Case]

    def __init__(self) -> None:
        super().__init__()
        self.prefix = f"oracle-{next(_MACHINES)}"
        self.clients = [self.service.client(shared=True), self.service.client(shared=False)]
        self.grammars: list[Grammar] = [
            self.clients[0].compile(case.spec, VOCABULARY) for case in self.cases
        ]
        self.plain = [
            case.plain(grammar) for case, grammar in zip(self.cases, self.grammars, strict=True)
        ]
        self.sequences: list[Sequence] = []
        self.made = 0

    def teardown(self) -> None:
        self.clients[0].close_sequences([sequence.id for sequence in self.sequences])
        for client in self.clients:
            client.close()

    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        self.made += 1
        sequence = Sequence(
            f"{self.prefix}-{self.made}",
            data.draw(st.integers(0, len(self.cases) - 1), "case"),
            data.draw(st.sampled_from([(), (END,), (END, EOS)]), "stops"),
            data.draw(st.sampled_from([0, 0, 0, 2]), "start"),
        )
        self.sequences.append(sequence)
        self._step(data, [sequence])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        """Some sequences take tokens, mostly legal ones; some have drafts."""
        chosen = data.draw(
            st.lists(st.sampled_from(self.sequences), min_size=1, max_size=4, unique_by=id)
        )
        for sequence in chosen:
            for _ in range(data.draw(st.integers(0, 6), "tokens")):
                sequence.history.append(self._token(data, sequence, sequence.history))
        self._step(data, chosen)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        keep = data.draw(st.integers(0, len(sequence.history)), "keep")
        del sequence.history[keep:]
        if data.draw(st.booleans(), "and go elsewhere"):
            sequence.history.append(self._token(data, sequence, sequence.history))
        self._step(data, [sequence])

    @precondition(lambda self: any(sequence.past for sequence in self.sequences))
    @rule(data=st.data())
    def repeat_an_old_step(self, data: st.DataObject) -> None:
        """A late retry: right for its position, and the next step heals what it rewound."""
        sequence = data.draw(st.sampled_from([s for s in self.sequences if s.past]))
        old = data.draw(st.sampled_from(sequence.past))
        row = self._row(sequence, old, 0, [])
        self._check(sequence, old, [], self.clients[0].step([row]), 0)
        sequence.stepped = list(old)
        self._step(data, [sequence])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.sequences))
        self.made += 1
        child = Sequence(
            f"{self.prefix}-{self.made}", parent.case, parent.stops, parent.start,
            list(parent.history), list(parent.stepped),
        )  # fmt: skip
        self.clients[0].fork(parent.id, [child.id])
        self.sequences.append(child)
        self._step(data, [child, parent])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close_and_go_on(self, data: st.DataObject) -> None:
        """The service forgets the sequence; the engine, which knows no better, goes on."""
        sequence = data.draw(st.sampled_from(self.sequences))
        self.clients[0].close_sequences([sequence.id])
        self._step(data, [sequence])

    @precondition(lambda self: len(self.sequences) > 1)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.clients[0].close_sequences([sequence.id])

    @rule(which=st.integers(0, 1))
    def reconnect(self, which: int) -> None:
        self.clients[which].close()
        self.clients[which] = self.service.client(shared=which == 0)

    def _token(self, data: st.DataObject, sequence: Sequence, history: list[int]) -> int:
        if data.draw(st.integers(0, 24), "any token") == 24:
            return data.draw(_TOKEN, "token")
        legal = self._answer(sequence, history, []).masks[0]
        return data.draw(st.sampled_from(sorted(legal)), "legal token")

    def _step(self, data: st.DataObject, sequences: list[Sequence]) -> None:
        client = data.draw(st.sampled_from(self.clients), "client")
        chains, rows = [], []
        for sequence in sequences:
            drafts: list[int] = []
            for _ in range(data.draw(st.integers(0, 3), "drafts")):
                drafts.append(self._token(data, sequence, sequence.history + drafts))
            common = _common(sequence.stepped, sequence.history)
            position = data.draw(st.sampled_from([0, common]), "position")
            rows.append(self._row(sequence, sequence.history, position, drafts))
            chains.append(drafts)
        result = client.step(rows)
        for index, (sequence, drafts) in enumerate(zip(sequences, chains, strict=True)):
            self._check(sequence, sequence.history, drafts, result, index)
            sequence.stepped = list(sequence.history)
            sequence.past.append(list(sequence.history))

    def _row(self, sequence: Sequence, history: list[int], position: int, drafts: list[int]) -> Row:
        return Row(
            sequence.id,
            self.grammars[sequence.case],
            list(history),
            position,
            drafts,
            sequence.stops,
            sequence.start,
        )

    def _answer(self, sequence: Sequence, history: list[int], drafts: list[int]) -> Answer:
        return answer(
            self.plain[sequence.case],
            history,
            drafts,
            stops=sorted({EOS, *sequence.stops}),
            start=sequence.start,
        )

    def _check(
        self,
        sequence: Sequence,
        history: list[int],
        drafts: list[int],
        result: StepResult,
        index: int,
    ) -> None:
        expected = self._answer(sequence, history, drafts)
        first = result.mask_rows[index]
        masks = [ids(result.masks[first + i]) for i in range(1 + len(drafts))]
        outcome = result.outcomes[index]
        note = result.notes.get(index)
        if outcome is Outcome.FAILED and note is not None and note.reason == "DEAD_END":
            # The grammar allows nothing that the vocabulary has; the oracle's mask was empty.
            outcome = Outcome.OK
        assert outcome is expected.outcome, note
        assert result.legal_drafts[index] == expected.legal_drafts
        assert masks == expected.masks


def _live(service: ServiceProcess) -> None:
    run_state_machine_as_test(
        type("Lives", (Lives,), {"service": service, "cases": cases()}),
        settings=settings(
            max_examples=80,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            # Shrinking takes minutes with a real service; add Phase.shrink to look into a failure.
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )


def test_every_mask_is_the_oracles(service: ServiceProcess) -> None:
    _live(service)


def test_every_mask_is_the_oracles_when_matchers_are_evicted() -> None:
    """A service that keeps few matchers, so that replay is the rule."""
    with running_service("--matcher-cache-bytes", "60000") as service:
        _live(service)


def _common(one: list[int], other: list[int]) -> int:
    for index, pair in enumerate(zip(one, other, strict=False)):
        if pair[0] != pair[1]:
            return index
    return min(len(one), len(other))
