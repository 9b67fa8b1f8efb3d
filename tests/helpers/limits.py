"""How long tests wait for processes that they have started: only a hang takes as long, however slow the machine is."""

LIMIT = 600.0  # seconds
