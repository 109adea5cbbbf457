"""A logits processor for both of vLLM's model runners.

For requests that name their grammar so:

    SamplingParams(extra_args={"grammar": {"json_schema": {...}}})     # or {"id": "gra-..."}

It keeps no grammar state. What a row has to send is what the engine hands over, its tokens
included; a request that is preempted and comes back is one with a longer history.

Loaded from the entry point group `vllm.logits_processors`, or by name:
`--logits-processors engine_client.vllm.processor:GrammarLogitsProcessor`. The older runner (V1)
wants the name under async scheduling, since it completes the tokens for processors that were named
alone; and it runs none with speculative decoding. Native structured outputs have neither limit.

Every tensor-parallel rank runs one. They name a sequence alike, so the service answers the later
ones from what it just computed.
"""

import itertools
import logging
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as IndexedProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlottedProcessor

from engine_client.logits import mask_on_cpu, mask_with_kernel
from engine_client.pending import PendingStep
from engine_client.types import Grammar, Outcome, Row
from engine_client.vllm.grammars import Grammars
from engine_client.vllm.requests import EXTRA_ARG, spec_of_args
from engine_client.vllm.settings import EngineSettings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

_log = logging.getLogger("engine_client.vllm")


_BITS = [1 << bit for bit in range(31)] + [-(1 << 31)]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Constraint:
    """A request's grammar, or what becomes of it. Freeing it closes the sequence."""

    sequence_id: str
    compiled: "Future[Grammar]"
    stop_token_ids: tuple[int, ...]
    tokens: list[int]
    """All tokens of the output; the engine's own list where it keeps one."""
    sent: int = 0
    told: bool = False
    """Whether its failure was logged."""

    def row(self, seconds: float, drafts: list[int]) -> Row | None:
        """What to send; None if its grammar isn't there."""
        try:
            grammar = self.compiled.result(seconds)
        except FutureTimeout:
            self.tell("its grammar wasn't there in time")
            return None
        except Exception as error:
            self.tell(f"it has no grammar: {error}")
            return None
        return Row(
            self.sequence_id,
            grammar,
            self.tokens,
            position=min(self.sent, len(self.tokens)),
            drafts=drafts,
            stop_token_ids=tuple(t for t in self.stop_token_ids if t < grammar.token_limit),
        )

    def tell(self, why: str) -> None:
        """Logs, once, why the request gets nothing but stop tokens."""
        if not self.told:
            self.told = True
            _log.error("sequence %s gets stop tokens only: %s", self.sequence_id, why)


class Round(NamedTuple):
    """A step on its way: requests with their drafts, and the rows of those that have a grammar."""

    wanted: list[tuple[Constraint, list[int]]]
    rows: list[Row | None]
    step: PendingStep | None


class GrammarLogitsProcessor(IndexedProcessor, SlottedProcessor):
    """What vLLM is given; making one gives the processor for the runner that makes it."""

    def __new__(cls, _config: "VllmConfig", *state: Any) -> "GrammarLogitsProcessor":
        """V1 passes a device and whether memory is pinned, V2 the state of its requests."""
        return object.__new__(_ByIndex if len(state) == 2 else _BySlot)

    def __init__(self, vllm_config: "VllmConfig", *_state: Any) -> None:
        settings = EngineSettings()
        self._grammars: Grammars | None = None
        self._settings = settings
        self._config = vllm_config
        # The same on each rank of an engine, and another for each engine.
        rank = vllm_config.parallel_config.data_parallel_rank
        self._prefix = f"{vllm_config.instance_id}-{rank}"
        self._numbers = itertools.count()
        self._width = vllm_config.model_config.get_vocab_size()

    @classmethod
    def validate_params(cls, sampling_params: "SamplingParams") -> None:
        """Raises ValueError for arguments that name no grammar, or where there is no service."""
        args = (sampling_params.extra_args or {}).get(EXTRA_ARG)
        if args is None:
            return
        if not EngineSettings().target:
            raise ValueError(
                f"extra_args[{EXTRA_ARG!r}] needs the grammar service: set GRAMMAR_CLIENT_TARGET"
            )
        spec_of_args(args)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """What V1 tells before each forward pass; V2 has add_request instead."""

    def is_argmax_invariant(self) -> bool:
        """A mask may well forbid the most likely token."""
        return False

    def _constrain(self, params: "SamplingParams", tokens: list[int]) -> Constraint | None:
        """What a request that names a grammar steps with. Its compile doesn't hold the engine."""
        args = (params.extra_args or {}).get(EXTRA_ARG)
        if args is None:
            return None
        if self._grammars is None:
            self._grammars = self._connect()
        try:
            compiled = self._grammars.compile(spec_of_args(args))
        except (ValueError, RuntimeError) as error:
            # Submission validates; a caller of EngineCore itself may not have.
            compiled = Future()
            compiled.set_exception(error)
        sequence_id = f"{self._prefix}-{next(self._numbers)}"
        stops = tuple(sorted(params.all_stop_token_ids))
        constraint = Constraint(sequence_id, compiled, stops, tokens)
        self._grammars.close_with(constraint, sequence_id)
        return constraint

    def _connect(self) -> Grammars:
        from vllm.tokenizers import cached_tokenizer_from_config

        model = self._config.model_config
        tokenizer = None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)
        return Grammars(self._settings, model, tokenizer)

    def _send(self, wanted: list[tuple[Constraint, list[int]]]) -> Round:
        """Submits one step for all of them."""
        end = time.monotonic() + self._settings.step_timeout
        rows = [
            constraint.row(max(end - time.monotonic(), 0.0), drafts)
            for constraint, drafts in wanted
        ]
        found = [row for row in rows if row is not None]
        if not found or self._grammars is None:
            return Round(wanted, rows, None)
        step = self._grammars.client.submit(found)
        for constraint, _ in wanted:
            constraint.sent = len(constraint.tokens)
        return Round(wanted, rows, step)

    def _receive(self, sent: Round) -> torch.Tensor:
        """int32[1 + drafts rows each, words]: the masks of a step, in the order it was asked."""
        if sent.step is None or self._grammars is None:
            return self._closed(sent.wanted)
        result = self._grammars.client.collect(sent.step)
        for index, outcome in enumerate(result.outcomes):
            if outcome in (Outcome.REJECTED, Outcome.FAILED):
                note = result.notes.get(index)
                self._tell(sent, index, f"{note.reason}: {note.message}" if note else outcome.name)
        if None not in sent.rows:
            return result.masks
        parts, rows = [], iter(result.mask_rows)
        for (constraint, drafts), row in zip(sent.wanted, sent.rows, strict=True):
            if row is None:
                parts.append(self._closed([(constraint, drafts)]))
            else:
                first = next(rows)
                parts.append(result.masks[first : first + 1 + len(drafts)])
        return torch.cat(parts)

    def _tell(self, sent: Round, index: int, why: str) -> None:
        """Logs why a row of a step can't go on."""
        present = [constraint for (constraint, _), row in zip(sent.wanted, sent.rows, strict=True)
                   if row is not None]  # fmt: skip
        present[index].tell(why)

    def _closed(self, wanted: list[tuple[Constraint, list[int]]]) -> torch.Tensor:
        """Masks for requests without a grammar: they can do nothing but end."""
        masks = []
        for constraint, drafts in wanted:
            mask = torch.zeros((self._width + 31) // 32, dtype=torch.int32)
            for token in constraint.stop_token_ids:
                if token < self._width:
                    mask[token // 32] |= _BITS[token % 32]
            masks += [mask] * (1 + len(drafts))
        return torch.stack(masks)

    def _mask(self, logits: torch.Tensor, masks: torch.Tensor, indices: list[int]) -> torch.Tensor:
        """The logits, in place, with those masks on those rows."""
        mask = mask_on_cpu if logits.device.type == "cpu" else mask_with_kernel
        logits.copy_(mask(logits, masks, indices, self._width))
        return logits


class _ByIndex(GrammarLogitsProcessor):
    """For the older model runner: requests by their index in the batch, tokens in its lists."""

    def __init__(self, vllm_config: "VllmConfig", *state: Any) -> None:
        super().__init__(vllm_config, *state)
        self._constraints: dict[int, Constraint] = {}
        self._sent: Round | None = None
        named = bool(vllm_config.model_config.logits_processors)
        # Under async scheduling the last token comes after update_state.
        self._early = not vllm_config.scheduler_config.async_scheduling
        self._blind = not self._early and not named

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Before each forward pass; the step goes out here where the tokens are complete."""
        process_dict_updates(
            self._constraints, batch_update, lambda params, _, output: self._added(params, output)
        )
        self._sent = None
        constraints = list(self._constraints.values())
        # One whose grammar isn't there yet isn't waited for here: the forward pass comes first.
        if self._early and constraints and all(each.compiled.done() for each in constraints):
            try:
                self._sent = self._send([(each, []) for each in constraints])
            except Exception:  # it would end the engine
                _log.exception("sending a step failed; it is sent again")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Masks the constrained rows. float[rows, vocabulary], in place."""
        if not self._constraints:
            return logits
        wanted: list[tuple[Constraint, list[int]]]
        wanted = [(each, []) for each in self._constraints.values()]
        try:
            sent, self._sent = self._sent or self._send(wanted), None
            masks = self._receive(sent)
        except Exception:  # it would end the engine
            _log.exception("masking a step failed: its requests get stop tokens only")
            masks = self._closed(wanted)
        return self._mask(logits, masks, list(self._constraints))

    def _added(self, params: "SamplingParams", output: list[int]) -> Constraint | None:
        constraint = self._constrain(params, output)
        if constraint is not None and self._blind:
            constraint.compiled = Future()
            constraint.compiled.set_exception(
                ValueError(
                    "with async scheduling this runner completes tokens only for processors that "
                    "are named: start with --logits-processors "
                    "engine_client.vllm.processor:GrammarLogitsProcessor"
                )
            )
        return constraint


class _BySlot(GrammarLogitsProcessor):
    """For Model Runner V2: requests by their slot, tokens on the device."""

    def __init__(self, vllm_config: "VllmConfig", *state: Any) -> None:
        super().__init__(vllm_config, *state)
        self._states: LogitsProcRequestState = state[0]
        self._constraints: dict[int, Constraint] = {}

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """Takes a slot over, whoever had it before."""
        constraint = self._constrain(sampling_params, [])
        if constraint is None:
            self._constraints.pop(req_idx, None)
            return False
        self._constraints[req_idx] = constraint
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Masks the constrained rows. float32[rows, vocabulary], in place.

        The earliest hook that knows the step's drafts; asked twice in a step, it asks twice.
        """
        if not any(slot in self._constraints for slot in ctx.idx_mapping_np.tolist()):
            return logits
        slots, tokens, positions = torch.stack(
            [ctx.expanded_idx_mapping.long(), ctx.input_ids.long(), ctx.pos.long()]
        ).tolist()
        rows: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            if slot in self._constraints:
                rows.setdefault(slot, []).append(row)
        wanted = [
            (self._constraints[slot], [tokens[row] for row in mine[1:]])
            for slot, mine in rows.items()
        ]
        try:
            for slot, mine in rows.items():
                self._read_tokens(slot, positions[mine[0]] + 1)
            masks = self._receive(self._send(wanted))
        except Exception:  # it would end the engine
            _log.exception("masking a step failed: its requests get stop tokens only")
            masks = self._closed(wanted)
        return self._mask(logits, masks, [row for mine in rows.values() for row in mine])

    def _read_tokens(self, slot: int, length: int) -> None:
        """Brings a slot's output up to the sequence length that the step sees."""
        constraint = self._constraints[slot]
        prompt = int(self._states.prompt_len.np[slot])
        del constraint.tokens[max(length - prompt, 0) :]
        known = len(constraint.tokens)
        new = self._states.all_token_ids.gpu[slot, prompt + known : length]
        constraint.tokens += new.tolist()
