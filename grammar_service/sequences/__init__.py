"""Sequences: their histories, the cache of their matchers, and the step itself."""
