"""`pytest --nbmake notebooks` runs every notebook small, seeded and offline (kernels inherit the environment)."""

import os

os.environ.setdefault("NDL_MODE", "smoke")
