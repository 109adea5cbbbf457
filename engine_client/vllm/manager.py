"""vLLM's structured-output manager as a client of the service: one call a step, no grammar here.

EngineCore makes one, and calls it like this (vllm/v1/engine/core.py, v1/core/sched/scheduler.py):

    grammar_init ──> a future: the request waits for its grammar, the engine doesn't
    grammar_bitmask ──> after the forward pass was launched: one step for all requests, accepted
                        tokens and drafts ride along
    accept_tokens ──> the tokens are kept for the next step; False ends the request with an error
    validate_tokens ──> drafts go on as they are: the masks between them reject the illegal ones

An exception out of any of these ends the engine for everyone, so none comes out.
"""

import itertools
import logging
import uuid
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import strip_speculative_padding

from engine_client.types import Grammar, Note, Outcome, Row, StepResult
from engine_client.vllm.grammars import Grammars
from engine_client.vllm.requests import spec_of_params
from engine_client.vllm.settings import EngineSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_log = logging.getLogger("engine_client.vllm")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Constraint:
    """A request's grammar and the tokens that it constrains. Freeing it closes the sequence."""

    request_id: str
    row: Row
    tokens: list[int] = field(default_factory=list)
    """Tokens of the output that the grammar has to admit: none before the end of reasoning."""
    error: str = ""
    """Why the request has to end."""
    masks: "npt.NDArray[np.int32] | None" = None
    """Its rows of the last step's masks, until its tokens come."""


class _Entry(NamedTuple):
    """Where a request's masks go.

    Attributes:
        first: Its first row in the engine's masks; it has one for each scheduled draft, and one.
        total: How many it has.
        constraint: None where no row is masked.
        begin: First row that is masked.
        end: The row after the last one that is masked; padding follows.
        drafts_from: The draft that the grammar is fed first: row `begin` is that much later.
    """

    first: int
    total: int
    constraint: Constraint | None
    begin: int = 0
    end: int = 0
    drafts_from: int = 0


class GrammarManager(StructuredOutputManager):
    """Takes the place of vLLM's manager."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        super().__init__(vllm_config)
        self._settings = EngineSettings()
        self._config = vllm_config.structured_outputs_config
        self.grammars = Grammars(
            self._settings, vllm_config.model_config, getattr(self, "tokenizer", None)
        )
        """The client, and its counts."""
        self._words = (vllm_config.model_config.get_vocab_size() + 31) // 32
        # Engines that share a service may have requests of equal ids.
        self._prefix = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self.steps = 0
        """Calls to the service so far: one an engine step that masks anything."""
        _log.info("structured outputs are masked by the grammar service at %s",
                  self._settings.target)  # fmt: skip

    def grammar_init(self, request: "Request") -> None:
        """Starts the compile of a request's grammar."""
        wanted = request.structured_output_request
        if wanted is None:
            return
        made: Future[Constraint] = Future()
        try:
            spec = spec_of_params(wanted.params, self._config, self._settings.allow_unenforced)
            compiled = self.grammars.compile(spec)
        except Exception as error:
            _log.warning("request %s has no grammar: %s", request.request_id, error)
            made.set_exception(error)
        else:
            compiled.add_done_callback(lambda done: self._constrain(request, done, made))
        if not self._use_async_grammar_compilation:
            # Ranks that schedule for themselves have to take the request in the same step.
            wait([made], self._settings.timeout)
        wanted.grammar = made

    def grammar_bitmask(
        self,
        requests: "dict[str, Request]",
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> "npt.NDArray[np.int32] | None":
        """Masks of int32[rows, words]: 1 + scheduled drafts rows a request, in order of the ids."""
        if not structured_output_request_ids:
            return None
        entries: list[_Entry] = []
        first = 0
        for request_id in structured_output_request_ids:
            drafts = scheduled_spec_decode_tokens.get(request_id, [])
            entries.append(self._entry(requests.get(request_id), first, drafts))
            first += len(drafts) + 1
        masked = [entry for entry in entries if entry.constraint is not None]
        try:
            result = self._step([entry.constraint.row for entry in masked if entry.constraint])
            return self._place(entries, masked, first, result)
        except Exception:
            # Whatever is sampled now isn't shown: accept_tokens ends these requests.
            _log.exception("masking a step failed; its constrained requests end")
            for entry in masked:
                _fail(entry.constraint, "the client failed")
            return self._free_masks(first)

    def accept_tokens(self, request: "Request", new_token_ids: list[int]) -> bool:
        """Keeps the tokens for the next step; False if the request has to end."""
        wanted = request.structured_output_request
        if wanted is None or not new_token_ids:
            return True
        constraint = wanted.grammar
        try:
            start, _ = self._get_constraint_bounds(
                request, new_token_ids, spec_tokens_committed=True
            )
        except Exception:
            _log.exception("the reasoning parser failed; request %s ends", request.request_id)
            return False
        if start > len(new_token_ids):
            return True
        wanted.reasoning_ended = True
        if not isinstance(constraint, Constraint):
            return False
        _check_tokens(constraint, new_token_ids)
        constraint.tokens += new_token_ids[start:]
        return not constraint.error

    def validate_tokens(self, request: "Request", spec_tokens: list[int]) -> list[int]:
        """The drafts without their padding. Illegal ones meet a mask that rejects them."""
        if not request.use_structured_output:
            return spec_tokens
        return list(strip_speculative_padding(spec_tokens))

    def clear_backend(self) -> None:
        """Ends the client with the engine."""
        super().clear_backend()
        self.grammars.close()

    def _constrain(
        self, request: "Request", compiled: "Future[Grammar]", made: "Future[Constraint]"
    ) -> None:
        """Makes what a request steps with, when its grammar is there."""
        if compiled.cancelled():
            made.cancel()
            return
        error = compiled.exception()
        if error is not None:
            _log.warning("request %s has no grammar: %s", request.request_id, error)
            made.set_exception(error)
            return
        grammar, params = compiled.result(), request.sampling_params
        stops = params.all_stop_token_ids if params is not None else ()
        tokens: list[int] = []
        row = Row(
            f"{self._prefix}-{next(self._numbers)}-{request.request_id[:200]}",
            grammar,
            tokens,
            # One that the tokenizer lacks can't be sampled; vLLM lets it pass.
            stop_token_ids=tuple(sorted(stop for stop in stops if stop < grammar.token_limit)),
        )
        constraint = Constraint(request.request_id, row, tokens)
        held = weakref.ref(request)
        self.grammars.close_with(constraint, row.sequence_id, lambda: _is_over(held()))
        made.set_result(constraint)

    def _entry(self, request: "Request | None", first: int, drafts: Sequence[int]) -> _Entry:
        """What a request is to be masked with in this step."""
        free = _Entry(first, len(drafts) + 1, None)
        wanted = request.structured_output_request if request is not None else None
        if request is None or wanted is None:
            return free
        constraint = wanted.grammar
        if not isinstance(constraint, Constraint):
            return free  # never scheduled: the request ends with its compile's error
        fed = list(strip_speculative_padding(list(drafts)))
        try:
            grammar_start, constraint_start = self._get_constraint_bounds(request, fed)
        except Exception:
            _log.exception("the reasoning parser failed; request %s ends", request.request_id)
            _fail(constraint, "the reasoning parser failed")
            return free
        if constraint_start > len(fed):
            return free
        row = constraint.row
        row.drafts = fed[grammar_start:]
        return _Entry(
            first, len(drafts) + 1, constraint, constraint_start, len(fed) + 1, grammar_start
        )

    def _step(self, rows: list[Row]) -> StepResult | None:
        """One call for all rows; none where there are none."""
        if not rows:
            return None
        self.steps += 1
        client = self.grammars.client
        result = client.collect(client.submit(rows))
        for row in rows:
            row.position = len(row.tokens)
        return result

    def _place(
        self, entries: list[_Entry], masked: list[_Entry], total: int, result: StepResult | None
    ) -> npt.NDArray[np.int32]:
        """The engine's masks, from those of the step."""
        if result is None:
            return self._free_masks(total)
        for index, entry in enumerate(masked):
            _judge(entry.constraint, result.outcomes[index], result.notes.get(index))
        ours: npt.NDArray[np.int32] = result.masks.numpy()
        if ours.shape[1] != self._words:
            raise ValueError(f"masks of {ours.shape[1]} words, and the model has {self._words}")
        if all(entry.begin == 0 and entry.end == entry.total for entry in entries):
            masks = ours  # nothing to copy; valid until the step after the next
        else:
            masks = self._free_masks(total)
            for index, entry in enumerate(masked):
                source = result.mask_rows[index] - entry.drafts_from
                masks[entry.first + entry.begin : entry.first + entry.end] = ours[
                    source + entry.begin : source + entry.end
                ]
        for entry in masked:
            if entry.constraint is not None:
                entry.constraint.masks = masks[entry.first : entry.first + entry.total]
        return masks

    def _free_masks(self, total: int) -> npt.NDArray[np.int32]:
        """Masks that allow every token."""
        return np.full((total, self._words), -1, dtype=np.int32)


def _is_over(request: "Request | None") -> bool:
    """Whether a request needs its sequence no more."""
    return request is None or bool(request.is_finished())


def _judge(constraint: Constraint | None, outcome: Outcome, note: Note | None) -> None:
    """Takes note of a row that can't go on; its mask has stop tokens only."""
    if outcome in (Outcome.REJECTED, Outcome.FAILED):
        _fail(constraint, f"{note.reason}: {note.message}" if note is not None else outcome.name)


def _check_tokens(constraint: Constraint, tokens: Sequence[int]) -> None:
    """Fails a request that was given a token which its mask forbids, before it is shown.

    As when `allowed_token_ids` or `bad_words` leave none that the grammar allows.
    """
    masks, constraint.masks = constraint.masks, None
    if masks is None:
        return
    for mask, token in zip(masks, tokens, strict=False):
        word = token >> 5
        if word >= len(mask) or not int(mask[word]) >> (token & 31) & 1:
            _fail(constraint, f"token {token} was sampled, which its mask forbids")
            return


def _fail(constraint: Constraint | None, why: str) -> None:
    """Has a request end with an error when its next tokens come."""
    if constraint is not None and not constraint.error:
        constraint.error = why
        _log.error("request %s ends with an error: %s", constraint.request_id, why)
