"""Small schemas of every keyword, and values that tell them apart."""

from typing import Any

from hypothesis import strategies as st

NAMES = ["a", "b", "ab", "c"]
_names = st.sampled_from(NAMES)
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 4),
    st.sampled_from([0.5, 1.5, 2.0]),
    st.sampled_from(["", "a", "b", "ab", "ba", "abc"]),
)
values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_names, inner, max_size=3)
    ),
    max_leaves=6,
)
_count = st.integers(0, 2)
_patterns = st.sampled_from(["^a", "b$", "^a$", "^[ab]+$", "c"])
_types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
_plain: dict[str, st.SearchStrategy[Any]] = {
    "type": st.one_of(_types, st.lists(_types, min_size=1, max_size=3, unique=True)),
    "enum": st.lists(values, min_size=1, max_size=4),
    "const": values,
    "minLength": _count,
    "maxLength": _count,
    "pattern": _patterns,
    "minimum": st.integers(-1, 3),
    "maximum": st.integers(-1, 3),
    "exclusiveMinimum": st.integers(-1, 3),
    "exclusiveMaximum": st.integers(-1, 3),
    "multipleOf": st.sampled_from([1, 2, 0.5]),
    "minItems": _count,
    "maxItems": _count,
    "uniqueItems": st.booleans(),
    "minProperties": _count,
    "maxProperties": _count,
    "required": st.lists(_names, max_size=2, unique=True),
    "dependentRequired": st.dictionaries(
        _names, st.lists(_names, max_size=2, unique=True), max_size=2
    ),
}


def _nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(_names, inner, max_size=3)
    applicators: dict[str, st.SearchStrategy[Any]] = {
        "allOf": some, "anyOf": some, "oneOf": some, "not": inner,
        "if": inner, "then": inner, "else": inner,
        "properties": named, "additionalProperties": inner, "propertyNames": inner,
        "patternProperties": st.dictionaries(_patterns, inner, max_size=2),
        "dependentSchemas": named, "items": inner, "prefixItems": some, "contains": inner,
        "unevaluatedProperties": st.just(False), "unevaluatedItems": st.just(False),
        "$ref": st.sampled_from(["#/$defs/one", "#/$defs/two"]),
    }  # fmt: skip
    keywords = {**_plain, **applicators}

    @st.composite
    def node(draw: st.DrawFn) -> Any:
        keys = draw(st.lists(st.sampled_from(list(keywords)), min_size=1, max_size=4, unique=True))
        return {key: draw(keywords[key]) for key in keys}

    return node()


_leaves = st.one_of(st.booleans(), st.fixed_dictionaries({"type": _types}))
_inner = st.recursive(_leaves, _nodes, max_leaves=6)


@st.composite
def schemas(draw: st.DrawFn) -> Any:
    """A schema whose two definitions may be referred to from anywhere, also from themselves."""
    schema = draw(_nodes(_inner))
    definitions = {name: draw(_inner) for name in ("one", "two")}
    return {**schema, "$defs": definitions}
