"""How the kernels of compared notebooks start and end: nbval, with three fixes."""

import os
import uuid
from pathlib import Path

import nbval.kernel
from jupyter_client.manager import KernelManager
from nbval.plugin import IPyNbFile

from tests import scripts
from tests.tools.notebooks.execution import RECORDING_ENVIRONMENT, end_left_over


class KernelWithoutPorts(KernelManager):
    """A kernel's sockets are files: a free port may be taken before the kernel has it."""

    def __init__(self, **options):
        # in Ray's folder, as the path of a socket has to be short
        file = Path(os.environ["RAY_TMPDIR"], f"kernel-{uuid.uuid4().hex}.json")
        super().__init__(transport="ipc", connection_file=str(file), **options)


nbval.kernel.KernelManager = KernelWithoutPorts
_setup, _teardown = IPyNbFile.setup, IPyNbFile.teardown


def setup(self):
    """Start a notebook's kernel, marked, so that all it starts can be found again."""
    self.marker = {"WORKSHOP_KERNEL": uuid.uuid4().hex}
    before = dict(os.environ)
    kernels = scripts.environment() | RECORDING_ENVIRONMENT | self.marker
    # Where ipykernel sees this variable it does not capture the output of `!commands`.
    del kernels["PYTEST_CURRENT_TEST"]
    os.environ.clear()
    os.environ.update(kernels)
    try:
        _setup(self)
    finally:
        os.environ.clear()
        os.environ.update(before)


def teardown(self):
    """Stop a notebook's kernel, and end whatever it left behind."""
    _teardown(self)
    end_left_over(self.marker)


IPyNbFile.setup, IPyNbFile.teardown = setup, teardown
