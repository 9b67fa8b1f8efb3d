"""Cases of a test that only ``jobs/test.sh --all`` runs."""

from __future__ import annotations

from functools import partial

import pytest

# @pytest.mark.parametrize(("method", "ranks"), [("scaffold", 1), slow("scaffold", 2)])
slow = partial(pytest.param, marks=pytest.mark.slow)
# The same, of a case that runs alone whenever tests run, and on ranks with --all.
on_ranks_with_all = partial(pytest.param, marks=pytest.mark.ranks(slow=True))
