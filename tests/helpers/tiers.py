"""Cases of a test that only ``jobs/test.sh --all`` runs."""

from __future__ import annotations

from functools import partial

import pytest

# @pytest.mark.parametrize(("method", "ranks"), [("scaffold", 1), slow("scaffold", 2)])
slow = partial(pytest.param, marks=pytest.mark.slow)
# A case that runs alone whenever tests run, and with --all on 4 ranks; or on 2, where it is about what one rank does.
on_ranks_with_all = partial(pytest.param, marks=pytest.mark.ranks(slow=True))
on_two_with_all = partial(pytest.param, marks=pytest.mark.ranks(slow=True, two=True))
