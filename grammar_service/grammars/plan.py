"""What `auto` does: which backends are tried for a spec, in which order, and with which text.

The plan is a function of the spec alone, so it is the same on every replica. A JSON schema goes to
the backends that enforce all of it, llguidance first, since it is ready in milliseconds where
xgrammar takes a second on open objects; what one refuses, the next may take. A regular expression
or a choice goes to xgrammar first, which compiles those quickly and steps cheapest. EBNF and
structural tags are xgrammar's languages, Lark is llguidance's.

A refusal is all that leads on to the next attempt. A deadline, a kill or a crash ends the whole
compile: whether one is met depends on how busy the machine is, and `auto` has to choose alike on
every replica, and each time.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from engine_client.spec import GrammarSpec, GrammarType
from engine_client.vocabulary import Vocabulary
from grammar_service.backends import NAMES, Backend
from grammar_service.errors import Invalid, Unenforced
from grammar_service.grammars.schema import (
    Limits,
    Rules,
    candidates,
    check,
    refusal,
    rewrite,
)
from grammar_service.grammars.spec import EXPRESSION, dump_json, expression, parse_json
from grammar_service.grammars.tags import read_tag

_SPEAKERS = {
    GrammarType.REGEX: ("xgrammar", "llguidance", "outlines"),
    GrammarType.CHOICE: ("xgrammar", "llguidance", "outlines"),
    GrammarType.EBNF: ("xgrammar",),
    GrammarType.STRUCTURAL_TAG: ("xgrammar",),
    GrammarType.LARK: ("llguidance",),
}
_SCHEMA_SPEAKERS = ("llguidance", "xgrammar", "outlines")
_LONG_CHOICE = 2_000
"""Characters from which on xgrammar takes more than 20 ms to compile (500 ms for 36,000, where
llguidance takes 16)."""
_DIALECTS = {
    GrammarType.REGEX: EXPRESSION,
    GrammarType.CHOICE: "a list of texts",
    GrammarType.EBNF: "GBNF, with rules like `root ::= ...`",
    GrammarType.STRUCTURAL_TAG: "a structural tag in xgrammar's format",
    GrammarType.LARK: "Lark as llguidance speaks it, with rules like `start: ...`",
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """A backend for a spec.

    Attributes:
        backend: Its name.
        specs: The spec in the forms for it: the first that it doesn't refuse counts.
        unenforced: What its masks wouldn't enforce.
        annotations: The formats that they wouldn't.
    """

    backend: str
    specs: tuple[GrammarSpec, ...]
    unenforced: tuple[Unenforced, ...] = ()
    annotations: tuple[Unenforced, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The attempts for a spec, the best first, and how a refusal of all of them reads."""

    attempts: tuple[Attempt, ...]
    refused: Callable[[list[Invalid]], Invalid]


@dataclass(frozen=True, slots=True)
class Made:
    """What came of a spec: the backend's artifact, the form that it took, and what it leaves."""

    backend: str
    form: GrammarSpec
    data: bytes
    unenforced: tuple[Unenforced, ...]
    annotations: tuple[Unenforced, ...]


def make(
    spec: GrammarSpec, vocabulary: Vocabulary, backends: Mapping[str, Backend], limits: Limits
) -> Made:
    """Compiles a canonical spec with the first attempt that works. Raises Invalid.

    Runs in a child: reading a hostile schema may take as long as compiling one.
    """
    planned = plan(spec, limits, backends)
    errors: list[Invalid] = []
    for attempt in planned.attempts:
        if attempt.unenforced and not spec.allow_unenforced:
            break  # those that follow enforce no more
        for form in attempt.specs:
            try:
                data = backends[attempt.backend].compile(form, vocabulary)
            except Invalid as error:
                errors.append(error)
            else:
                _check_start(backends[attempt.backend], data, form, vocabulary)
                return Made(attempt.backend, form, data, attempt.unenforced, attempt.annotations)
    raise planned.refused(errors)


def _check_start(backend: Backend, data: bytes, form: GrammarSpec, vocabulary: Vocabulary) -> None:
    """Refuses a grammar without a text, as `root ::= root` is; its first mask would be empty."""
    if form.type not in (GrammarType.EBNF, GrammarType.LARK):
        return
    compiled = backend.load(data, form, vocabulary)
    # A stop token's bit says something else, so the only legal token may be one, but not both.
    for stop in range(min(2, vocabulary.width)):
        matcher = backend.matcher(compiled, (stop,))
        masks = torch.zeros((1, (vocabulary.width + 31) // 32), dtype=torch.int32)
        try:
            backend.fill([matcher], masks, [0])
        except RuntimeError:
            return  # a limit of the library's, which steps report
        if bool(masks.any()) or backend.completed([matcher])[0]:
            return
    raise Invalid(
        "SPEC_INVALID",
        "no text of this vocabulary begins as the grammar does; look for a rule that leads "
        "to itself alone, or for characters that no token has",
    )


def plan(spec: GrammarSpec, limits: Limits, allowed: Collection[str] = NAMES) -> Plan:
    """The plan for a canonical spec, of the backends that the service allows. Raises Invalid."""
    if spec.type in (GrammarType.JSON_SCHEMA, GrammarType.JSON_OBJECT):
        return _plan_schema(spec, limits, allowed)
    backends = _asked(spec, _SPEAKERS[spec.type], allowed)
    if not backends:
        who = "no backend that this service allows" if spec.backend == "auto" else spec.backend
        raise Invalid(
            "SPEC_UNSUPPORTED",
            f"{who} speaks {spec.type}; {' or '.join(_SPEAKERS[spec.type])} would",
        )

    if spec.type is GrammarType.REGEX:
        form = dataclasses.replace(spec, source=expression(spec.source))
        attempts = tuple(Attempt(backend, (form,)) for backend in backends)
    elif spec.type is GrammarType.STRUCTURAL_TAG:
        attempts = (_attempt_tag(spec, limits),)
    else:
        if spec.type is GrammarType.CHOICE:
            backends = _check_choices(spec, limits, backends)
        attempts = tuple(Attempt(backend, (spec,)) for backend in backends)

    def refused(errors: list[Invalid]) -> Invalid:
        if attempts[0].unenforced and not errors:
            return unenforced_error(attempts[0])
        return Invalid("SPEC_INVALID", f"expected {_DIALECTS[spec.type]}: {errors[0].message}")

    return Plan(attempts, refused)


def _check_choices(spec: GrammarSpec, limits: Limits, backends: tuple[str, ...]) -> tuple[str, ...]:
    """The backends for a choice: for a long one, llguidance before xgrammar. Raises Invalid."""
    if len(spec.choices) > limits.enum:
        raise Invalid(
            "SPEC_TOO_LARGE",
            f"{len(spec.choices)} choices; allowed are {limits.enum} (schema_enum)",
        )
    if sum(map(len, spec.choices)) > _LONG_CHOICE:
        return tuple(sorted(backends, key=lambda backend: backend != "llguidance"))
    return backends


def _attempt_tag(spec: GrammarSpec, limits: Limits) -> Attempt:
    """A structural tag, with the schemas in it in the form that xgrammar enforces most of."""
    if spec.max_whitespace == 0 or (spec.item_separator, spec.key_separator) != (",", ":"):
        raise Invalid(
            "SPEC_UNSUPPORTED",
            "JSON in a structural tag has max_whitespace 1 or more, and the usual separators",
        )
    tag = parse_json(spec.source)
    found = read_tag(tag, limits, spec.close_objects)
    bound = dataclasses.replace(spec, source=dump_json(tag))
    missing = found.unenforced + (found.annotations if spec.strict_formats else [])
    return Attempt("xgrammar", (bound,), tuple(missing), tuple(found.annotations))


def _plan_schema(spec: GrammarSpec, limits: Limits, allowed: Collection[str]) -> Plan:
    schema = {"type": "object"} if spec.type is GrammarType.JSON_OBJECT else parse_json(spec.source)
    rewritten = rewrite(schema, check(schema, limits), spec.close_objects)
    if rewritten.schema is False:
        raise Invalid("SPEC_INVALID", "the schema at /: no value fits it; correct it")
    found = candidates(
        rewritten,
        [b for b in _asked(spec, _SCHEMA_SPEAKERS, allowed) if _separates(spec, b)],
        strict_formats=spec.strict_formats,
        fixed_order=spec.fixed_key_order,
    )
    attempts = tuple(
        Attempt(
            candidate.backend,
            tuple(_as_schema(spec, form) for form in candidate.schemas),
            candidate.unenforced,
            candidate.annotations,
        )
        for candidate in found
    )
    if not attempts:
        raise Invalid(
            "SPEC_UNSUPPORTED",
            "no backend that may be used has these separators: outlines has the usual ones only, "
            "xgrammar those with no white space but spaces",
        )

    def refused(errors: list[Invalid]) -> Invalid:
        best = attempts[0]
        if best.unenforced:
            return unenforced_error(best)
        # What is said of rules has pointers into their parts.
        error = errors[sum(isinstance(form, Rules) for form in found[0].schemas)]
        if "Unsatisfiable schema" in error.message:
            return Invalid("SPEC_INVALID", f"the schema at /: no value fits it: {error.message}")
        named = refusal(error.message, rewritten)
        if named is None:
            return Invalid("SPEC_UNSUPPORTED", f"no backend asked for takes it: {error.message}")
        return Invalid(
            "SPEC_UNENFORCED",
            f"{named.keyword} at {named.pointer or '/'} isn't enforced by any backend: "
            f"{error.message or 'the library gives no reason'}",
            (named,),
        )

    return Plan(attempts, refused)


def unenforced_error(attempt: Attempt) -> Invalid:
    """The refusal of a spec of which a part isn't enforced, and the caller didn't say it may."""
    parts = attempt.unenforced
    named = ", ".join(f"{item.keyword} at {item.pointer or '/'}" for item in parts[:5])
    more = f" and {len(parts) - 5} more" if len(parts) > 5 else ""
    return Invalid(
        "SPEC_UNENFORCED",
        f"{named}{more}: no backend enforces that; drop it from the schema, or set "
        "allow_unenforced and check the output yourself",
        parts,
    )


def _asked(
    spec: GrammarSpec, speakers: tuple[str, ...], allowed: Collection[str]
) -> tuple[str, ...]:
    return tuple(b for b in speakers if b in allowed and spec.backend in ("auto", b))


def _separates(spec: GrammarSpec, backend: str) -> bool:
    separators = (spec.item_separator, spec.key_separator)
    match backend:
        case "outlines":
            return separators == (",", ":")
        case "xgrammar":
            return not set("".join(separators)) & set("\t\n\r")
        case _:
            return True


def _as_schema(spec: GrammarSpec, form: object) -> GrammarSpec:
    if isinstance(form, Rules):
        source = form.text(spec.max_whitespace, spec.item_separator, spec.key_separator)
    else:
        source = dump_json(form)
    return dataclasses.replace(spec, type=GrammarType.JSON_SCHEMA, source=source)
