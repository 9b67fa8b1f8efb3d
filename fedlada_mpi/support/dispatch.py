"""Operations of torch seen, and changed, as they are called."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Torch's, without its compiler, which that imports at the first operation: 2 s of a start; nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
