"""What becomes of rows that the service didn't answer: fail, in process, or unconstrained.

The in-process matcher is rebuilt from the history at each step, so that nothing has to be kept in
line with the service: some microseconds a token. Specs are compiled when the client compiles
them, never in a step.
"""

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_client.pending import PendingStep
from engine_client.spec import GrammarSpec, GrammarType
from engine_client.stats import Stats
from engine_client.types import Grammar, Note, Outcome, Policy, Row

if TYPE_CHECKING:
    import torch

_KEPT_GRAMMARS = 256
_GONE = "SERVICE_UNREACHABLE"
_NO_ANSWER = "the grammar service didn't answer within the deadline"
_IN_PROCESS = "the service is gone; this row is masked in process"

_log = logging.getLogger("engine_client")


class Fallback:
    """Settles rows by policy. Thread-safe."""

    def __init__(self, policy: Policy, stats: Stats) -> None:
        self._policy = policy
        self._stats = stats
        self._compiled: OrderedDict[str, Callable[[list[int]], _Matcher]] = OrderedDict()
        self._lock = Lock()

    def prepare(self, grammar: Grammar) -> None:
        """Compiles a grammar in this process, if the policy may need it. Logs what it can't."""
        if self._policy is not Policy.IN_PROCESS or grammar.id in self._compiled:
            return
        try:
            compiled = _compile(grammar)
        except (ImportError, ValueError) as error:
            _log.warning("grammar %s has no in-process fallback: %s", grammar.id, error)
            self._stats.add("fallbacks_missing")
            return
        with self._lock:
            self._compiled[grammar.id] = compiled
            if len(self._compiled) > _KEPT_GRAMMARS:
                self._compiled.popitem(last=False)

    def settle(self, step: PendingStep) -> None:
        """Settles the rows that have no outcome."""
        for index in step.unsettled():
            row = step.rows[index]
            policy = row.policy or self._policy
            message = _NO_ANSWER
            if policy is Policy.IN_PROCESS and not self._match(step, index):
                policy = Policy.FAIL
                message += (
                    ", and its grammar has no matcher in this process: that takes its backend "
                    "here, and a client whose own policy is IN_PROCESS"
                )
            if policy is Policy.UNCONSTRAINED:
                first = step.mask_rows[index]
                everything = mask_of(range(row.grammar.token_limit), step)
                step.writable()[first : first + 1 + len(row.drafts)] = everything
                step.outcomes[index] = Outcome.OK
                step.legal_drafts[index] = len(row.drafts)
                step.notes[index] = Note("UNCONSTRAINED", f"{_NO_ANSWER}: anything is allowed")
            if policy is Policy.FAIL:
                step.fail(index, _GONE, message)
            self._stats.add(f"policy_{policy.value}")

    def close_failed(self, step: PendingStep) -> None:
        """Gives failed rows the only mask that is safe: stop tokens."""
        for index, outcome in enumerate(step.outcomes):
            if outcome is Outcome.FAILED:
                row = step.rows[index]
                first = step.mask_rows[index]
                stops = mask_of(row.all_stop_tokens(), step)
                step.writable()[first : first + 1 + len(row.drafts)] = stops

    def _match(self, step: PendingStep, index: int) -> bool:
        """Masks a row in this process; False if that can't be done."""
        row = step.rows[index]
        compiled = self._compiled.get(row.grammar.id)
        if compiled is None:
            return False
        try:
            _match_row(step, index, compiled)
        except Exception as error:  # a library's error must not reach the engine
            _log.warning("in-process matching of %s failed: %s", row.sequence_id, error)
            return False
        return True


class _XGrammar:
    """One row's matcher of xgrammar."""

    def __init__(self, compiled: Any, stops: list[int]) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stops)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def completed(self) -> bool:
        return bool(self._matcher.is_completed())

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_terminated())

    def fill(self, masks: "torch.Tensor") -> None:
        self._matcher.fill_next_token_bitmask(masks, 0)


class _LLGuidance:
    """One row's matcher of llguidance."""

    def __init__(self, prototype: Any, end: int, stops: list[int]) -> None:
        from engine_client.in_process_llguidance import Matcher

        self._matcher = Matcher(prototype.deep_copy(), end, stops)

    def accept(self, token: int) -> bool:
        return self._matcher.accept(token)

    def completed(self) -> bool:
        return self._matcher.completed()

    @property
    def ended(self) -> bool:
        return self._matcher.ended

    def fill(self, masks: "torch.Tensor") -> None:
        from llguidance import LLExecutor

        from engine_client.in_process_llguidance import fill

        fill(LLExecutor(1), [self._matcher], masks, [0])


_Matcher = _XGrammar | _LLGuidance


def _compile(grammar: Grammar) -> Callable[[list[int]], _Matcher]:
    """Compiles in this process; what comes of it makes a matcher from stop tokens."""
    spec = _compiled_spec(grammar)
    vocabulary = grammar.vocabulary
    if vocabulary is None:
        raise ValueError("it was asked for by id, without its vocabulary")
    match grammar.backend:
        case "xgrammar":
            from engine_client.in_process import compile_spec

            compiled = compile_spec(spec, vocabulary)
            return lambda stops: _XGrammar(compiled, stops)
        case "llguidance":
            from engine_client.in_process_llguidance import build, lark_of, tokenizer_of

            prototype = build(lark_of(spec), vocabulary)
            end = tokenizer_of(vocabulary).eos_token
            return lambda stops: _LLGuidance(prototype, end, stops)
        case other:
            raise ValueError(f"its backend is {other}, which isn't matched in process")


def _compiled_spec(grammar: Grammar) -> GrammarSpec:
    """What the service's backend compiled, so that the masks here are the same."""
    kind = grammar.spec.type
    if kind is GrammarType.JSON_OBJECT:
        kind = GrammarType.JSON_SCHEMA
    return dataclasses.replace(grammar.spec, type=kind, source=grammar.compiled_source)


def mask_of(token_ids: Iterable[int], step: PendingStep) -> "torch.Tensor":
    """int32[words] that allows just these tokens."""
    import torch

    bits = np.zeros(step.words * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4").astype(np.int32))


def _match_row(step: PendingStep, index: int, make: Callable[[list[int]], _Matcher]) -> None:
    """One row's step, as the service would take it."""
    row = step.rows[index]
    stops = row.all_stop_tokens()
    matcher = make(stops)
    masks = step.writable()[step.mask_rows[index] :][: 1 + len(row.drafts)]
    step.outcomes[index], step.notes[index] = _replay(matcher, row)
    if step.outcomes[index] is not Outcome.OK:
        masks[:] = mask_of(stops, step)
        return
    if matcher.completed() and len(row.tokens) >= row.constraint_start:
        step.outcomes[index] = Outcome.COMPLETE
    legal = 0
    _fill(matcher, row, len(row.tokens), masks[0], step)
    for draft in row.drafts:
        position = len(row.tokens) + legal
        if matcher.ended or not 0 <= draft < row.grammar.token_limit:
            break
        if position >= row.constraint_start and not matcher.accept(draft):
            break
        legal += 1
        _fill(matcher, row, position + 1, masks[legal], step)
    step.legal_drafts[index] = legal
    masks[legal + 1 :] = masks[legal]


def _replay(matcher: _Matcher, row: Row) -> tuple[Outcome, Note]:
    """Feeds the history to a new matcher."""
    start = row.constraint_start
    for index, token in enumerate(row.tokens[start:], start):
        if matcher.ended:
            ignored = len(row.tokens) - index
            return Outcome.TERMINATED, Note("IN_PROCESS", _IN_PROCESS, ignored=ignored)
        if not 0 <= token < row.grammar.token_limit or not matcher.accept(token):
            why = f"the grammar doesn't allow token {token}"
            return Outcome.REJECTED, Note("TOKEN_ILLEGAL", why, accepted=index)
    note = Note("IN_PROCESS", _IN_PROCESS)
    return (Outcome.TERMINATED if matcher.ended else Outcome.OK), note


def _fill(
    matcher: _Matcher, row: Row, position: int, mask: "torch.Tensor", step: PendingStep
) -> None:
    """The mask of the token at a position: int32[words]. Never empty: it fails closed."""
    if position < row.constraint_start:
        mask[:] = mask_of(range(row.grammar.token_limit), step)
        return
    if not matcher.ended:
        matcher.fill(mask.view(1, -1))
        used = row.grammar.width % 32
        if used:
            mask[-1] &= (1 << used) - 1
    if matcher.ended or not bool(mask.any()):
        mask[:] = mask_of(row.all_stop_tokens(), step)
