"""Walking a JSON schema: which values of its keywords are schemas, and where a reference leads.

Nothing here recurses, so that a hostile schema can't exhaust Python's stack.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any] | bool
Node = dict[str, Any]

# Of all drafts from 4 to 2020-12; `enum`, `const`, `default` and `examples` hold values, not
# schemas, and are never looked into.
ONE = {
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items",
    "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
MANY = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
NAMED = {
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
}  # fmt: skip
DEFINITIONS = ("$defs", "definitions")


def escape(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def unescape(part: str) -> str:
    """A part of a JSON pointer as a name."""
    return part.replace("~1", "/").replace("~0", "~")


def children(node: Node) -> Iterator[tuple[str, Any]]:
    """What a schema holds where the standard has schemas, with the pointer from the node."""
    for key, value in node.items():
        if key in NAMED and isinstance(value, dict):
            for name, inner in value.items():
                # `dependencies` also has lists of names.
                if not (key == "dependencies" and isinstance(inner, list)):
                    yield f"/{escape(key)}/{escape(name)}", inner
        elif key in MANY and isinstance(value, list):
            for i, inner in enumerate(value):
                yield f"/{key}/{i}", inner
        elif key in ONE and isinstance(value, dict | bool):
            yield f"/{key}", value


def subschemas(schema: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    """Every subschema with its JSON pointer: the schema itself first, in the order of the text."""
    stack = [(pointer, schema)]
    while stack:
        pointer, node = stack.pop()
        yield pointer, node
        if isinstance(node, dict):
            inner = [(pointer + path, child) for path, child in children(node)]
            stack += reversed(inner)


class References:
    """Where the references of a schema lead. Only into the schema itself: nothing is fetched."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        """Pointers by `$id`, `id`, and `#anchor`."""
        for pointer, node in subschemas(root):
            if isinstance(node, dict):
                self._index(pointer, node)

    def _index(self, pointer: str, node: Node) -> None:
        for key in ("$id", "id"):
            name = node.get(key)
            # In draft 4 an `id` is an address; elsewhere it is just some property's sample.
            if isinstance(name, str) and name:
                self._names.setdefault(name, pointer)
                if not name.startswith("#"):
                    self._names.setdefault(name.rstrip("#"), pointer)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(key), str):
                self._names.setdefault(f"#{node[key]}", pointer)

    def resolve(self, reference: str) -> str | None:
        """The JSON pointer that a `$ref` means, or None where the schema has nothing there."""
        address, _, fragment = reference.partition("#")
        pointer = ""
        if address:
            base = self._names.get(address)
            if base is None:
                return None
            pointer = base
        fragment = unquote(fragment)
        if not fragment:
            return pointer
        if not fragment.startswith("/"):
            return self._names.get(f"#{fragment}")
        for candidate in (pointer + fragment, fragment):
            # Many a schema with an id inside means its root by "#/definitions/…".
            if self.at(candidate) is not None:
                return candidate
        return None

    def at(self, pointer: str) -> Any:
        """What the schema has at a pointer; None where it has nothing."""
        value = self._root
        for part in pointer.split("/")[1:]:
            name = unescape(part)
            if isinstance(value, dict):
                value = value.get(name)
            elif isinstance(value, list) and name.isdigit() and int(name) < len(value):
                value = value[int(name)]
            else:
                return None
        return value
