"""The law, tested: every mask equals that of a plain matcher that replayed the same tokens."""
