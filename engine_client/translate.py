"""Between the contract's messages and the words of client and service: specs and grammars."""

from collections.abc import Iterable

from engine_client.errors import Unenforced, UsageError
from engine_client.spec import DEFAULT_MAX_WHITESPACE, GrammarSpec, GrammarType
from engine_client.types import Grammar
from engine_client.vocabulary import Vocabulary
from engine_client.wire import grammars_pb2 as pb

_TYPES = {pb.GrammarType.Value(f"GRAMMAR_TYPE_{kind.name}"): kind for kind in GrammarType}
_BACKENDS = {
    pb.BACKEND_UNSPECIFIED: "auto",
    pb.BACKEND_XGRAMMAR: "xgrammar",
    pb.BACKEND_LLGUIDANCE: "llguidance",
    pb.BACKEND_OUTLINES: "outlines",
}
BACKENDS = {name: value for value, name in _BACKENDS.items()}
"""The contract's numbers by name."""


def spec_to_wire(spec: GrammarSpec) -> pb.GrammarSpec:
    """A spec as a message. Raises UsageError for what no message can say."""
    if spec.backend not in BACKENDS:
        raise UsageError(f"no backend is called {spec.backend!r}")
    try:
        return pb.GrammarSpec(
            type=f"GRAMMAR_TYPE_{spec.type.name}",
            source=spec.source,
            choices=spec.choices,
            options=pb.GrammarOptions(
                max_whitespace=spec.max_whitespace,
                close_objects=spec.close_objects,
                allow_unenforced=spec.allow_unenforced,
                fixed_key_order=spec.fixed_key_order,
                strict_formats=spec.strict_formats,
                item_separator=spec.item_separator,
                key_separator=spec.key_separator,
            ),
            backend=BACKENDS[spec.backend],
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"the spec can't be sent: {error}") from None


def spec_from_wire(spec: pb.GrammarSpec) -> GrammarSpec:
    """A message as a spec. Raises ValueError for a type or backend that isn't known here."""
    if spec.type not in _TYPES:
        raise ValueError(f"grammar type {spec.type} isn't known here")
    if spec.backend not in _BACKENDS:
        raise ValueError(f"backend {spec.backend} isn't known here")
    options = spec.options
    return GrammarSpec(
        type=_TYPES[spec.type],
        source=spec.source,
        choices=tuple(spec.choices),
        max_whitespace=(
            options.max_whitespace if options.HasField("max_whitespace") else DEFAULT_MAX_WHITESPACE
        ),
        close_objects=options.close_objects,
        allow_unenforced=options.allow_unenforced,
        fixed_key_order=options.fixed_key_order,
        strict_formats=options.strict_formats,
        item_separator=options.item_separator or ",",
        key_separator=options.key_separator or ":",
        backend=_BACKENDS[spec.backend],
    )


def grammar_from_wire(
    grammar: pb.Grammar,
    spec: GrammarSpec,
    vocabulary: Vocabulary | None,
    compile_ms: float,
    cached: bool,
) -> Grammar:
    """What the service says of a grammar."""
    return Grammar(
        id=grammar.id,
        spec=spec,
        tokenizer_id=grammar.tokenizer_id,
        vocab_size=grammar.vocab_size,
        width=grammar.width,
        stop_token_ids=tuple(grammar.stop_token_ids),
        vocabulary=vocabulary,
        backend=_BACKENDS.get(grammar.backend, "unknown"),
        unenforced=_named(grammar.unenforced),
        annotations=_named(grammar.annotations),
        compiled_source=grammar.compiled_source,
        compile_ms=compile_ms,
        cached=cached,
    )


def _named(items: Iterable[pb.Unenforced]) -> tuple[Unenforced, ...]:
    return tuple(Unenforced(item.pointer, item.keyword) for item in items)
