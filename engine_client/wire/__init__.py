"""Generated from proto/grammar/v1 by `make proto`; edit the protos instead."""
