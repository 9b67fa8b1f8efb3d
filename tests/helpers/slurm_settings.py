"""What the throw-away SLURM clusters of the tests have in common."""

from __future__ import annotations

from pathlib import Path

INSTALL = "apt-get install --no-install-recommends slurm-wlm munge libpmix-dev"
# Without cgroups, accounting, or a look at the hardware.
COMMON = """\
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
"""


def pmix_missing() -> str:
    """Why there is no srun --mpi=pmix; empty if there is."""
    # Slurm's plug-in opens this link, which only the -dev package has.
    if list(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")):
        return ""
    return f"no libpmix.so for srun --mpi=pmix: {INSTALL}"
