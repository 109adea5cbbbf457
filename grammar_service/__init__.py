"""The grammar service: owns compiled grammars and one state per sequence.

Layers, each of which knows only those below it: server, sequences, grammars, backends; masks and
store know nobody above them. `errors` and `metrics` may be used by all.
"""

__version__ = "0.1.0"
