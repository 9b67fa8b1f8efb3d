"""Silos that prepare their own data: their files, what they make public, and what they agree on before a run."""
