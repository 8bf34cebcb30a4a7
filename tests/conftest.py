"""What tests share: the same random numbers in each run of a test, a browser, a web server."""

import contextlib
import functools
import gc
import http.server
import os
import random
import threading
import zlib

import numpy
import pytest
import torch


@pytest.fixture(autouse=True)
def seeded(request):
    """The same random numbers in each run of a test, alone or with others; other ones in each test."""
    seed = zlib.crc32(f"{request.path.name} {request.node.name}".encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def pytest_collection_finish():
    """What was imported for the tests stays: no collection of garbage walks through it again, each would take 0.2 s."""
    gc.freeze()


@pytest.fixture(scope="session")
def browser():
    """A running Chromium; without one the test is left out with the reason, or fails where NDL_REQUIRE_BROWSER=1."""
    from lab import LabError
    from lab.tools import report

    try:
        path = report.browser()
    except LabError as error:
        refuse = pytest.fail if os.environ.get("NDL_REQUIRE_BROWSER") == "1" else pytest.skip
        refuse(str(error))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        alone = (
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # reaches this machine only
        )
        running = play.chromium.launch(executable_path=path, args=["--no-sandbox", alone])
        yield running
        running.close()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def served(root):
    handler = functools.partial(QuietHandler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        shuts_down_within = 0.01
        target = functools.partial(running.serve_forever, shuts_down_within)
        threading.Thread(target=target, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture(scope="session")
def serving():
    """Serves a folder on this machine while a block lasts; gives the address."""
    return served


@pytest.fixture
def server(tmp_path_factory):
    """A folder and the address under which a web server on this machine serves it: stands for a publisher's site."""
    root = tmp_path_factory.mktemp("served")
    with served(root) as address:
        yield root, address
