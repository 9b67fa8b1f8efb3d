# shellcheck shell=bash
# Settings of every job, read when a job is submitted and again when it runs.
# Edit the defaults here, or export the variables before submitting; docs/slurm.md explains them.

: "${FEDLADA_ACCOUNT:=}"        # account to charge; empty: your default
: "${FEDLADA_PARTITION:=}"      # partition of the training jobs; empty: the cluster's default
: "${FEDLADA_GPUS_PER_NODE:=}"  # GPUs of one node, such as 4 or a100:4; 0: train on CPUs
: "${FEDLADA_RANKS:=11}"        # ranks of a run: the server and N silos
: "${FEDLADA_RANKS_PER_NODE:=}" # empty: as many as GPUs; more: ranks share GPUs
: "${FEDLADA_CPUS_PER_RANK:=1}" # cores, and threads, of a rank
: "${FEDLADA_MODULES:=}"        # for `module load`, separated by spaces
: "${FEDLADA_VENV:=}"           # virtual or conda environment; empty: .venv of the clone if there, else python as found
: "${FEDLADA_MPI:=auto}"        # auto: mpirun --with-ft ulfm on one node where it can, else srun; ulfm: the former; another: srun --mpi=KIND
: "${FEDLADA_SBATCH:=}"         # more sbatch options for every job, separated by spaces
: "${FEDLADA_MAX_FAILURES:=5}"  # failures in a row after which a job is not requeued any more
: "${FEDLADA_LOGS:=logs}"       # folder of the jobs' output

: "${FEDLADA_HOME:=${SLURM_SUBMIT_DIR:-$PWD}}"
case $FEDLADA_LOGS in /*) ;; *) FEDLADA_LOGS=$PWD/$FEDLADA_LOGS ;; esac
mkdir -p "$FEDLADA_LOGS"
export FEDLADA_HOME FEDLADA_LOGS

if [ -n "$FEDLADA_MODULES" ]; then
    # The system's profile and module files do not expect -e and -u.
    shell_options=$(set +o)
    set +eu
    if ! type module >/dev/null 2>&1; then . /etc/profile; fi
    # shellcheck disable=SC2086
    module load $FEDLADA_MODULES || { echo "error: module load $FEDLADA_MODULES failed: see FEDLADA_MODULES" >&2; exit 2; }
    eval "$shell_options"
fi
if [ -z "$FEDLADA_VENV" ] && [ -x "$FEDLADA_HOME/.venv/bin/python" ]; then FEDLADA_VENV=$FEDLADA_HOME/.venv; fi
if [ -n "$FEDLADA_VENV" ]; then
    case $FEDLADA_VENV in /*) ;; *) FEDLADA_VENV=$PWD/$FEDLADA_VENV ;; esac
    if [ ! -x "$FEDLADA_VENV/bin/python" ]; then
        echo "error: no python in FEDLADA_VENV=$FEDLADA_VENV: expected the folder of a virtual environment" >&2
        exit 2
    fi
    PATH=$FEDLADA_VENV/bin:$PATH
fi
# Jobs run this clone, whatever folder they were submitted from.
export PYTHONPATH=$FEDLADA_HOME${PYTHONPATH:+:$PYTHONPATH}

# For use inside a job: MPI_KIND for srun, LAUNCH_KIND for launch.sh, and the environment of the ranks.
prepare_ranks() {
    local line name library=''
    case $FEDLADA_MPI in
        auto | ulfm) # such as "Open MPI 5.0.11"
            library=$(python -c 'import mpi4py; mpi4py.rc.initialize = False
from mpi4py import MPI; print(MPI.get_vendor()[0], ".".join(map(str, MPI.get_vendor()[1])))') || {
                echo "error: cannot import mpi4py with $(command -v python): see FEDLADA_VENV and FEDLADA_MODULES" >&2
                exit 2
            }
            ;;
    esac
    case $FEDLADA_MPI:$library in
        auto:"Open MPI"* | ulfm:*) MPI_KIND=pmix ;;
        auto:*) MPI_KIND=pmi2 ;;
        *) MPI_KIND=$FEDLADA_MPI ;;
    esac
    # shellcheck disable=SC2034
    LAUNCH_KIND=$MPI_KIND
    if [ "$FEDLADA_MPI" = ulfm ] && ! has_ulfm "$library"; then
        echo "error: FEDLADA_MPI=ulfm needs Open MPI 5, and its mpirun on the path; mpi4py uses $library," \
            "mpirun is $(command -v mpirun || echo missing)" >&2
        exit 2
    fi
    if [ "$FEDLADA_MPI" = ulfm ] || { [ "$FEDLADA_MPI" = auto ] && on_one_node && has_ulfm "$library"; }; then
        # shellcheck disable=SC2034
        LAUNCH_KIND=ulfm
        while read -r line; do
            name=${line%%=*}
            case $line in [A-Z]*) [ -n "${!name:-}" ] || export "${line?}" ;; esac
        done <"$FEDLADA_HOME/jobs/mpi.env"
    fi
    # srun does not take the cores per task over from sbatch by itself (since Slurm 22.05).
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SRUN_CPUS_PER_TASK}
    # Under srun Open MPI cannot know that it shares cores, and would spin while it waits.
    export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
}

# What starts the ranks of a run of a grid or a search, quoted as Python reads it: where the locale does not have a
# character, printf %q writes it in a way that bash alone does.
launcher() { python -c 'import shlex, sys; print(shlex.join(sys.argv[1:]))' bash "$FEDLADA_HOME/jobs/launch.sh" "$LAUNCH_KIND"; }

# has_ulfm LIBRARY: whether it is Open MPI from 5 on, and this mpirun its own.
has_ulfm() {
    case $1 in "Open MPI "[5-9].* | "Open MPI "[1-9][0-9].*) ;; *) return 1 ;; esac
    [[ $(mpirun --version 2>/dev/null) = *"(Open MPI) ${1#Open MPI }"* ]]
}

# On several nodes, Open MPI would with ULFM move vectors by TCP alone; and a SLURM that cancels or preempts the job ends mpirun's daemons
# on other nodes with their ranks, without which the others would do another round.
on_one_node() { [ "${SLURM_JOB_NUM_NODES:-1}" = 1 ]; }
