"""Compiling and matching with xgrammar in this process.

Two use it, so that both mean the same by a spec: the service's xgrammar backend, and the client
when the service is gone and the policy says to go on in process. Imports xgrammar, and with it
torch and transformers, so import it only where it is needed.

What it does beyond calling the library, each measured with xgrammar 0.2.9:
- Stop tokens never go into a TokenizerInfo: one that a matcher's own stop set lacks would be legal
  everywhere. They are given to each matcher.
- Special tokens are entries without bytes, so that no text rule matches them. Such entries can't be
  named either, so a spec that names tokens gets another TokenizerInfo, where they are the byte
  0xFF, which no text has. In that one only, free text between triggered tags may hold them.
- A start rule that refers to itself gives masks that lack legal tokens, so an EBNF grammar gets a
  start of its own, and a schema that refers to its root has the root among its definitions.
- Strings with minLength or maxLength may hold control characters, which JSON forbids, so those are
  taken out of the grammar that the library makes of a schema.
- One compiler serves a vocabulary: what it keeps of earlier grammars' rules makes a compile of a
  small schema 1.4 ms instead of 14.
- Bits past the width in a mask's last word stay as the buffer had them; callers clear them.
"""

import json
import re
from typing import Any
from weakref import WeakKeyDictionary

import xgrammar

from engine_client.spec import GrammarSpec, GrammarType
from engine_client.vocabulary import Vocabulary

_TOKEN_RULE = re.compile(r"\b(Token|ExcludeToken|TokenTagDispatch)\s*\(")
_TOKEN_FORMAT = re.compile(
    r'"(token|any_tokens|exclude_token|token_triggered_tags|token_dispatch)"'
)
_TOKEN_KEYS = {"token", "exclude_tokens", "trigger_tokens"}
_TERMINALS = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')
_WITH_CONTROLS, _WITHOUT_CONTROLS = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
"""What a string with minLength or maxLength consists of, as the library prints it, and in JSON."""
_NO_TEXT = b"\xff"
_START = "__start"
_COMPILER_BYTES = 64 << 20

_compilers: WeakKeyDictionary[Vocabulary, dict[bool, xgrammar.GrammarCompiler]] = (
    WeakKeyDictionary()
)
_infos: WeakKeyDictionary[Vocabulary, dict[bool, xgrammar.TokenizerInfo]] = WeakKeyDictionary()


def compile_spec(spec: GrammarSpec, vocabulary: Vocabulary) -> xgrammar.CompiledGrammar:
    """Compiles a spec on this thread. Raises ValueError with the library's reason."""
    try:
        return _compile(_compiler(spec, vocabulary), spec, vocabulary)
    # The library's errors have no base class of their own. Whatever it raises, this spec did it.
    except Exception as error:
        raise ValueError(_message(error)) from None


def tokenizer_info(spec: GrammarSpec, vocabulary: Vocabulary) -> xgrammar.TokenizerInfo:
    """The TokenizerInfo that the spec is compiled against and loaded with."""
    named = _names_tokens(spec)
    infos = _infos.setdefault(vocabulary, {})
    if named not in infos:
        tokens = list(vocabulary.tokens[: vocabulary.width])
        for token_id in vocabulary.special_token_ids:
            if token_id < len(tokens):
                tokens[token_id] = _NO_TEXT if named else b""
        infos[named] = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=vocabulary.width, stop_token_ids=[]
        )
    return infos[named]


def _compiler(spec: GrammarSpec, vocabulary: Vocabulary) -> xgrammar.GrammarCompiler:
    named = _names_tokens(spec)
    compilers = _compilers.setdefault(vocabulary, {})
    if named not in compilers:
        compilers[named] = xgrammar.GrammarCompiler(
            tokenizer_info(spec, vocabulary), max_threads=1, cache_limit_bytes=_COMPILER_BYTES
        )
    return compilers[named]


def _names_tokens(spec: GrammarSpec) -> bool:
    if spec.type is GrammarType.EBNF:
        return bool(_TOKEN_RULE.search(spec.source))
    return spec.type is GrammarType.STRUCTURAL_TAG and bool(_TOKEN_FORMAT.search(spec.source))


def _compile(
    compiler: xgrammar.GrammarCompiler, spec: GrammarSpec, vocabulary: Vocabulary
) -> xgrammar.CompiledGrammar:
    match spec.type:
        case GrammarType.JSON_SCHEMA:
            return _compile_schema(compiler, _without_root_reference(spec.source), spec)
        case GrammarType.JSON_OBJECT:
            return _compile_schema(compiler, '{"type":"object"}', spec)
        case GrammarType.REGEX:
            return compiler.compile_regex(spec.source)
        case GrammarType.CHOICE:
            rules = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in spec.choices)
            return compiler.compile_grammar(f"root ::= {rules}")
        case GrammarType.EBNF:
            # A newline first: the source may end in a comment.
            return compiler.compile_grammar(
                f"{spec.source}\n{_START} ::= root\n", root_rule_name=_START
            )
        case GrammarType.STRUCTURAL_TAG:
            tag = _bind_tag(json.loads(spec.source), spec, vocabulary)
            grammar = xgrammar.Grammar.from_structural_tag(json.dumps(tag, ensure_ascii=False))
            return compiler.compile_grammar(_without_controls(grammar))
        case GrammarType.LARK:
            raise ValueError("Lark is llguidance's")


def _compile_schema(
    compiler: xgrammar.GrammarCompiler, schema: str, spec: GrammarSpec
) -> xgrammar.CompiledGrammar:
    if spec.max_whitespace == 0:
        separators = (spec.item_separator, spec.key_separator)
        grammar = xgrammar.Grammar.from_json_schema(
            schema, any_whitespace=False, separators=separators, strict_mode=False
        )
    else:
        grammar = xgrammar.Grammar.from_json_schema(
            schema, max_whitespace_cnt=spec.max_whitespace, strict_mode=False
        )
    return compiler.compile_grammar(_without_controls(grammar))


def _without_controls(grammar: xgrammar.Grammar) -> xgrammar.Grammar:
    """The grammar with strings of a bounded length as JSON has them."""
    text = str(grammar)
    if _WITH_CONTROLS not in text:
        return grammar
    return xgrammar.Grammar.from_ebnf(
        _TERMINALS.sub(
            lambda found: _WITHOUT_CONTROLS if found[0] == _WITH_CONTROLS else found[0], text
        )
    )


def _without_root_reference(source: str) -> str:
    """A schema that means the same, without a `$ref` to its root."""
    if '"$ref":"#"' not in source:
        return source
    return json.dumps({"$ref": "#/$defs/root", "$defs": {"root": _moved(json.loads(source))}})


def _moved(node: Any) -> Any:
    """A schema whose own references are those of a schema that moved into /$defs/root."""
    if isinstance(node, list):
        return [_moved(item) for item in node]
    if not isinstance(node, dict):
        return node
    moved = {key: _moved(value) for key, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/root{reference[1:]}"
    return moved


def _bind_tag(node: Any, spec: GrammarSpec, vocabulary: Vocabulary) -> Any:
    """The tag with token names as ids, and white space bounded in its JSON."""
    if isinstance(node, list):
        return [_bind_tag(item, spec, vocabulary) for item in node]
    if not isinstance(node, dict):
        return node
    # A schema is not a tag, whatever its properties are called.
    bound = {
        key: value if key == "json_schema" else _bind_tag(value, spec, vocabulary)
        for key, value in node.items()
    }
    if node.get("type") == "json_schema" and spec.max_whitespace > 0:
        bound.setdefault("max_whitespace_cnt", spec.max_whitespace)
    for key in _TOKEN_KEYS & node.keys():
        bound[key] = _token_ids(node[key], vocabulary)
    if node.get("type") == "token_dispatch" and isinstance(node.get("rules"), list):
        bound["rules"] = [
            [_token_ids(rule[0], vocabulary), *rule[1:]]
            if isinstance(rule, list) and rule
            else rule
            for rule in bound["rules"]
        ]
    return bound


def _token_ids(value: Any, vocabulary: Vocabulary) -> Any:
    if isinstance(value, list):
        return [_token_ids(item, vocabulary) for item in value]
    if isinstance(value, str):
        token_id = _by_name(vocabulary).get(value.encode())
        if token_id is None:
            raise ValueError(f"the tokenizer has no token {value!r}")
        return token_id
    if isinstance(value, int) and not 0 <= value < min(vocabulary.width, len(vocabulary.tokens)):
        raise ValueError(f"token {value} is outside the vocabulary")
    return value


def _by_name(vocabulary: Vocabulary) -> dict[bytes, int]:
    special = {vocabulary.tokens[token_id]: token_id for token_id in vocabulary.special_token_ids}
    return {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token} | special


def _message(error: Exception) -> str:
    """The library's message without its clock and source line."""
    return re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", str(error)).strip()[:2000]
