"""Build and packaging of the CUDA library; what the package is called and needs stands in pyproject.toml.

scripts/build_kernels.py knows how csrc/ is compiled. This file makes it a step of `build`, and makes the wheel a
platform wheel (but of no particular Python, as the library has no Python in it) exactly when there are kernels in it.
"""

import shutil
import sys
from functools import cached_property
from pathlib import Path

try:
    from setuptools import Command, Distribution, setup
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.build import build
except ImportError:
    sys.exit("[fla_kda_backend build] setuptools 77 or newer is needed to build: pip install -U setuptools wheel")

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))
import build_kernels as kernels  # noqa: E402


class KdaDistribution(Distribution):
    @cached_property
    def kernel_plan(self) -> "kernels.Plan | kernels.KernelsUnavailable":
        """What to build, or why nothing can be built. A request that cannot be met ends the build with its sentence."""
        try:
            plan = kernels.make_plan()
        except kernels.KernelsUnavailable as reason:
            return reason
        except kernels.BuildError as error:
            sys.exit(f"[fla_kda_backend build] {error}")
        for note in plan.notes:
            kernels.say(note)
        return plan

    def has_ext_modules(self) -> bool:
        return isinstance(self.kernel_plan, kernels.Plan)


class BuildKernels(Command):
    """Compile csrc/ into the package that is being built."""

    description = "compile the CUDA kernels (scripts/build_kernels.py builds them in place)"
    user_options = []
    editable_mode = False

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self):
        parent = ROOT if self.editable_mode else Path(self.build_lib)
        try:
            kernels.build_or_explain(parent, self.distribution.kernel_plan)
        except kernels.BuildError as error:
            sys.exit(f"[fla_kda_backend build] {error}")

    def get_source_files(self):
        return [str(path.relative_to(ROOT)) for path in kernels.sources()]

    def get_outputs(self):
        name = kernels.LIBRARY_NAME if self.distribution.has_ext_modules() else kernels.NO_KERNELS_NOTE
        return [str(Path(self.build_lib) / kernels.LIBRARY_DIR / name)]

    def get_output_mapping(self):
        return {}


class Build(build):
    sub_commands = [*build.sub_commands, ("build_kernels", None)]

    def run(self):
        # What an earlier build left there would be packed into the wheel.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BdistWheel(bdist_wheel):
    def get_tag(self):
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if self.distribution.has_ext_modules() else (python, abi, platform)


setup(
    distclass=KdaDistribution,
    ext_modules=[],
    cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": BdistWheel},
)
