"""Tests import `ndlinear` from the repository root and `lab` from the notebooks folder; some share a browser."""

import os
import pathlib
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """For `--dist loadgroup`: a file stays in one worker, except the tests that run a whole notebook each."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None and not item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def chromium() -> str | None:
    """A Chromium on this machine: NDL_CHROMIUM, else one on the path."""
    names = (
        os.environ.get("NDL_CHROMIUM", ""),
        "chromium",
        "chromium-browser",
        "google-chrome",
        "google-chrome-stable",
    )
    return next((found for name in names if name and (found := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser():
    """A running Chromium; without one the test is left out with the reason, or fails where NDL_REQUIRE_BROWSER=1."""
    path = chromium()
    if path is None:
        reason = "no Chromium on the path: install it (Debian: apt-get install chromium) or set NDL_CHROMIUM"
        if os.environ.get("NDL_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()
