"""Every private or undocumented name of other packages that the workshop uses, in one list.

An upgrade may move any of them without a word. This file says at once which are gone, and
beside each name stands what notices that it does something else. So are the names of
files, the messages and the titles of processes that other packages write and ours read.
"""

import ast
import contextlib
import importlib.util
import mmap
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_environment import sources
from tests.tools.notebooks import ROOT

# By package, and by the test or notebook that notices. A name with dots is imported. The
# others are words in the package's source: attributes, and variables of the environment.
NAMES = {
    "torch": {
        "test_fsdp2_on_simulated_ranks_follows_the_formulas": (
            "torch._subclasses.fake_tensor.FakeTensorMode",
            "torch.testing._internal.distributed.fake_pg.FakeStore",
        ),
        "test_calls_and_bytes": (
            "torch.distributed._functional_collectives",
            "torch.distributed._functional_collectives.all_gather_single",
            "torch.distributed._functional_collectives.all_reduce",
            "torch.distributed.distributed_c10d._resolve_process_group",
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._pytree.tree_leaves",
            "_schema",  # of an operator: what its arguments are called
            "torch.ScriptObject",  # what an operator of c10d gets as its process group
            "torch.distributed.ProcessGroup.unbox",
        ),
        # Its content, JSON that torchrun prints last, is described nowhere.
        "test_under_torchrun_the_summary_ends_with_the_sentence": (
            "TORCHELASTIC_ERROR_FILE",
        ),
        "test_zero_trains_without_a_compiler": ("TORCHDYNAMO_DISABLE",),
        "01-ddp-pytorch-only/03_*.ipynb": (
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            "torch._C._distributed_c10d._dump_fr_trace_json",
        ),
    },
    "ray": {
        "02-ddp-pytorch-ray/06_*.ipynb": (
            "ray._private.runtime_env.packaging",
            "ray._private.runtime_env.packaging.GCS_STORAGE_MAX_SIZE",
            "ray._private.utils.get_system_memory",
            "ray._private.utils.get_used_memory",
            "head_node",  # of a Cluster, and the address of its dashboard
            "webui_url",
        ),
        "test_what_does_not_fit_the_store_is_counted_as_spilled": (
            "ray._private.internal_api.get_memory_info_reply",
            "ray._private.internal_api.get_state_from_address",
        ),
        "test_sigkill_of_a_node": (
            "ray.cluster_utils",
            "ray.cluster_utils.Cluster",
            "list_all_nodes",
            "ray.cloudpickle",
            "ray.cloudpickle.register_pickle_by_value",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S",
        ),
        "test_nothing_watches_for_a_cloud_that_takes_this_machine_away": (
            "ray.train.v2._internal.constants",
            "ray.train.v2._internal.constants.ENABLE_PREEMPTION_WATCHER_ENV_VAR",
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER",
        ),
        "02-ddp-pytorch-ray/02_*.ipynb": (
            "RAY_TRAIN_ENABLE_PRINT_PATCH",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S",
        ),
        "02-ddp-pytorch-ray/03_*.ipynb": (
            "RAY_DATA_USE_DATASOURCE_V2",
            "RAY_DATA_PARQUET_FOOTER_NUM_ACTORS",
        ),
        # What Ray notices of a hang, and after how long.
        "02-ddp-pytorch-ray/04_*.ipynb": (
            "RAY_TRAIN_COLLECTIVE_TIMEOUT_S",
            "RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S",
            "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S",
            "ray.train.v2._internal.constants.DEFAULT_COLLECTIVE_TIMEOUT_S",
            "ray.train.v2._internal.constants.DEFAULT_COLLECTIVE_WARN_INTERVAL_S",
            "ray.train.v2._internal.constants.DEFAULT_WORKER_HEALTH_CHECK_TIMEOUT_S",
        ),
        # Ray Train's list of nodes, an actor; and what a Cluster hands to Ray's core.
        "02-ddp-pytorch-ray/05_*.ipynb": (
            "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S",
            "AutoscalingCoordinator",
            "get_reserved_resources",
            "recompute",
            "_system_config",  # an unknown setting in it ends a node at its start
        ),
        "test_nothing_but_torchs_store_listens_beyond_this_machine": (
            "ray._private.ray_constants",
            "ray._private.ray_constants.ENABLE_RAY_CLUSTER",
            "ray._private.ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR",
            "ray._private.services",
            "ray._private.services.get_ray_address_from_environment",
            "ray.util.get_node_ip_address",
        ),
        "test_a_token_that_is_here_is_sent": (
            "ray._private.authentication.authentication_token_setup",
            "ray._private.authentication.authentication_token_setup._enable_token_auth",
            "ray._raylet",
        ),
        "test_no_token_or_a_wrong_one_is_said": (
            "RAY_NUM_REDIS_GET_RETRIES",  # without it the same is seen, but later
            "ray._raylet.GcsClient",
        ),
        "02-ddp-pytorch-ray/06_more_than_one_machine.ipynb": (
            "RAY_CLIENT_RECONNECT_GRACE_PERIOD",
            "RAY_NUM_REDIS_GET_RETRIES",  # without it the same is seen, but later
        ),
        # Without these two the same is seen, but later.
        "test_a_cluster_that_does_not_answer_is_said": (
            "RAY_gcs_rpc_server_connect_timeout_s",
        ),
        "test_the_numbers_are_those_of_the_run": (
            "RAY_metrics_report_interval_ms",
            "_temp_dir",  # of `ray.init`
        ),
        "test_a_script_is_submitted_as_a_job": (
            "ray._private.runtime_env.constants",
            "ray._private.runtime_env.constants.RAY_JOB_CONFIG_JSON_ENV_VAR",
            "RAY_OVERRIDE_JOB_RUNTIME_ENV",
        ),
        "test_ray_imported_too_early_is_said": ("RAY_ENABLE_UV_RUN_RUNTIME_ENV",),
    },
    "deepspeed": {
        "test_which_checkpoints_run_code_when_they_are_loaded": (
            "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine",
        ),
        "test_zero_trains_without_a_compiler": (
            "deepspeed.ops",
            "deepspeed.ops.__compatible_ops__",
            "deepspeed.runtime.zero.muon.muon_optimizer",
        ),
        # Where an engine's optimizer keeps its state, and a parameter its partition.
        "test_zero_holds_and_sends_what_the_formulas_say": (
            "averaged_gradients",
            "all_grad_tensors",
            "single_partition_of_fp32_groups",
            "fp32_partitioned_groups_flat",
            "ds_tensor",
        ),
        "test_masters_in_float32_are_counted_where_the_model_is_bf16": ("fp32_groups",),
        "test_what_zero_exports_is_what_its_ranks_hold": ("zero_optimization_stage",),
        "03-fsdp-deepspeed/03_*.ipynb": ("ds_shape",),
    },
    "nbval": {  # it has no documented Python interface
        "test_output_of_child_processes_is_compared": (
            "nbval.plugin.IPyNbFile",
            "nbval.plugin.IPyNbFile.setup",
        ),
        "test_marks_choose_and_a_failed_cell_brings_its_notebook": (
            "nbval.plugin.IPyNbCell",
        ),
        "test_what_a_notebook_leaves_behind_is_ended": (
            "nbval.plugin.IPyNbFile.teardown",
        ),
    },
}
# What a package writes, and our code or tests look for: by package, and by what notices.
TEXTS = {
    "torch": {
        # torch.distributed.checkpoint writes it last.
        "03-fsdp-deepspeed/02_*.ipynb": (".metadata",),
        "test_a_checkpoint_is_written_whole_or_not_at_all": ("inline_container.cc",),
        "test_host_names_that_mean_127_are_said": ("Gloo connectFullMesh failed",),
    },
    "ray": {
        "test_ray_replaced_a_worker_that_was_killed": (
            "RayTrainWorker",  # in the title of a worker's process
            "checkpoint_manager_snapshot.json",  # written with each checkpoint
        ),
        "test_no_token_or_a_wrong_one_is_said": ("InvalidAuthToken",),
    },
    "deepspeed": {
        "03-fsdp-deepspeed/03_*.ipynb": ("_optim_states.pt",),
    },
}
# Modules and names without an underscore that no page of the documentation describes.
UNDOCUMENTED = {
    "nbval",
    "ray.cloudpickle",
    "ray.cluster_utils",
    "ray.util.get_node_ip_address",
    "head_node",
    "list_all_nodes",
    "webui_url",
    "torch.ScriptObject",
    "torch.distributed.ProcessGroup.unbox",
    "deepspeed.ops",
    "deepspeed.runtime",
}
DOCUMENTED_VARIABLES = {
    "DS_ACCELERATOR",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_DATA_DISABLE_PROGRESS_BARS",
    "RAY_DEDUP_LOGS_SKIP_REGEX",
    "RAY_GRAFANA_HOST",
    "RAY_GRAFANA_IFRAME_HOST",
    "RAY_memory_monitor_refresh_ms",
    "RAY_memory_usage_threshold",
    "RAY_PROMETHEUS_HOST",
    "RAY_TMPDIR",
    "RAY_USAGE_STATS_ENABLED",
    "TORCHELASTIC_RESTART_COUNT",
}
VARIABLE = re.compile(
    r"(RAY|TORCH|TORCHDYNAMO|TORCHELASTIC|NCCL|GLOO|DS)_[A-Z0-9_]+|RAY_[a-z]\w+"
)
PUBLIC = {"_asdict", "_fields", "_replace", "_exit"}  # of named tuples, and of `os`


def listed(table: dict) -> list[tuple[str, str, str]]:
    """(package, name, what notices) of each name or text in a table."""
    return [
        (package, name, notices)
        for package, tests in table.items()
        for notices, names in tests.items()
        for name in names
    ]


LISTED = listed(NAMES)


def is_private(name: str) -> bool:
    """Whether a name, whole as `package.module.name`, may move without a word."""
    parts = [
        part for part in name.split(".") if part not in ("__version__", "__file__")
    ]
    bare = len(parts) == 1 and name.endswith("__")  # as Python's own are
    return (
        (any(part.startswith("_") for part in parts) and not bare)
        or any(f"{name}.".startswith(f"{module}.") for module in UNDOCUMENTED)
        or bool(VARIABLE.fullmatch(name))
    )


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` of an expression that is nothing but this."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return None


def defined(source: str) -> set[str]:
    """What a piece of Python defines: functions, classes, attributes."""
    nodes = list(ast.walk(ast.parse(source)))
    stored = (n for n in nodes if isinstance(getattr(n, "ctx", None), ast.Store))
    names = {n.attr for n in stored if isinstance(n, ast.Attribute)}
    return names | {n.name for n in nodes if isinstance(n, ast.FunctionDef)}


def uses(source: str, own: set[str]) -> set[str]:
    """Private names, attributes, arguments and variables in Python that are not our own."""
    nodes = list(ast.walk(ast.parse(source)))
    full, found = {}, set()  # full: what a name of this source stands for
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                found.add(each.name)
                start = each.name.partition(".")[0]
                full[each.asname or start] = each.name if each.asname else start
        elif isinstance(node, ast.ImportFrom) and not node.level:
            full |= {e.asname or e.name: f"{node.module}.{e.name}" for e in node.names}
    found |= set(full.values())
    for node in nodes:
        if isinstance(node, ast.Attribute):
            first, _, rest = (dotted(node) or "").partition(".")
            found.add(f"{full[first]}.{rest}" if first in full else node.attr)
        elif isinstance(node, ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.Dict):  # arguments that are passed on as **options
            found |= {k.value for k in node.keys if isinstance(k, ast.Constant)}
        elif isinstance(node, ast.Constant) and VARIABLE.fullmatch(str(node.value)):
            found.add(node.value)
        elif isinstance(node, ast.Constant) and "import " in str(node.value):
            with contextlib.suppress(SyntaxError):  # a program for another process
                found |= uses(node.value, own)
    found = {n for n in found if isinstance(n, str)}
    found -= own | PUBLIC | DOCUMENTED_VARIABLES
    return {n for n in found if is_private(n) and n.partition(".")[0] in (n, *NAMES)}


@cache
def all_sources() -> tuple[str, ...]:
    return tuple(text for path, text in sources() if path != Path(__file__))


@cache
def text_of(package: str) -> str:
    """All Python source of an installed package."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    return "\n".join(path.read_text(errors="ignore") for path in folder.rglob("*.py"))


def is_in(package: str, text: str) -> bool:
    """Whether an installed package has a text: in its Python source, or compiled."""
    if re.search(rf"(?<!\w){re.escape(text)}\b", text_of(package)):
        return True
    folder = Path(importlib.util.find_spec(package).origin).parent
    for path in (*folder.rglob("*.so"), *folder.rglob("raylet/raylet")):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=1) as content:
            if content.find(text.encode()) >= 0:
                return True
    return False


def check_notices(notices: str) -> None:
    """Fails unless there is such a test, or such a notebook."""
    tests = "".join(path.read_text() for path in ROOT.glob("tests/test_*.py"))
    there = f"def {notices}(" in tests or [*ROOT.glob(notices)]
    assert there, f"There is no {notices}."


def test_every_private_name_is_listed():
    own = set().union(*map(defined, all_sources()))
    found = set().union(*(uses(source, own) for source in all_sources()))
    assert len(found) > 15
    assert found <= {name for _, name, _ in LISTED}, "List it in NAMES, with its test."


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from torch.x import _y as z\nz.b()", {"torch.x._y", "torch.x._y.b"}),
        ("import torch.utils._pytree", {"torch.utils._pytree"}),
        ("import ray as r\nr._private.z", {"ray._private", "ray._private.z"}),
        ("from nbval.plugin import A", {"nbval.plugin.A"}),
        ("engine._config", {"_config"}),
        ("ray.init(_system_config={})", {"_system_config"}),
        ("ray.init(**{'_memory': 1, 2: 3})", {"_memory"}),
        ("os.environ['RAY_SURPRISE'] = '1'", {"RAY_SURPRISE"}),
        ("os.environ.update(RAY_surprise_ms='1')", {"RAY_surprise_ms"}),
        ("run('import ray; from ray._x import y')", {"ray._x.y"}),
        ("cluster.list_all_nodes()", {"list_all_nodes"}),
        ("import ray, os\nray.__version__, os._exit, x._asdict()", set()),
        ("self._mine = 1\nself._mine + os.environ['RAY_ADDRESS']", set()),
        ("from matplotlib import _cm\nimport torch\ntorch.nn.functional.relu", set()),
    ],
)
def test_a_private_name_is_seen(source, expected):
    assert uses(source, defined(source)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "name", "notices"), LISTED, ids=[name for _, name, _ in LISTED]
)
def test_a_listed_name_is_there_and_in_use(package, name, notices):
    if "." in name:
        pkgutil.resolve_name(name)  # raises an error where it is gone
    else:  # Ray's own settings are compiled, without the first word of their variables
        compiled = re.sub("^RAY_(?=[a-z])", "", name)
        assert is_in(package, compiled), f"{package} has it no more"
    word = re.compile(rf"\b{name.rpartition('.')[2]}\b")
    assert any(map(word.search, all_sources())), (
        "Nothing uses it: take it off the list."
    )
    check_notices(notices)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "text", "notices"), listed(TEXTS), ids=[t for _, t, _ in listed(TEXTS)]
)
def test_a_listed_text_is_there_and_looked_for(package, text, notices):
    assert is_in(package, text), f"{package} has it no more"
    assert any(text in source for source in all_sources()), (
        "Nothing looks for it: take it off the list."
    )
    check_notices(notices)


def test_a_text_that_is_gone_is_seen():
    assert is_in("ray", "metrics_report_interval_ms")
    assert not is_in("ray", "metrics_report_interval_us")
