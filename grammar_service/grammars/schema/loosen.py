"""What is left of a schema without the keywords that a library doesn't enforce.

llguidance refuses a schema with one of those, where the other libraries pass over it. So a caller
who takes the unenforced upon itself would get another library, which may leave more.

Everything that the schema accepts, what is left accepts as well: no keyword is looked into that
turns that around, since none of those (`not`, `if`, `contains` and so on) stays. Only with
`patternProperties` gone, additional properties are all that remain for its names.
"""

from collections.abc import Callable
from typing import Any

from grammar_service.grammars.schema.walk import MANY, NAMED, ONE, Node


def loosened(node: Any, unenforced: Callable[[Node], set[str]]) -> Any:
    """The schema without what is unenforced; a `oneOf` is then what its branches have together.

    Args:
        node: The schema, rewritten.
        unenforced: Tells which keywords of a node the library doesn't enforce.
    """
    if not isinstance(node, dict):
        return node
    gone = unenforced(node)
    left = {key: _inside(key, value, unenforced) for key, value in node.items() if key not in gone}
    if "oneOf" in gone:
        any_of = {"anyOf": _inside("anyOf", node["oneOf"], unenforced)}
        if "anyOf" in left:
            left["allOf"] = [*left.get("allOf", []), any_of]
        else:
            left |= any_of
    return left


def _inside(key: str, value: Any, unenforced: Callable[[Node], set[str]]) -> Any:
    if key in NAMED and isinstance(value, dict):
        return {name: loosened(inner, unenforced) for name, inner in value.items()}
    if key in MANY and isinstance(value, list):
        return [loosened(inner, unenforced) for inner in value]
    return loosened(value, unenforced) if key in ONE else value
