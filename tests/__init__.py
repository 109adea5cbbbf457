"""Tests; `support` has what they share."""
