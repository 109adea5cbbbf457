"""The service is killed at random moments, and the engine goes on as if nothing had been."""

import random
import threading
import time

import pytest

from engine_client import GrammarClient, Outcome, Row
from tests.oracle.plain import EOS, VOCABULARY, answer, cases, ids
from tests.support import ServiceProcess, running_service

KILLS = 20
ROWS = 6


class Killer(threading.Thread):
    """Kills the service and starts it again, some milliseconds from now."""

    def __init__(self, service: ServiceProcess, seconds: float) -> None:
        super().__init__()
        self._service = service
        self._seconds = seconds

    def run(self) -> None:
        time.sleep(self._seconds)  # a random moment of a step, not a wait for something
        self._service.kill()
        self._service.start()


@pytest.mark.timeout(300)
def test_a_killed_service_costs_time_and_nothing_else() -> None:
    chance = random.Random(20261130)
    with running_service() as service, service.client(step_timeout=60) as client:
        engine = Engine(client, chance)
        for kill in range(KILLS):
            killer = Killer(service, chance.uniform(0, 0.02))
            killer.start()
            while killer.is_alive():
                engine.step()
            killer.join()
            engine.step()
            assert engine.steps > kill
        counts = client.stats.snapshot()
        assert counts["connects"] >= 1 + KILLS
        assert counts["healed_unknown_grammar"] > 0
        assert "timeouts" not in counts


class Engine:
    """Decodes sequences of all grammars, with drafts, and checks each mask against the oracle."""

    def __init__(self, client: GrammarClient, chance: random.Random) -> None:
        self._client = client
        self._chance = chance
        self._cases = cases()
        self._grammars = [client.compile(case.spec, VOCABULARY) for case in self._cases]
        self._plain = [
            case.plain(grammar) for case, grammar in zip(self._cases, self._grammars, strict=True)
        ]
        self._made = 0
        self._live = [self._new() for _ in range(ROWS)]
        self.steps = 0

    def step(self) -> None:
        """One step of all sequences; ended ones are replaced."""
        rows, expected = [], []
        for sequence_id, case, history in self._live:
            drafts = self._drafts(case, history)
            position = max(0, len(history) - 1)
            grammar = self._grammars[case]
            rows.append(Row(sequence_id, grammar, list(history), position, drafts))
            expected.append(answer(self._plain[case], history, drafts))
        result = self._client.step(rows)
        self.steps += 1
        for index, (row, wanted) in enumerate(zip(rows, expected, strict=True)):
            first = result.mask_rows[index]
            masks = [ids(result.masks[first + i]) for i in range(1 + len(row.drafts))]
            note = result.notes.get(index)
            dead_end = note is not None and note.reason == "DEAD_END"
            assert dead_end or result.outcomes[index] is wanted.outcome, note
            assert result.legal_drafts[index] == wanted.legal_drafts
            assert masks == wanted.masks
            self._sample(index, result.outcomes[index], masks[0])

    def _new(self) -> tuple[str, int, list[int]]:
        self._made += 1
        return f"killed-{self._made}", self._chance.randrange(len(self._cases)), []

    def _drafts(self, case: int, history: list[int]) -> list[int]:
        drafts: list[int] = []
        for _ in range(self._chance.randrange(3)):
            allowed = answer(self._plain[case], history + drafts).masks[0]
            drafts.append(self._chance.choice(sorted(allowed)))
        return drafts

    def _sample(self, index: int, outcome: Outcome, allowed: frozenset[int]) -> None:
        sequence_id, _, history = self._live[index]
        if outcome is Outcome.FAILED or history[-1:] == [EOS] or len(history) > 60:
            self._client.close_sequences([sequence_id])
            self._live[index] = self._new()
        else:
            history.append(self._chance.choice(sorted(allowed)))
