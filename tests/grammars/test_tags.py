# ruff: noqa: RUF001  (the bars of DeepSeek's tags)
"""What is enforced of the schemas in structural tags, in each format type and style."""

import json
from typing import Any

import pytest

from engine_client import GrammarClient, GrammarSpec
from grammar_service.grammars.plan import plan
from grammar_service.grammars.schema import Limits
from tests.grammars.test_plan import refusal_of, takes

# How an argument is written, by style: an object's texts are those of its arguments in a row.
ARGUMENT = {
    "qwen_xml": "<parameter={k}>{v}</parameter>",
    "minimax_xml": '<parameter name="{k}">{v}</parameter>',
    "minimax_m3_xml": "]<]minimax[>[<{k}>{v}]<]minimax[>[</{k}>",
    "deepseek_xml": '<｜DSML｜parameter name="{k}" string="{s}">{v}</｜DSML｜parameter>',
    "deepseek_v4_1_xml": '<｜DSML｜ parameter name="{k}" string="{s}">{v}</｜DSML｜ parameter>',
    "glm_xml": "<arg_key>{k}</arg_key><arg_value>{v}</arg_value>",
    "cohere_xml": '<cofl:value name="{k}" type="{raw}">{v}</cofl:value>',
    "kimi_k3_xml": '<|open|>argument key="{k}" type="{t}"<|sep|>{v}<|close|>argument<|sep|>',
}
STYLES = ["qwen_xml_parameter", "gemma", *ARGUMENT]
HIDING = {*STYLES} - {"gemma", "cohere_xml", "minimax_m3_xml"}
_I = {"type": "integer"}


def written(style: str, value: dict[str, Any]) -> str:
    """An object in a style."""
    if style == "gemma":
        parts = [
            f"{k}:" + (f'<|"|>{v}<|"|>' if isinstance(v, str) else str(v)) for k, v in value.items()
        ]
        return "{" + ",".join(parts) + "}"
    form = ARGUMENT["qwen_xml" if style == "qwen_xml_parameter" else style]
    text = ""
    for key, item in value.items():
        string = isinstance(item, str)
        kind = "string" if string else "number"
        words = {"s": json.dumps(string), "raw": "raw" if string else "json", "t": kind}
        text += form.format(k=key, v=item if string else json.dumps(item), **words)
    return text


def tag(style: str, schema: Any, **options: Any) -> GrammarSpec:
    """A tag that is nothing but a schema in a style."""
    if style == "qwen_xml_parameter":
        format_ = {"type": style, "json_schema": schema}
    else:
        format_ = {"type": "json_schema", "style": style, "json_schema": schema}
    format_ |= {key: options.pop(key) for key in ("any_order", "excludes") if key in options}
    return GrammarSpec.structural_tag({"type": "structural_tag", "format": format_}, **options)


def unenforced(spec: GrammarSpec) -> tuple[tuple[str, str], ...]:
    """What a tag's masks wouldn't enforce, by pointers into its schema."""
    found = plan(spec, Limits()).attempts[0].unenforced
    return tuple((item.pointer.removeprefix("/format/json_schema"), item.keyword) for item in found)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 3, "maximum": 5}, [4], [8, 2]),
        ({"type": "integer", "multipleOf": 7}, [14], [8]),
        ({"enum": ["x", 1]}, ["x", 1], ["z", 3]),
        ({"allOf": [_I, {"maximum": 5}]}, [4], [8]),
        ({"oneOf": [{"type": "integer", "maximum": 1}, {"type": "integer", "minimum": 9}]},
         [1, 9], [5]),
        ({"type": "string", "maxLength": 3}, ["abc"], ["abcd"]),
        ({"type": "string", "minLength": 3}, ["abc"], ["ab"]),
        ({"type": "string", "pattern": "^a+$"}, ["aa"], ["b"]),
    ],
)  # fmt: skip
def test_each_style_enforces_or_names(
    client: GrammarClient, style: str, schema: Any, good: list[Any], bad: list[Any]
) -> None:
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    spec = tag(style, whole)
    lengths = [("/properties/a", key) for key in ("minLength", "maxLength") if key in schema]
    if style == "gemma" and lengths:
        assert refusal_of(client, spec).unenforced == tuple(
            (f"/format/json_schema{at}", key) for at, key in lengths
        )
        return
    assert unenforced(spec) == ()
    if style == "minimax_m3_xml" and schema.get("type") == "string":
        assert refusal_of(client, spec).reason == "SPEC_INVALID"
        return
    texts = [written(style, {"a": value}) for value in good]
    assert takes(client, spec, [*texts, *(written(style, {"a": v}) for v in bad), ""]) == texts


@pytest.mark.parametrize("style", STYLES)
def test_what_xgrammar_drops_is_named_in_each_style(client: GrammarClient, style: str) -> None:
    for schema, named in (
        ({"uniqueItems": True}, ("/properties/a", "uniqueItems")),
        ({"type": "array", "contains": _I}, ("/properties/a", "contains")),
        ({"type": "number", "multipleOf": 0.3}, ("/properties/a", "multipleOf")),
    ):
        spec = tag(style, {"type": "object", "properties": {"a": schema}})
        refused = refusal_of(client, spec)
        assert refused.reason == "SPEC_UNENFORCED"
        assert ("/format/json_schema" + named[0], named[1]) in refused.unenforced
    assert refusal_of(client, tag(style, {"required": True})).reason == "SPEC_INVALID"


@pytest.mark.parametrize("style", STYLES)
def test_declared_arguments_keep_their_schemas(client: GrammarClient, style: str) -> None:
    declared = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 3}}}
    texts = [written(style, value) for value in ({"a": 1}, {"c": 1}, {"a": 8}, {"a": "x"})]
    kept = texts[:2] if style in ("cohere_xml", "gemma") else texts[:1]
    if style != "minimax_m3_xml":
        inner = {"type": "object", "properties": {"o": declared}}
        assert unenforced(tag(style, inner)) == ()
    else:
        typed = tag(style, {**declared, "additionalProperties": _I})
        assert refusal_of(client, typed).reason == "SPEC_INVALID"
        assert takes(client, tag(style, declared), texts) == kept
        return
    assert takes(client, tag(style, declared), texts) == kept
    open_ = {**declared, "additionalProperties": _I}
    hidden = (("", "properties"),) if style in HIDING else ()
    for schema in (open_, {"anyOf": [open_, {**declared, "additionalProperties": False}]},
                   {"$ref": "#/$defs/d", "$defs": {"d": open_}}):  # fmt: skip
        assert [key for _, key in unenforced(tag(style, schema))] == [key for _, key in hidden]
    loose = tag(style, open_, allow_unenforced=True)
    assert takes(client, loose, texts) == (texts[:3] if hidden else texts[:2])


def test_options_of_a_format_that_drop_keywords_name_them(client: GrammarClient) -> None:
    short = {"type": "string", "maxLength": 2}
    assert unenforced(tag("json", short)) == ()
    assert unenforced(tag("json", short, excludes=["z"])) == (("", "maxLength"),)
    pair = {"type": "object", "properties": {"a": _I, "b": _I}, "required": ["a", "b"]}
    assert unenforced(tag("json", pair)) == ()
    spec = tag("json", {**pair, "additionalProperties": False}, any_order=True)
    assert unenforced(spec) == (("", "required"),)
    assert takes(client, GrammarSpec.structural_tag(spec.source, allow_unenforced=True),
                 ['{"b": 1, "a": 1}', '{"a": 1, "a": 1}', '{"a": "x", "b": 1}']
                 ) == ['{"b": 1, "a": 1}', '{"a": 1, "a": 1}']  # fmt: skip


@pytest.mark.parametrize(
    ("format_", "reason"),
    [
        ({"json_schema": {"uniqueItems": True}}, "SPEC_INVALID"),
        ({"type": "const_string", "value": "a", "json_schema": {}}, "SPEC_INVALID"),
        ({"type": "qwen_xml_parameter", "json_schema": "{}"}, "SPEC_INVALID"),
        ({"type": "json_schema", "style": "nope", "json_schema": {}}, "SPEC_INVALID"),
        ({"type": "grammar", "syntax": "lark", "grammar": 'start: %json {"uniqueItems": true}'},
         "SPEC_UNSUPPORTED"),
    ],
)  # fmt: skip
def test_schemas_that_are_not_read_are_refused(
    client: GrammarClient, format_: dict[str, Any], reason: str
) -> None:
    spec = GrammarSpec.structural_tag({"type": "structural_tag", "format": format_})
    assert refusal_of(client, spec).reason == reason


@pytest.mark.parametrize("style", [None, ["gemma"]])
def test_a_style_that_is_no_text_is_json(client: GrammarClient, style: Any) -> None:
    schema = {"type": "string", "maxLength": 3}
    format_ = {"type": "json_schema", "style": style, "json_schema": schema}
    spec = GrammarSpec.structural_tag({"type": "structural_tag", "format": format_})
    assert takes(client, spec, ['"abc"', '"abcd"']) == ['"abc"']
