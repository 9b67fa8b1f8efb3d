"""The search for settings: a plan as data, strategies, the course of a search with its journal, and its page.

``fedlada_mpi/tune.py`` is the command; docs/tuning.md has examples.
"""
