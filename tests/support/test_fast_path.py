import pytest
import torch

from fedlada_mpi.session.process_state import torch_state_restored
from fedlada_mpi.support.fast_path import without_fast_path


@pytest.fixture
def enabled():
    """Whether it is: at first it is, which other tests may have changed."""
    mha = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(True)
    yield mha.get_fastpath_enabled
    mha.set_fastpath_enabled(before)


@pytest.mark.parametrize(
    "blocks", [(without_fast_path, torch_state_restored), (torch_state_restored, without_fast_path)]
)
def test_a_model_is_made_in_one_thread_and_trained_in_another(blocks, enabled):
    """The first leaves while the second is within."""
    first, second = (block() for block in blocks)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not enabled()
    second.__exit__(None, None, None)
    assert enabled()
