from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyLoky(PythonPackage):
    """Worker processes that are started without fork."""

    homepage = "https://loky.readthedocs.io"
    pypi = "loky/loky-3.7.0.tar.gz"

    license("BSD-3-Clause")

    version("3.7.0", sha256="80928106fe18b5300c6f1b3a871d71e68a81dc9b2fe5c8ee4afe93bb9ba6424d")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools", type="build")
    depends_on("py-cloudpickle", type=("build", "run"))
