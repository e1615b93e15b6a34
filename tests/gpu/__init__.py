"""Tests that need a GPU. ``python -m tests.gpu.record`` runs them and keeps what came out."""
