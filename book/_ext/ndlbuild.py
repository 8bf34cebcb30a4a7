"""What a build of the book depends on and ships: the state of its sources, the repository, MathJax."""

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess

import lab
from sphinx.errors import ConfigError

MODE = "replay"  # the book shows recorded runs and never trains
PACKAGES = (
    *("torch", "numpy", "scipy", "pandas", "matplotlib", "seaborn", "scikit-learn", "tensorly"),
    *("tensorly-torch", "peft", "transformers", "safetensors", "ipykernel", "myst-nb"),
)
LAYER = ("ndlinear.py", "ndlinear_lora.py", "ndlinear_lokr.py", "ndlinear_peft.py")
SOURCES = (*LAYER, "ndlinear_guide", "notebooks", "book", "_config.yml", "_toc.yml")
MADE = re.compile(r"(^|/)(_build|__pycache__|\.\w+)/|\.(pyc|lock)$")  # by what runs, not by us
MATHJAX = (
    *("tex-chtml.js", "output/chtml/fonts/woff-v2", "input/tex/extensions", "a11y"),
    *("sre/mathmaps/base.json", "sre/mathmaps/en.json"),
)


# --- what the notebooks see --------------------------------------------------------------------------------------


def version(package: str) -> str:
    """Installed version of a package, or 'absent'."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def versions_key() -> str:
    """Hash of the mode and of all versions that may change what a notebook prints."""
    parts = (MODE, platform.python_version(), *(f"{p}=={version(p)}" for p in PACKAGES))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def book_state(root: pathlib.Path) -> str:
    """Hash of everything the built book depends on; the tests compare it with the state of the last clean build."""
    paths = [path for name in SOURCES for path in (root / name, *(root / name).rglob("*"))]
    files = {str(path.relative_to(root)): path for path in paths if path.is_file()}
    state = hashlib.sha256(f"{versions_key()} {repository_url(root)}".encode())
    for name in sorted(name for name in files if not MADE.search(name)):
        state.update(f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return state.hexdigest()


def refuse_other_checkout(root: pathlib.Path) -> None:
    """The pages must come from the lab beside them; an installed lab of another checkout would tell other numbers."""
    home, found = root / "notebooks" / "lab", pathlib.Path(lab.__file__).parent
    if home.resolve() != found.resolve():
        raise ConfigError(
            f"lab comes from {found}, not from {home}: build with `make book`, or set "
            f"PYTHONPATH={root}{os.pathsep}{root / 'notebooks'}"
        )


# --- where the repository is -------------------------------------------------------------------------------------


def github_address(text: str) -> str:
    """https://github.com/OWNER/NAME of any spelling of a GitHub remote, without user or password; else ''."""
    match = re.fullmatch(
        r"(?:https?://(?:[^@/\s]+@)?|ssh://git@|git@)github\.com[:/]([\w.-]+)/([\w.-]+?)(?:\.git)?/?",
        text.strip(),
    )
    return f"https://github.com/{match[1]}/{match[2]}" if match else ""


def repository_url(root: pathlib.Path, environ=os.environ) -> str:
    """Address from NDL_BOOK_URL, else from git's origin when that is on GitHub, else ''."""
    if asked := environ.get("NDL_BOOK_URL", "").strip():
        if not (url := github_address(asked)):
            raise ConfigError(
                f"NDL_BOOK_URL={asked!r} is not the address of a GitHub repository; "
                "write https://github.com/OWNER/NAME or leave it unset"
            )
        return url
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except OSError:
        return ""
    return github_address(answer.stdout) if answer.returncode == 0 else ""


def link_repository(options: dict, url: str) -> None:
    """Repository, issue and Colab buttons with an address; none of them without."""
    options["repository_url"] = url
    options["use_repository_button"] = options["use_issues_button"] = bool(url)
    options["launch_buttons"] = {"colab_url": "https://colab.research.google.com"} if url else {}


def copy_toggle(target: pathlib.Path) -> None:
    """Copy the styles of folded cells, which Sphinx from version 8 on leaves out, where they are missing."""
    spec = importlib.util.find_spec("sphinx_togglebutton")
    for file in (pathlib.Path(spec.origin).parent / "_static").glob("*.*"):
        if not (target / file.name).exists():
            shutil.copy2(file, target / file.name)


# --- mathematics --------------------------------------------------------------------------------------------------


def copy_mathjax(target: pathlib.Path) -> None:
    """Copy what the book uses of MathJax out of the package that ships it."""
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    if spec is None:
        raise ConfigError(
            "the package sphinx-mathjax-offline is missing: pip install sphinx-mathjax-offline"
        )
    source = pathlib.Path(spec.submodule_search_locations[0]) / "static" / "mathjax"
    for name in MATHJAX:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, dirs_exist_ok=True)
        else:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)
