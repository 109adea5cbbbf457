"""Whole programs over the client."""
