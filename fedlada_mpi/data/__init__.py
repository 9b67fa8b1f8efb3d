"""From raw images to the arrays of a rank: ``sources`` read, ``partition`` divides, ``write`` makes shards, ``shards``
reads them, and ``datasets`` leads from ``--dataset`` to a directory of them. ``python -m data_prep`` is its command."""
