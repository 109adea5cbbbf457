"""Cases as they are read, and reports as they are written."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard, get_type_hints

from engine_client import Grammar, GrammarSpec, GrammarType, Unenforced
from engine_client.spec import SpecOptions

_OPTIONS: dict[str, type] = get_type_hints(SpecOptions)
_SPEC_KEYS = {"type", "source", "options"}
_JSON_TYPES = {GrammarType.JSON_SCHEMA, GrammarType.STRUCTURAL_TAG}

Report = dict[str, Any]
"""What is printed of a case, or of one of its texts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a worker is told at its start."""

    tokenizer: str
    width: int | None
    cases: str
    """File with the cases, one a line."""
    directory: str
    """Empty directory for its socket."""
    region_dir: str
    """Empty directory for its masks."""
    jobs: int
    """Compiles at once."""
    timeout: float
    """Seconds a case."""


@dataclass(frozen=True, slots=True)
class Case:
    """One grammar, and texts that it should admit or not."""

    id: str | int
    spec: GrammarSpec
    texts: Sequence[str]


class CaseRefused(Exception):
    """A case that can't even be sent to the service."""

    def __init__(self, case_id: str | int | None, reason: str, message: str) -> None:
        super().__init__(message)
        self.id = case_id
        self.reason = reason
        self.message = message


def read_case(line: bytes) -> Case:
    """The case of a line. Raises CaseRefused."""
    try:
        return _read(line)
    except RecursionError:
        raise CaseRefused(None, "CASE_INVALID", "the line is nested too deeply") from None


def refused(
    case_id: str | int | None, reason: str, message: str, unenforced: Iterable[Unenforced] = ()
) -> Report:
    """The report of a case without results."""
    return {
        "id": case_id,
        "compiled": False,
        "backend": None,
        "compile_ms": None,
        "unenforced": [item._asdict() for item in unenforced],
        "refused": {"reason": reason, "message": message},
        "results": [],
    }


def checked(case_id: str | int, grammar: Grammar, results: Sequence[Report]) -> Report:
    """The report of a case that was run."""
    return {
        "id": case_id,
        "compiled": True,
        "backend": grammar.backend,
        "compile_ms": round(grammar.compile_ms, 3),
        "unenforced": [item._asdict() for item in grammar.unenforced],
        "refused": None,
        "results": results,
    }


def _read(line: bytes) -> Case:
    try:
        value = json.loads(line.decode(), parse_constant=_no_constant)
    except ValueError as error:
        raise CaseRefused(None, "CASE_INVALID", f"the line isn't JSON: {error}") from None
    if not isinstance(value, dict):
        raise CaseRefused(None, "CASE_INVALID", "the line isn't a JSON object")
    case_id = value.get("id")
    if not isinstance(case_id, str | int) or isinstance(case_id, bool):
        raise CaseRefused(None, "CASE_INVALID", "id is missing, or neither text nor integer")
    texts = value.get("texts")
    if not _all_texts(texts):
        raise CaseRefused(case_id, "CASE_INVALID", "texts is missing, or no list of texts")
    if not isinstance(value.get("spec"), dict):
        raise CaseRefused(case_id, "CASE_INVALID", "spec is missing, or no object")
    return Case(case_id, _read_spec(case_id, value["spec"]), texts)


def _read_spec(case_id: str | int, value: dict[str, Any]) -> GrammarSpec:
    """The spec of a case. The service judges what it says; this, whether it can be asked."""
    if unknown := value.keys() - _SPEC_KEYS:
        raise CaseRefused(case_id, "SPEC_INVALID", f"spec has no {_listed(unknown)}")
    try:
        kind = GrammarType(str(value.get("type")))
    except ValueError:
        message = f"the type {value.get('type')!r} is none of {_listed(GrammarType)}"
        raise CaseRefused(case_id, "SPEC_UNSUPPORTED", message) from None
    options = value.get("options")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise CaseRefused(case_id, "SPEC_INVALID", "options is no object")
    if unknown := options.keys() - _OPTIONS.keys():
        message = f"there is no option {_listed(unknown)}, only {_listed(_OPTIONS)}"
        raise CaseRefused(case_id, "SPEC_INVALID", message)
    for name, option in options.items():
        if type(option) is not _OPTIONS[name]:  # True is no number
            message = f"option {name} is of type {_OPTIONS[name].__name__}, not {option!r}"
            raise CaseRefused(case_id, "SPEC_INVALID", message)
    source = value.get("source")
    if kind is GrammarType.CHOICE and _all_texts(source):
        return GrammarSpec(kind, choices=tuple(source), **options)
    if kind is GrammarType.JSON_OBJECT and source is None:
        return GrammarSpec(kind, **options)
    if kind in _JSON_TYPES and isinstance(source, dict | bool):
        source = json.dumps(source, ensure_ascii=False)
    if kind is GrammarType.CHOICE or not isinstance(source, str):
        message = f"the source of a {kind} can't be {json.dumps(source)[:40]}"
        raise CaseRefused(case_id, "SPEC_INVALID", message)
    return GrammarSpec(kind, source, **options)


def _all_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not in JSON")
