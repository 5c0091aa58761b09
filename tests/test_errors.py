"""utils.errors: BadInput arrives from other processes as what it was."""

import pickle
import subprocess
import sys

from utils.cluster import start_ray  # isort: split

import pytest
import ray

from tests.patience import PATIENCE
from utils.errors import BadInput
from utils.launch import run_ranks

SENTENCE = "There is no such file: name another."


def refuse(*_) -> None:
    raise BadInput(SENTENCE)


def test_it_is_pickled_as_it_is():
    found = pickle.loads(pickle.dumps(BadInput(SENTENCE)))
    assert (type(found), str(found)) == (BadInput, SENTENCE)


def test_a_rank_raises_it():
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


@pytest.mark.part02
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_task_of_ray_raises_it(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    start_ray(1)
    with pytest.raises(BadInput) as raised:
        ray.get(ray.remote(refuse).remote())
    assert isinstance(raised.value, ray.exceptions.RayTaskError)
    assert (type(raised.value.cause), str(raised.value.cause)) == (BadInput, SENTENCE)
    ray.shutdown()


def test_it_is_no_error_of_python():
    """Else a check of ours could be taken for a mistake, and a mistake for a check."""
    assert BadInput.__bases__ == (Exception,)


def test_parquet_needs_neither_torch_nor_the_command_line():
    """Tasks of Ray Data import it: each of their processes would start later."""
    code = "import sys; from utils import parquet; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    modules = subprocess.check_output(command, text=True, timeout=PATIENCE).split()
    assert "utils.parquet" in modules
    assert not {"torch", "utils.command_line", "utils.settings"} & set(modules)
