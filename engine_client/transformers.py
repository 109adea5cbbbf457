"""A logits processor for transformers that holds no grammar state; one serves a whole process.

    processor = GrammarLogitsProcessor(client)
    grammars = [invoice, None, date]              # one a prompt; None is unconstrained
    stops = model.generation_config.eos_token_id
    with processor.batch(grammars, stop_token_ids=stops) as batch:
        output = model.generate(**inputs, logits_processor=[processor])
    for problem in batch.problems:
        ...                                       # rows that the service couldn't go on with

`generate` gives a processor nothing but token ids and scores, so the batch says which prompt has
which grammar. It belongs to the context (`contextvars`) that opens it: threads and tasks that share
the processor don't see each other's.

How `generate` calls a processor (read in transformers 5.24):
- Sampling, greedy and beam search repeat each prompt n times, in a row (`repeat_interleave`), and
  then call it once a step. Beams swap histories between rows at any step, and a beam that has no
  legal token left lives on with an illegal one, at a score of minus infinity.
- Assisted decoding and prompt look-up call it for each draft, and then again for each position:
  histories shrink as well. An assistant with another tokenizer isn't supported.
Where each row's history differs from the last call's is thus found out at each call, and the
service rewinds. `min_new_tokens` and others that forbid tokens may leave a row none at all.
"""

import contextlib
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from transformers import LogitsProcessor

from engine_client.client import GrammarClient
from engine_client.errors import UsageError
from engine_client.logits import mask_on_cpu, mask_with_kernel
from engine_client.types import Grammar, Outcome, Policy, Row, StepResult


class Problem(NamedTuple):
    """What went wrong with a row of a batch.

    Attributes:
        row: Index of the row; prompt i has the rows from i * n to i * n + n - 1.
        outcome: FAILED or REJECTED: the row got stop tokens only. OK, COMPLETE or TERMINATED: the
            service is gone, and the row went on by its policy, in process or unconstrained.
        reason: UPPER_SNAKE, as in Note.
        message: One sentence for a person.
    """

    row: int
    outcome: Outcome
    reason: str
    message: str


class Batch:
    """The rows of one `generate` call: their grammars, and the tokens that they had last.

    Make one with `GrammarLogitsProcessor.batch`.
    """

    def __init__(
        self,
        grammars: Sequence[Grammar | None],
        stop_token_ids: Iterable[int],
        policy: Policy | None,
    ) -> None:
        self._grammars = list(grammars)
        self._stop_token_ids = tuple(stop_token_ids)
        self._policy = policy
        self._width = _common_width(self._grammars, self._stop_token_ids)
        self._prefix = uuid.uuid4().hex
        self._prompts: torch.Tensor | None = None
        self._seen: torch.Tensor
        """int64[constrained rows, tokens]: the last call's histories, without the prompts."""
        self._indices: list[int] = []
        """Which rows of `generate` are constrained."""
        self._index: torch.Tensor
        """The same, on the device of the token ids."""
        self._histories: list[list[int]] = []
        """`_seen` as lists, which is what the client takes."""
        self._rows: list[Row] = []
        self._steady: list[int] = []
        """How many tokens of each history never changed. A service that missed steps holds an old
        history, so that tokens past these have to be sent even if they are the last call's."""
        self._problems: dict[tuple[int, Outcome, str], Problem] = {}

    @property
    def problems(self) -> list[Problem]:
        """What went wrong so far, once a row and reason.

        A rejection is taken back when its tokens are, as those of beams and drafts often are.
        Harmless are two that stay: of a beam that ran out of legal tokens, which isn't returned,
        and of the padding after a row that a criterion of the caller's ended.
        """
        return list(self._problems.values())

    @property
    def sequence_ids(self) -> list[str]:
        """The ids that the constrained rows have at the service."""
        return [row.sequence_id for row in self._rows]

    def apply(
        self, client: GrammarClient, input_ids: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        """One step of the constrained rows, in one call. Shapes are as for the processor."""
        if not self._width:  # no grammar at all
            return scores
        if scores.shape[-1] < self._width:
            raise UsageError(
                f"the scores have {scores.shape[-1]} columns and the vocabulary {self._width}: "
                "make the Vocabulary with width=model.config.vocab_size"
            )
        self._advance(input_ids)
        result = client.step(self._rows)
        self._take_notes(result)
        mask = mask_on_cpu if scores.device.type == "cpu" else mask_with_kernel
        return mask(scores, result.masks, self._indices, self._width)

    def _advance(self, input_ids: torch.Tensor) -> None:
        """Brings the rows' tokens up to date, and their positions to where they changed."""
        if self._prompts is None:
            self._open(input_ids)
        assert self._prompts is not None
        rows, start = self._prompts.shape
        # Growing by a token is how nearly all calls go, and can't be another generate's first.
        grown = input_ids.shape == (rows, start + self._seen.shape[1] + 1)
        if not grown and not torch.equal(input_ids[:, :start], self._prompts):
            raise UsageError(
                f"these aren't the {rows} rows of {start} prompt tokens that this batch began "
                "with: open a batch for each generate call, and an assistant needs the same "
                "tokenizer"
            )
        # Indexing copies, so it doesn't matter what the caller does to its tensor.
        histories = input_ids[self._index, start:]
        shared = min(histories.shape[1], self._seen.shape[1])
        differs = histories[:, :shared] != self._seen[:, :shared]
        self._seen = histories
        # The first column that differs; the added one stands for what is new.
        firsts = pad(differs, (0, 1), value=True).to(torch.uint8).argmax(dim=1).tolist()
        start = min(firsts)
        changed = histories[:, start:].tolist()
        for index, first in enumerate(firsts):
            history = self._histories[index]
            if first < len(history):
                self._steady[index] = min(first, self._steady[index])
            history[first:] = changed[index][first - start :]
            self._rows[index].position = min(first, self._steady[index])

    def _open(self, input_ids: torch.Tensor) -> None:
        """Lays out the rows, when their number is known."""
        count, start = input_ids.shape
        copies, rest = divmod(count, len(self._grammars))
        if rest:
            raise UsageError(
                f"{len(self._grammars)} grammars can't be spread over {count} rows: give "
                "processor.batch one grammar, or None, for each prompt"
            )
        self._prompts = input_ids.clone()
        expanded = [grammar for grammar in self._grammars for _ in range(copies)]
        for index, grammar in enumerate(expanded):
            if grammar is None:
                continue
            history: list[int] = []
            row = Row(
                f"{self._prefix}-{index}",
                grammar,
                history,
                stop_token_ids=self._stop_token_ids,
                policy=self._policy,
            )
            self._indices.append(index)
            self._histories.append(history)
            self._rows.append(row)
            self._steady.append(sys.maxsize)
        self._index = torch.tensor(self._indices, device=input_ids.device)
        self._seen = input_ids[self._index, start:]

    def _take_notes(self, result: StepResult) -> None:
        """Notes new problems, and takes rejections back whose tokens are gone."""
        if self._problems:
            legal = {
                (self._indices[index], Outcome.REJECTED)
                for index, outcome in enumerate(result.outcomes)
                if outcome not in (Outcome.FAILED, Outcome.REJECTED)
            }
            self._problems = {
                key: problem for key, problem in self._problems.items() if key[:2] not in legal
            }
        for index, note in sorted(result.notes.items()):
            if note.reason:
                outcome = result.outcomes[index]
                problem = Problem(self._indices[index], outcome, note.reason, note.message)
                self._problems.setdefault(problem[:3], problem)


_BATCH: ContextVar[tuple["GrammarLogitsProcessor", Batch] | None] = ContextVar(
    "grammar_batch", default=None
)


class GrammarLogitsProcessor(LogitsProcessor):
    """Masks the scores of all rows of a `generate` call with one step of the grammar service.

    Share one between all sequences, `generate` calls and threads. It never raises for anything that
    the service does: rows that it can't answer go by their policy, and the batch lists them.
    """

    # Its requests come and go between steps, which a batch doesn't follow.
    supports_continuous_batching = False

    def __init__(self, client: GrammarClient) -> None:
        self._client = client

    @contextlib.contextmanager
    def batch(
        self,
        grammars: Sequence[Grammar | None],
        *,
        stop_token_ids: int | Iterable[int] | None = None,
        policy: Policy | None = None,
    ) -> Iterator[Batch]:
        """Says what the prompts of the one `generate` call inside the block are constrained by.

        Args:
            grammars: One a prompt, of one vocabulary; None leaves the prompt's rows as they are.
            stop_token_ids: What ends a sequence, beside the vocabulary's stop tokens: pass
                generation_config.eos_token_id as it is.
            policy: What becomes of the rows while the service is gone; None takes the client's.

        Raises UsageError when that can't work.
        """
        stops = (stop_token_ids,) if isinstance(stop_token_ids, int) else stop_token_ids or ()
        batch = Batch(grammars, stops, policy)
        token = _BATCH.set((self, batch))
        try:
            yield batch
        finally:
            _BATCH.reset(token)
            self._client.close_sequences(batch.sequence_ids)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """Masks the scores of the batch's constrained rows.

        Args:
            input_ids: int64[rows, tokens]: prompts and what was generated, on any device.
            scores: Floating point [rows, columns], as many columns as the vocabulary is wide, or
                more: those past it become minus infinity.

        Returns the masked copy; unconstrained rows are the same bit for bit. Raises UsageError
        outside of a batch, and for rows or columns that don't fit it.
        """
        owner, batch = _BATCH.get() or (None, None)
        if owner is not self or batch is None:
            raise UsageError(
                "no batch of this GrammarLogitsProcessor is open here: call generate inside `with "
                "processor.batch(grammars):`, in the same thread; a thread that you start inside "
                "it needs contextvars.copy_context().run"
            )
        return batch.apply(self._client, input_ids, scores)


def _common_width(grammars: Sequence[Grammar | None], stop_token_ids: Sequence[int]) -> int:
    """The columns that the grammars' masks cover; 0 without a grammar. Raises UsageError."""
    if not grammars:
        raise UsageError("a batch needs one grammar, or None, for each prompt")
    tokenizers = {grammar.tokenizer_id: grammar for grammar in grammars if grammar}
    if not tokenizers:
        return 0
    if len(tokenizers) > 1:
        raise UsageError(
            "the grammars of a batch are compiled against different vocabularies: compile all "
            "against that of the model"
        )
    grammar = next(iter(tokenizers.values()))
    stops = {*grammar.stop_token_ids, *stop_token_ids}
    if not stops:
        raise UsageError(
            "neither the vocabulary nor the batch has a stop token, so that no grammar could end: "
            "pass stop_token_ids=model.generation_config.eos_token_id"
        )
    if not 0 <= min(stops) <= max(stops) < grammar.width:
        raise UsageError(
            f"stop tokens {sorted(stops)} don't all lie within the {grammar.width} columns of "
            "the vocabulary"
        )
    return grammar.width
