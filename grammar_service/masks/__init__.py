"""Masks: their layout, and the shared-memory regions that they are written to.

One bit a token, 1 = allowed, little-endian 32-bit words, least significant bit first.
"""
