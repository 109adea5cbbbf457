"""What goes into a step and what comes out of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from engine_client.errors import Unenforced
from engine_client.spec import GrammarSpec
from engine_client.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch


class Outcome(IntEnum):
    """How a row ended; the numbers are the contract's."""

    OK = 1
    """The history is legal and the grammar goes on."""
    COMPLETE = 2
    """The grammar may or must end here."""
    TERMINATED = 3
    """A stop token was accepted; tokens after it are ignored."""
    REJECTED = 4
    """A token of the history is illegal; end the request."""
    FAILED = 8
    """Nobody can say what is allowed; end the request. The note has the reason."""


class Policy(Enum):
    """What becomes of a row when the service gave no answer within the deadline."""

    FAIL = "fail"
    """The row fails: stop tokens only. The default."""
    IN_PROCESS = "in_process"
    """A matcher in this process, rebuilt from the history, masks the row; the note says IN_PROCESS.
    Needs the grammar's backend here (xgrammar or llguidance), and this policy at the client: its
    `compile` compiles here as well."""
    UNCONSTRAINED = "unconstrained"
    """Everything is allowed; the outcome is OK, and the note says UNCONSTRAINED. Mind that xgrammar
    0.2.9's CPU kernel writes past a row of such a mask where the width is no multiple of 32."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, as `GrammarClient` gives it. Shared by all its sequences.

    Attributes:
        id: The content hash that names it.
        spec: What was compiled.
        tokenizer_id: The tokenizer it is for, with its `vocab_size` and `width` in tokens and its
            `stop_token_ids`.
        backend: The library that compiled it.
        unenforced: The keywords of a schema that no mask enforces.
        annotations: The formats that no mask enforces.
        compiled_source: What the backend compiled: a form of the schema that means the same.
        compile_ms: How long that took.
        cached: Whether it was compiled before.
        vocabulary: The tokenizer's tokens; None if it was asked for by id. With it, a service that
            lost the tokenizer gets it again, and there is an in-process fallback.
    """

    id: str
    spec: GrammarSpec
    tokenizer_id: str
    vocab_size: int
    width: int
    stop_token_ids: tuple[int, ...]
    backend: str
    unenforced: tuple[Unenforced, ...]
    annotations: tuple[Unenforced, ...]
    compiled_source: str = field(repr=False)
    compile_ms: float
    cached: bool
    vocabulary: Vocabulary | None = field(repr=False)

    @property
    def words(self) -> int:
        """32-bit words of a mask."""
        return (self.width + 31) // 32

    @property
    def token_limit(self) -> int:
        """Token ids at or past this can't be produced, and are never allowed."""
        return min(self.vocab_size, self.width)


@dataclass(slots=True, eq=False)
class Row:
    """One sequence in a step.

    Attributes:
        sequence_id: The engine's id of the sequence, 1 to 256 characters.
        grammar: Its grammar.
        tokens: The whole history after the prompt, a reference to the engine's own list: what is
            missing at the service is read from here.
        position: Tokens before this index are the same as in the last step that was submitted
            with this id. 0 sends all, which is always right; len(tokens) - n sends the n new ones.
        drafts: A chain of draft tokens that would follow.
        stop_token_ids: Stop tokens of the model's configuration and the request, in addition to
            the vocabulary's.
        constraint_start: Index of the first token that the grammar constrains.
        policy: For when the service is gone; None takes the client's.
    """

    sequence_id: str
    grammar: Grammar
    tokens: Sequence[int]
    position: int = 0
    drafts: Sequence[int] = ()
    stop_token_ids: tuple[int, ...] = ()
    constraint_start: int = 0
    policy: Policy | None = None

    def all_stop_tokens(self) -> list[int]:
        """The vocabulary's stop tokens and the row's, those that can be produced."""
        stops = {*self.grammar.stop_token_ids, *self.stop_token_ids}
        return sorted(token for token in stops if 0 <= token < self.grammar.token_limit)


@dataclass(frozen=True, slots=True)
class Note:
    """What else there is to say of a row.

    Attributes:
        reason: UPPER_SNAKE reason of REJECTED and FAILED.
        message: One sentence for a person.
        rewound: Tokens that the service dropped from what it held before.
        accepted: REJECTED: how many tokens of the history are legal.
        ignored: TERMINATED: how many tokens come after the stop token.
    """

    reason: str = ""
    message: str = ""
    rewound: int = 0
    accepted: int = 0
    ignored: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step gave. One entry a row, in order.

    Attributes:
        masks: int32[mask rows, words], 1 bit a token, 1 = allowed. Row i's are the 1 + drafts rows
            from `mask_rows[i]` on: for the next token, and after each draft. Shared memory: valid
            until the second submit after this step's, on the same thread.
        outcomes: How each row ended.
        legal_drafts: How many drafts of each row the grammar admits.
        mask_rows: First mask row of each row.
        notes: By index of the row; only rows with something to say.
    """

    masks: "torch.Tensor"
    outcomes: Sequence[Outcome]
    legal_drafts: Sequence[int]
    mask_rows: Sequence[int]
    notes: Mapping[int, Note]

    def mask(self, row: int) -> "torch.Tensor":
        """The mask of a row's next token: int32[words]."""
        return self.masks[self.mask_rows[row]]
