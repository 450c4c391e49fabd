"""Compiles the products of language models (experts/llm/kernels) when a wheel or an environment is made.

The compiler is a wheel itself, ziglang, of the build alone. What is compiled runs with glibc 2.28 or newer, on any CPU
of its machine: it asks the CPU which instructions to use. On other machines nothing is compiled, and torch multiplies.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("experts/llm/kernels")
TARGETS = {("Linux", "x86_64"): "x86_64-linux-gnu.2.28"}
OPTIONS = ("-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-s", "-Wall", "-Wextra", "-Werror")


class Compiled(build_ext):
    """A library without an interface to Python: one for all its versions."""

    def get_ext_filename(self, fullname):
        *folders, name = fullname.split(".")
        return str(Path(*folders, f"{name}.so"))

    def build_extension(self, ext):
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        compiler = [sys.executable, "-m", "ziglang", "cc", "-target", TARGETS[platform.system(), platform.machine()]]
        with tempfile.TemporaryDirectory() as cache:  # of the compiler, which would keep one in the home directory
            folders = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), cache)
            command = [*compiler, *OPTIONS, "-o", str(library), *ext.sources]
            subprocess.run(command, env=os.environ | folders, check=True)


libraries = [Extension("experts.llm.kernels.libproducts", [str(KERNELS / "products.c")])]
is_known = (platform.system(), platform.machine()) in TARGETS
setup(cmdclass={"build_ext": Compiled}, ext_modules=libraries if is_known else [])
