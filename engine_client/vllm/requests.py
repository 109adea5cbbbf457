"""What a request asks for, as a grammar spec, or the id of a grammar that was compiled before.

vLLM's settings mean here what they mean with its own backends:
- `backend`: auto leaves the choice to the service; xgrammar, guidance and outlines name its backend
  for JSON, regex and choice. lm-format-enforcer isn't one of its backends.
- `disable_any_whitespace`: no white space in JSON at all.
- `disable_additional_properties`: closes objects that don't say, with guidance; with the others
  they are closed anyway, as vLLM's xgrammar compiles them.
"""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine_client.spec import GrammarSpec, GrammarType, SpecOptions

if TYPE_CHECKING:
    from vllm.config import StructuredOutputsConfig
    from vllm.sampling_params import StructuredOutputsParams

EXTRA_ARG = "grammar"
"""The key of `extra_args` that the logits processor reads."""

_ID = re.compile(r"gra-[0-9a-f]{32}")
_BACKENDS = {
    "auto": "auto",
    "xgrammar": "xgrammar",
    "guidance": "llguidance",
    "outlines": "outlines",
}
_OPTIONS = frozenset(SpecOptions.__annotations__)
_KINDS = frozenset(GrammarType)


def spec_of_params(
    params: "StructuredOutputsParams", config: "StructuredOutputsConfig", allow_unenforced: bool
) -> GrammarSpec | str:
    """The spec, or grammar id, of `structured_outputs`. Raises ValueError."""
    if params.whitespace_pattern:
        raise ValueError(
            "whitespace_pattern isn't enforced; use disable_any_whitespace, or leave it out"
        )
    if config.backend not in _BACKENDS:
        raise ValueError(
            f"the grammar service has no backend {config.backend!r}: start vLLM with "
            '--structured-outputs-config \'{"backend": "auto"}\''
        )
    options: SpecOptions = {
        "allow_unenforced": allow_unenforced,
        "close_objects": config.backend != "guidance" or config.disable_additional_properties,
        "fixed_key_order": True,  # as vLLM's backends have them: reasoning, then the answer
    }
    if params.structural_tag is not None:
        return GrammarSpec.structural_tag(_modern_tag(params.structural_tag), **options)
    if params.grammar is not None:
        return _spec_of_grammar(params.grammar)
    options["backend"] = _BACKENDS[config.backend]
    if params.regex is not None:
        return GrammarSpec.regex(params.regex, **options)
    if params.choice is not None:
        return GrammarSpec.choice(params.choice, **options)
    if config.disable_any_whitespace or params.disable_any_whitespace:
        options["max_whitespace"] = 0
    if params.json is not None:
        return GrammarSpec.json_schema(params.json, **options)
    if params.json_object:
        return GrammarSpec.json_object(**options)
    raise ValueError("structured_outputs names no constraint")


def spec_of_args(args: Any) -> GrammarSpec | str:
    """The spec, or grammar id, of `extra_args["grammar"]`. Raises ValueError.

    An object with one of json_schema, json_object, regex, choice, ebnf, lark, structural_tag or id,
    and any options of a spec (GrammarSpec): {"regex": "[0-9]+", "backend": "xgrammar"}.
    """
    if not isinstance(args, Mapping):
        raise ValueError(f"extra_args[{EXTRA_ARG!r}] is an object, not {type(args).__name__}")
    kinds = _KINDS | {"id"}
    unknown = sorted(map(str, args.keys() - kinds - _OPTIONS))
    named = sorted(args.keys() & kinds)
    if unknown or len(named) != 1:
        raise ValueError(
            f"extra_args[{EXTRA_ARG!r}] has one of {', '.join(sorted(kinds))}, and may have "
            f"{', '.join(sorted(_OPTIONS))}; it has {', '.join([*named, *unknown]) or 'nothing'}"
        )
    kind, value = named[0], args[named[0]]
    if kind == "id":
        if not isinstance(value, str) or not _ID.fullmatch(value):
            raise ValueError("a grammar id is gra- and 32 hexadecimal digits")
        return value
    if kind == "choice" and not isinstance(value, list | tuple):
        raise ValueError("choice can't be read: it is a list of texts")
    if kind == "json_object" and value is not True:
        raise ValueError("json_object can't be read: it is true, or left out")
    options = {name: args[name] for name in _OPTIONS & args.keys()}
    try:
        make = getattr(GrammarSpec, kind)
        spec: GrammarSpec = make(**options) if kind == "json_object" else make(value, **options)
    except TypeError as error:
        raise ValueError(f"{kind} can't be read: {error}") from None
    return spec


def _spec_of_grammar(text: str) -> GrammarSpec | str:
    """A grammar's id, Lark, or EBNF, told apart as vLLM does."""
    from vllm.v1.structured_output.utils import grammar_is_likely_lark

    text = text.strip()
    if _ID.fullmatch(text):
        return text
    return GrammarSpec.lark(text) if grammar_is_likely_lark(text) else GrammarSpec.ebnf(text)


def _modern_tag(text: str) -> str:
    """A structural tag in xgrammar's present format, which the older one of vLLM fits into."""
    try:
        tag = json.loads(text)
    except ValueError as error:
        raise ValueError(f"structural_tag is no JSON: {error}") from None
    if not isinstance(tag, dict) or "structures" not in tag:
        return text
    tags = [
        {
            "begin": structure.get("begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema")},
            "end": structure.get("end"),
        }
        for structure in tag["structures"]
    ]
    triggered = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    return json.dumps({"type": "structural_tag", "format": triggered})
