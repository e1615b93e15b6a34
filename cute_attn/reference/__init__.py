"""Attention in plain torch, written for reading: the definition of every option of the public functions."""

from __future__ import annotations

from cute_attn.reference.decode import decode, merge
from cute_attn.reference.prefill import FLOAT32, FLOAT64, Precision, attention, sequences, visible_keys

__all__ = ["FLOAT32", "FLOAT64", "Precision", "attention", "decode", "merge", "sequences", "visible_keys"]
