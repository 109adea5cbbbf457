"""Grammars: tokenizers, specs and their ids, the compile children, the cache of what they made."""
