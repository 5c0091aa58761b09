"""utils.errors: BadInput arrives from other processes as what it was."""

import subprocess
import sys

from utils.cluster import start_ray  # isort: split

import pytest
import ray

from tests.waiting import TIMEOUT_S
from utils.errors import BadInput
from utils.launch import run_ranks

SENTENCE = "There is no such file: name another."


def refuse(*_) -> None:
    raise BadInput(SENTENCE)


def test_bad_input_of_a_rank_arrives_as_what_it_was():
    def caught():
        try:
            refuse()
        except BadInput as problem:
            return problem

    for found in run_ranks(caught, 2):
        assert (type(found), str(found)) == (BadInput, SENTENCE)
    with pytest.raises(
        RuntimeError, match=f"rank 0 failed with .*BadInput: {SENTENCE}"
    ):
        run_ranks(refuse, 2)


@pytest.mark.slow
@pytest.mark.ray
def test_bad_input_of_a_task_of_ray_arrives_as_what_it_was(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    start_ray(1)
    with pytest.raises(BadInput) as raised:
        ray.get(ray.remote(refuse).remote())
    assert isinstance(raised.value, ray.exceptions.RayTaskError)
    assert (type(raised.value.cause), str(raised.value.cause)) == (BadInput, SENTENCE)
    ray.shutdown()


def test_bad_input_is_no_error_of_python():
    """Else a check of ours could be taken for a mistake, and a mistake for a check."""
    assert BadInput.__bases__ == (Exception,)


def test_parquet_needs_neither_torch_nor_the_command_line():
    """Tasks of Ray Data import it: each of their processes would start later."""
    code = "import sys; from utils import parquet; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    modules = subprocess.check_output(command, text=True, timeout=TIMEOUT_S).split()
    assert "utils.parquet" in modules
    assert not {"torch", "utils.command_line", "utils.settings"} & set(modules)
