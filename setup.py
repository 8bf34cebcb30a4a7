"""What `pip install` brings beside torch: the four modules and the guide. The rest of the project is in pyproject.toml.

In a wheel each module is a package of one file, ndlinear/__init__.py, because only a package can say that it has types (py.typed,
PEP 561); one that is also a command can be run by ``python -m``. What the notebooks share stays in the checkout: `lab` is too
common a name for a wheel, and it reads the records beside it. An editable install (``pip install -e .``) maps all names to the files
where they are, `lab` too.
"""

import pathlib
import sys

from setuptools import setup
from setuptools.command.build_py import build_py

MODULES = ["ndlinear", "ndlinear_lora", "ndlinear_lokr", "ndlinear_peft"]
EDITABLE = "editable_wheel" in sys.argv


class BuildPy(build_py):
    """Each single module as a package with the mark of its types."""

    def get_module_outfile(self, build_dir, package, module):
        if not self.editable_mode and module in MODULES:
            return str(pathlib.Path(build_dir, module, "__init__.py"))
        return super().get_module_outfile(build_dir, package, module)

    def run(self):
        super().run()
        for module in [] if self.editable_mode else MODULES:
            folder = pathlib.Path(self.build_lib, module)
            (folder / "py.typed").touch()
            if "\ndef main(" in (folder / "__init__.py").read_text(encoding="utf-8"):
                (folder / "__main__.py").write_text("from . import main\n\nmain()\n")


setup(
    py_modules=MODULES,
    packages=["ndlinear_guide", *(["lab"] if EDITABLE else [])],
    package_dir={"lab": "notebooks/lab"},
    package_data={"ndlinear_guide": ["py.typed"]},
    cmdclass={"build_py": BuildPy},
)
