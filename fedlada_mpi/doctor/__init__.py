"""``python -m fedlada_mpi.doctor``: checks of the installation and of the machine, line by line."""
