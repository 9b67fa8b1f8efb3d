"""What a run leaves on disk: who may write there (``claim``, ``lock``), checkpoints, metrics and results."""
