from pathlib import Path

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyFedladaMpi(PythonPackage):
    """FedLADA and its baselines, cross-silo, over MPI on HPC machines."""

    # The clone that this recipe is in, as it is committed.
    git = f"file://{Path(__file__).resolve().parents[5]}"

    license("MIT")

    version("main", branch="main")

    variant("report", default=True, description="Interactive reports")
    variant("privacy", default=False, description="Secure aggregation and differential privacy")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")

    with default_args(type="build"):
        depends_on("py-setuptools@77:")

    with default_args(type=("build", "run")):
        depends_on("py-mpi4py@4.0:")
        depends_on("py-torch@2.4:")
        depends_on("py-torchvision")
        depends_on("py-numpy@1.24:")
        depends_on("py-h5py@3.8:")
        depends_on("py-matplotlib@3.6:")
        depends_on("py-pillow@10.1:")
        depends_on("py-tqdm")
        depends_on("py-loky@3.4:")
        depends_on("py-tomli", when="^python@:3.10")
        depends_on("py-plotly@5.18:", when="+report")
        depends_on("py-cryptography@42:", when="+privacy")
