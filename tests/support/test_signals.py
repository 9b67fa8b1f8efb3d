import os
import signal

from fedlada_mpi.support import signals


def test_a_signal_stops_a_run_and_the_one_that_has_started_it():
    with signals.handled():
        with signals.handled():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.stop_requested()
        assert signals.stop_requested()
        with signals.handled():
            assert signals.stop_requested()
    with signals.handled():
        assert not signals.stop_requested()
