"""Ranks that are lost while the others go on: the one place that knows of them, but for MPI's own part.

A rank keeps a snapshot of the last round that all have done (``snapshot.py``). Where a rank is lost, the others agree
on where to go on (``attempts.py``), share out its clients or leave them out, and train on (``departures.py``).
"""
