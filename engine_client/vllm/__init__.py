"""vLLM 0.32 on the grammar service: nothing but configuration is needed.

- `plugin`: what vLLM's entry points load. Does nothing unless GRAMMAR_CLIENT_TARGET is set.
- `settings`: the environment variables.
- `manager`: native structured outputs; EngineCore's structured-output manager.
- `validation`: a request's grammar is compiled when it is submitted, so that a bad one is a 400.
- `processor`: custom logits processors, for both model runners.
- `requests`: what a request asks for, as a grammar spec.
- `grammars`: the client, the model's vocabulary, and compiles that nobody waits for.

This package imports vLLM; importing it by name imports none of these.
"""
