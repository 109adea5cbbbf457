"""What `auto` picks, what the options of a spec do, and that all backends take them alike."""

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest

from engine_client import GrammarClient, GrammarSpec, Refused
from engine_client.spec import SpecOptions
from grammar_service.errors import Invalid
from grammar_service.grammars.plan import plan
from grammar_service.grammars.schema import Limits
from tests.cases.test_schemas import BYTES, accepts

BACKENDS = ["llguidance", "xgrammar", "outlines"]
_I = {"type": "integer"}
_CONST_TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
SPEAKERS = {
    GrammarSpec.json_schema({"type": "array", "items": _I}): BACKENDS,
    GrammarSpec.json_object(): BACKENDS,
    GrammarSpec.regex("ab*c"): ["xgrammar", "llguidance", "outlines"],
    GrammarSpec.choice(["a", "b"]): ["xgrammar", "llguidance", "outlines"],
    GrammarSpec.ebnf('root ::= "a"'): ["xgrammar"],
    GrammarSpec.lark('start: "a"'): ["llguidance"],
    GrammarSpec.structural_tag(_CONST_TAG): ["xgrammar"],
}


def attempts(spec: GrammarSpec) -> list[str]:
    """The backends of a plan, in order."""
    return [attempt.backend for attempt in plan(spec, Limits()).attempts]


def tag_of(schema: Any, style: str = "json", **options: Any) -> GrammarSpec:
    """A tag in a sequence, so that its schema is some way down."""
    content = {"type": "json_schema", "json_schema": schema, "style": style}
    tag = {"type": "tag", "begin": "<", "content": content, "end": ">"}
    elements = [{"type": "const_string", "value": "x"}, tag]
    format_ = {"type": "sequence", "elements": elements}
    return GrammarSpec.structural_tag({"type": "structural_tag", "format": format_}, **options)


PLACE = "/format/elements/1/content/json_schema"


def takes(client: GrammarClient, spec: GrammarSpec, texts: list[str]) -> list[str]:
    """Those of some texts that the masks of a spec admit."""
    grammar = client.compile(spec, BYTES)
    return [text for text in texts if accepts(client, grammar, text)]


def refusal_of(client: GrammarClient, spec: GrammarSpec) -> Refused:
    """The refusal of a spec."""
    with pytest.raises(Refused) as caught:
        client.compile(spec, BYTES)
    return caught.value


@pytest.mark.parametrize("spec", SPEAKERS, ids=lambda spec: str(spec.type))
def test_auto_takes_the_first_that_enforces_all(client: GrammarClient, spec: GrammarSpec) -> None:
    assert attempts(spec) == SPEAKERS[spec]
    assert client.compile(spec, BYTES).backend == SPEAKERS[spec][0]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 1.0, "maxItems": 2.0},
        {"contains": {"type": "null"}, "minContains": 1.0, "maxContains": 2.0},
        {
            "if": {"properties": {"a": {"oneOf": [{}, {"const": ["a"]}, {"enum": [3, {}]}]}}},
            "then": {"required": ["b"]},
        },
        {"enum": [1, 2], "$dynamicRef": "#x"},
        {"enum": [10**400], "multipleOf": 0.5},
    ],
)
def test_odd_schemas_are_planned(schema: Any) -> None:
    assert plan(GrammarSpec.json_schema(schema), Limits()).attempts


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_count_may_be_written_as_a_float(client: GrammarClient, backend: str) -> None:
    spec = GrammarSpec.json_schema({"type": "string", "minLength": 1.0, "maxLength": 2.0},
                                   backend=backend)  # fmt: skip
    assert takes(client, spec, ['""', '"a"', '"ab"', '"abc"']) == ['"a"', '"ab"']


def test_auto_prefers_who_enforces_all() -> None:
    # llguidance counts what isn't declared only, outlines nothing.
    least = GrammarSpec.json_schema({"type": "object", "properties": {"a": _I}, "minProperties": 1})
    found = plan(least, Limits()).attempts
    assert found[0].backend == "xgrammar"
    assert found[0].unenforced == ()
    assert all(attempt.unenforced == (("", "minProperties"),) for attempt in found[1:])
    spec = GrammarSpec.json_schema({"type": "array", "maxItems": 2, "items": _I})
    bounds = plan(spec, Limits()).attempts
    assert not any(attempt.unenforced for attempt in bounds)
    bounds = plan(GrammarSpec.json_schema({"type": "integer", "maximum": 2}), Limits()).attempts
    assert [bool(attempt.unenforced) for attempt in bounds] == [False, False, True]
    assert bounds[2].unenforced[0] == ("", "maximum")


def test_the_plan_is_the_same_in_every_process() -> None:
    """Neither the process nor its hash seed has a say."""
    script = """
from tests.grammars.test_plan import SPEAKERS, tag_of
from engine_client import GrammarSpec
from grammar_service.grammars.plan import plan
from grammar_service.grammars.schema import Limits
from grammar_service.grammars.spec import grammar_id
many = {f"p{i}": {"type": ["string", "null"], "format": "date"} for i in range(20)}
for spec in [*SPEAKERS, GrammarSpec.json_schema({"properties": many, "allOf": [
    {"properties": {"p1": {"maxLength": 30}}}, {"required": ["p3", "p2"]}]}),
    tag_of({"properties": many}), GrammarSpec.json_schema({"enum": [[1], {"a": 1}, "x"]})]:
    print(plan(spec, Limits()).attempts, grammar_id(spec, "tok", "versions"))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == len(SPEAKERS) + 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "spec", [s for s, b in SPEAKERS.items() if b != BACKENDS[:2]], ids=lambda s: str(s.type)
)
def test_a_backend_asked_for_is_taken_or_refused(
    client: GrammarClient, spec: GrammarSpec, backend: str
) -> None:
    asked = GrammarSpec(spec.type, spec.source, spec.choices, backend=backend)
    if backend in SPEAKERS[spec]:
        assert attempts(asked) == [backend]
        if (backend, spec.type) == ("outlines", "json_object"):
            return  # it can, and takes ten seconds
        assert client.compile(asked, BYTES).backend == backend
        return
    with pytest.raises(Invalid, match=SPEAKERS[spec][0]):
        plan(asked, Limits())
    refused = refusal_of(client, asked)
    assert refused.reason == "SPEC_UNSUPPORTED"
    assert backend in refused.message
    assert SPEAKERS[spec][0] in refused.message


# What is asked for and not enforced is refused, even if another could.
@pytest.mark.parametrize(
    ("backend", "schema", "keyword"),
    [
        (
            "llguidance",
            {"type": "object", "properties": {"a": _I}, "minProperties": 1},
            "minProperties",
        ),
        ("xgrammar", {"type": "string", "pattern": "^a", "maxLength": 3}, "maxLength"),
        ("outlines", {"type": "integer", "minimum": 3}, "minimum"),
    ],
)
def test_a_backend_asked_for_names_what_it_lacks(
    client: GrammarClient, backend: str, schema: dict[str, Any], keyword: str
) -> None:
    refused = refusal_of(client, GrammarSpec.json_schema(schema, backend=backend))
    assert refused.reason == "SPEC_UNENFORCED"
    assert ("", keyword) in refused.unenforced
    assert client.compile(GrammarSpec.json_schema(schema), BYTES).backend != backend


SPACED = {
    "type": "object",
    "properties": {"a": _I, "b": {"type": "array", "items": _I}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("most", [0, 1, 8])
def test_white_space_is_bounded_alike(client: GrammarClient, backend: str, most: int) -> None:
    def text(*runs: str) -> str:
        """The text with white space in each place that has some."""
        places = "{_'a'_:_1_,_'b'_:_[_1_,_2_]_}".replace("'", '"').split("_")
        padded = [*runs, *[""] * len(places)]
        return "".join(part + white for part, white in zip(places, padded, strict=False))

    places = 12
    spec = GrammarSpec.json_schema(SPACED, backend=backend, max_whitespace=most)
    accepted = [text(*[" " * count] * places) for count in {0, most}]
    accepted += [text(*[""] * place, "\n" * most) for place in range(places)]
    accepted += [text(*["", " \n\r\t" * 2][:2])] if most == 8 else []
    # outlines-core has white space in fewer places.
    assert takes(client, spec, accepted) == accepted or (backend == "outlines" and most > 0)
    rejected = [text(*[""] * place, " " * (most + 1)) for place in range(places)]
    rejected += [" " + text(), text() + " ", text(*[""] * 4, "\u00a0"), text(*[""] * 4, "\f")]
    assert takes(client, spec, rejected) == []


@pytest.mark.parametrize("most", [1, 8])
def test_white_space_in_tags_is_bounded_as_well(client: GrammarClient, most: int) -> None:
    def text(count: int) -> str:
        return 'x<{"a":' + " " * count + "1}>"

    schema = {"type": "object", "properties": {"a": _I}, "required": ["a"]}
    spec = tag_of(schema, max_whitespace=most)
    assert takes(client, spec, [text(0), text(most)]) == [text(0), text(most)]
    assert takes(client, spec, [text(most + 1)]) == []


def test_tags_without_white_space_are_refused(client: GrammarClient) -> None:
    """Xgrammar's tags know no such thing, and unbounded white space would be worse."""
    assert refusal_of(client, tag_of({}, max_whitespace=0)).reason == "SPEC_UNSUPPORTED"


PAIR = {"type": "object", "properties": {"a": _I, "b": _I}}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("required", [[], ["b"], ["b", "a"]])
@pytest.mark.parametrize("closed", [True, False])
def test_keys_may_be_kept_in_order(
    client: GrammarClient, backend: str, required: list[str], closed: bool
) -> None:
    options: SpecOptions = {"backend": backend, "close_objects": closed, "fixed_key_order": True}
    spec = GrammarSpec.json_schema({**PAIR, "required": required}, **options)
    texts = ['{"a":1,"b":2}', '{"b":2}' if len(required) < 2 else '{"a":2,"b":1}']
    assert takes(client, spec, texts) == texts
    rejected = ['{"a":1,"b":2,"a":3}', '{"a":1,"b":"2"}']
    # llguidance may have the required keys first.
    if backend != "llguidance" or not required:
        rejected.append('{"b":2,"a":1}')
    assert takes(client, spec, rejected) == []


@pytest.mark.parametrize("backend", ["auto", "llguidance", "xgrammar"])
def test_objects_are_open_unless_they_are_closed(client: GrammarClient, backend: str) -> None:
    texts = ['{"a":1}', '{"a":1,"c":"x"}']
    inner = {"type": "object", "properties": {"in": PAIR}, "required": ["in"]}
    for schema, before, after in ((PAIR, "", ""), (inner, '{"in":', "}")):
        wrapped = [before + text + after for text in texts]
        spec = GrammarSpec.json_schema(schema, backend=backend)
        assert takes(client, spec, wrapped) == wrapped
        spec = GrammarSpec.json_schema(schema, backend=backend, close_objects=True)
        assert takes(client, spec, wrapped) == wrapped[:1]
    # What says that it is open stays so.
    open_ = GrammarSpec.json_schema(
        {**PAIR, "additionalProperties": True}, backend=backend, close_objects=True
    )
    assert takes(client, open_, texts) == texts


# outlines-core has no open objects beside `properties`: it allows less, and never more.
def test_outlines_closes_objects(client: GrammarClient) -> None:
    for closed in (False, True):
        spec = GrammarSpec.json_schema(PAIR, backend="outlines", close_objects=closed)
        assert takes(client, spec, ['{"a":1}']) == ['{"a":1}']
        assert takes(client, spec, ['{"a":"x"}', '{"b":1,"c":}', "[]"]) == []


def test_objects_in_tags_are_open_unless_they_are_closed(client: GrammarClient) -> None:
    texts = ['x<{"a":1}>', 'x<{"a":1,"c":"x"}>']
    assert takes(client, tag_of(PAIR), texts) == texts
    assert takes(client, tag_of(PAIR, close_objects=True), texts) == texts[:1]


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_separators(client: GrammarClient, backend: str) -> None:
    spec = GrammarSpec.json_schema(
        SPACED, backend=backend, item_separator=", ", key_separator=": ", max_whitespace=0
    )
    texts = ['{"a": 1, "b": [1, 2]}', '{"a":1,"b":[1,2]}', '{"a": 1,"b": [1,2]}']
    if backend == "outlines":
        assert refusal_of(client, spec).reason == "SPEC_UNSUPPORTED"
        return
    assert takes(client, spec, texts) == texts[:1]


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("separator", [" ,", ",  ", "\n,\t"])
def test_separators_are_just_those(client: GrammarClient, fixed: bool, separator: str) -> None:
    spec = GrammarSpec.json_schema(
        SPACED,
        item_separator=separator,
        max_whitespace=0,
        fixed_key_order=fixed,
        backend="llguidance",
    )
    parts = ['{"a":1', '"b":[1', "2]}"]
    wrong = [",", separator + " ", ""]
    assert takes(client, spec, [s.join(parts) for s in (separator, *wrong)]) == [
        separator.join(parts)
    ]


def test_separators_go_with_no_white_space(client: GrammarClient) -> None:
    spec = GrammarSpec.json_schema(SPACED, key_separator=" : ")
    assert refusal_of(client, spec).reason == "SPEC_INVALID"


def test_separators_in_tags_are_heard_or_refused(client: GrammarClient) -> None:
    spec = tag_of({**PAIR, "additionalProperties": False}, key_separator=": ", max_whitespace=0)
    with contextlib.suppress(Refused):
        assert takes(client, spec, ['x<{"a": 1}>', 'x<{"a":1}>']) == ['x<{"a": 1}>']


def test_formats_are_annotations_unless_they_are_strict(client: GrammarClient) -> None:
    schema = {"type": "object", "properties": {"m": {"type": "string", "format": "made-up"}}}
    named = (("/properties/m", "format"),)
    grammar = client.compile(GrammarSpec.json_schema(schema), BYTES)
    assert (grammar.unenforced, grammar.annotations) == ((), named)
    refused = refusal_of(client, GrammarSpec.json_schema(schema, strict_formats=True))
    assert (refused.reason, refused.unenforced) == ("SPEC_UNENFORCED", named)
    spec = GrammarSpec.json_schema(schema, strict_formats=True, allow_unenforced=True)
    assert client.compile(spec, BYTES).unenforced == named
    # One that is enforced is so either way.
    for strict in (False, True):
        spec = GrammarSpec.json_schema({"type": "string", "format": "date"}, strict_formats=strict)
        assert takes(client, spec, ['"2024-02-29"', '"x"']) == ['"2024-02-29"']


def test_each_of_two_formats_is_heard(client: GrammarClient) -> None:
    schema = {"type": "string", "allOf": [{"format": "hostname"}, {"format": "ipv4"}]}
    spec = GrammarSpec.json_schema(schema, strict_formats=True)
    assert takes(client, spec, ['"1.2.3.4"', '"a.b"', '"::1"']) == ['"1.2.3.4"']
    second = (("/allOf/1", "format"),)
    spec = GrammarSpec.json_schema(schema, backend="xgrammar", strict_formats=True)
    assert refusal_of(client, spec).unenforced == second
    grammar = client.compile(GrammarSpec.json_schema(schema, backend="xgrammar"), BYTES)
    assert (grammar.unenforced, grammar.annotations) == ((), second)


LOOSE = {
    "type": "object",
    "properties": {
        "u": {"type": "array", "items": _I, "uniqueItems": True},
        "f": {"type": "string", "format": "made-up"},
    },
    "required": ["u"],
}


def test_a_tag_names_what_is_not_enforced(client: GrammarClient) -> None:
    unique, format_ = (f"{PLACE}/properties/u", "uniqueItems"), (f"{PLACE}/properties/f", "format")
    refused = refusal_of(client, tag_of(LOOSE))
    assert (refused.reason, refused.unenforced) == ("SPEC_UNENFORCED", (unique,))
    assert f"uniqueItems at {PLACE}/properties/u" in refused.message
    grammar = client.compile(tag_of(LOOSE, allow_unenforced=True), BYTES)
    assert (grammar.unenforced, grammar.annotations) == ((unique,), (format_,))
    assert accepts(client, grammar, 'x<{"u":[1,1]}>')
    assert not accepts(client, grammar, 'x<{"u":["1"]}>')
    refused = refusal_of(client, tag_of(LOOSE, strict_formats=True))
    assert {*refused.unenforced} == {unique, format_}


def test_expressions_in_tags_are_read_as_elsewhere(client: GrammarClient) -> None:
    def tag(pattern: str) -> GrammarSpec:
        content = {"type": "regex", "pattern": pattern}
        format_ = {"type": "tag", "begin": "<", "content": content, "end": ">"}
        return GrammarSpec.structural_tag({"type": "structural_tag", "format": format_})

    assert takes(client, tag(r"^\d.$"), ["<4a>", "<٤a>", "<4\n>"]) == ["<4a>"]
    for pattern in ("(?=a)b", "a("):
        refused = refusal_of(client, tag(pattern))
        assert refused.reason == "SPEC_INVALID"
        assert "/format/content/pattern: expected a regular expression" in refused.message
    strings = {
        "s": {"type": "string", "pattern": r"^\d$|,"},
        "t": {"type": "string", "maxLength": 2},
    }
    spec = tag_of({"type": "object", "properties": strings})
    good = ['x<{"s":"4"}>', 'x<{"s":"a,b","t":"é"}>']
    bad = ['x<{"s":"٤"}>', 'x<{"s":"44"}>', 'x<{"t":"\t"}>', 'x<{"t":"abc"}>']
    assert takes(client, spec, good + bad) == good


def test_a_tag_is_searched_wherever_a_schema_is(client: GrammarClient) -> None:
    one = {"type": "json_schema", "json_schema": LOOSE}
    tags = [{"begin": "<a>", "content": one, "end": "</a>"}]
    triggered = {"type": "triggered_tags", "triggers": ["<a>"], "tags": tags}
    spec = GrammarSpec.structural_tag({"type": "structural_tag", "format": triggered})
    place = "/format/tags/0/content/json_schema/properties/u"
    assert refusal_of(client, spec).unenforced == ((place, "uniqueItems"),)
    # A property may be called as the tag's own key is.
    inner = {"type": "object", "properties": {"json_schema": LOOSE["properties"]["u"]}}  # type: ignore[index]
    found = refusal_of(client, tag_of(inner)).unenforced
    assert found == ((f"{PLACE}/properties/json_schema", "uniqueItems"),)
    assert refusal_of(client, tag_of({"required": True})).reason == "SPEC_INVALID"
    # In another style, the same holds.
    assert refusal_of(client, tag_of(LOOSE, style="qwen_xml")).reason == "SPEC_UNENFORCED"
