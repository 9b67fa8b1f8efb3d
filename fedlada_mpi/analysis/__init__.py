"""Runs read from their directories, compared with each other, and shown: numbers, tables, figures and one HTML page.

Nothing here knows the paper; ``reproduction`` does, and ``report.py`` puts both into one report.
"""
