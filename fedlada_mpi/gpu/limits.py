"""What is too much for our kernels at once, for those who can give them less."""

from __future__ import annotations

import torch

MOST_ELEMENTS = 2**31  # of a client, as indices within its share of a tensor are 32 bits wide


class TooManyElements(torch.cuda.OutOfMemoryError):
    """As if the memory were full: with fewer examples at once there are fewer elements."""
