"""The names of everything that is counted, in one place (Prometheus conventions)."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

STEPS = Counter(
    "grammar_steps_total", "Steps answered, by transport and result.", ["via", "result"]
)
STEP_SECONDS = Histogram("grammar_step_seconds", "Time of a step in the service.", buckets=_SECONDS)
ROWS = Counter("grammar_rows_total", "Rows answered, by outcome.", ["outcome"])
TOKENS = Counter("grammar_tokens_total", "Tokens that matchers took, replayed ones included.")
DRAFTS = Counter("grammar_drafts_total", "Draft tokens seen, by whether legal.", ["legal"])
REWINDS = Counter("grammar_rewinds_total", "Rows that rewound their sequence.")
REWOUND_TOKENS = Counter("grammar_rewound_tokens_total", "Tokens dropped by rewinds.")
REBUILDS = Counter("grammar_matcher_rebuilds_total", "Matchers built anew by replay.")
REPLAYED_TOKENS = Counter("grammar_replayed_tokens_total", "Tokens replayed into rebuilt matchers.")
MATCHER_EVICTIONS = Counter("grammar_matcher_evictions_total", "Matchers dropped for memory.")
MATCHER_BYTES = Gauge("grammar_matcher_bytes", "Estimated memory of live matchers.")
SEQUENCES = Gauge("grammar_sequences", "Sequences held.")
SEQUENCES_OPENED = Counter("grammar_sequences_opened_total", "Sequences opened.", ["how"])
SEQUENCES_ENDED = Counter("grammar_sequences_ended_total", "Sequences that went away.", ["why"])
BACKEND_ERRORS = Counter("grammar_backend_errors_total", "Backend calls that raised.", ["call"])
STREAMS = Gauge("grammar_streams", "Streams open.")
COMPILES = Counter("grammar_compiles_total", "Compile requests, by result.", ["result"])
COMPILE_SECONDS = Histogram(
    "grammar_compile_seconds",
    "Time of a compile in its child process.",
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30),
)
COMPILE_CHILDREN_ENDED = Counter(
    "grammar_compile_children_ended_total", "Compile children that were killed or died.", ["why"]
)
GRAMMARS = Gauge("grammar_grammars", "Compiled grammars held.")
GRAMMAR_BYTES = Gauge("grammar_grammar_bytes", "Memory of compiled grammars held.")
GRAMMAR_EVICTIONS = Counter("grammar_grammar_evictions_total", "Grammars dropped for memory.")
TOKENIZERS = Gauge("grammar_tokenizers", "Tokenizers held.")
