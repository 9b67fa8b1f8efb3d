"""The data of a run, from raw images to the arrays of a rank.

``sources`` reads raw data, ``partition`` assigns images to clients, ``write`` writes shards, ``shards`` reads them, and
``datasets`` finds or prepares the shards of ``--dataset``. The command is ``python -m data_prep``.
"""
