"""Look into DeepSpeed's engine: gather what ZeRO shards, and let it take float64."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


def is_loaded() -> bool:
    """Return whether the training has imported DeepSpeed."""
    return "deepspeed" in sys.modules


def is_engine(model: Any) -> bool:
    """Return whether a model is DeepSpeed's, which steps and averages itself."""
    return any(each.__name__ == "DeepSpeedEngine" for each in type(model).__mro__)


def optimizer_of(engine: Any) -> Any:
    """Return the optimizer that updates this rank's part, below that of ZeRO."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def on_update(
    engine: Any, before: Callable[[], None], after: Callable[[], None]
) -> SimpleNamespace:
    """Call `before` when gradients are averaged and not yet clipped, `after` the update.

    Neither is called for a micro-batch that only accumulates. Returns what ends that by
    its `remove`, as a hook's handle does.
    """
    original = engine._take_model_step

    def take_model_step(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return original(*args, **kwargs)
        finally:
            after()

    engine._take_model_step = take_model_step
    return SimpleNamespace(remove=lambda: vars(engine).pop("_take_model_step", None))


def weight(parameter: torch.Tensor) -> torch.Tensor:
    """Return the full parameter of stage 3; all ranks have to call it."""
    with sys.modules["deepspeed"].zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the whole averaged gradient, at any stage; all ranks call it."""
    return sys.modules["deepspeed"].utils.safe_get_full_grad(parameter)


def state(engine: Any) -> list[torch.Tensor]:
    """Return this rank's parts of weights and of the optimizer's state."""
    inner = optimizer_of(engine)
    weights = [getattr(p, "ds_tensor", p) for p in engine.parameters()]
    masters = [p for group in inner.param_groups for p in group["params"]]
    held = [t for each in inner.state.values() for t in each.values()]
    return [t for t in (*weights, *masters, *held) if isinstance(t, torch.Tensor)]


@contextlib.contextmanager
def in_float64(active: bool) -> Iterator[None]:
    """Let DeepSpeed, if it is loaded, take float64, which stages 0 and 3 refuse."""
    if not (active and is_loaded()):
        yield
        return
    deepspeed: Any = sys.modules["deepspeed"]
    accelerator = deepspeed.accelerator.get_accelerator()
    types = [*accelerator.supported_dtypes(), torch.float64]
    parameters = deepspeed.runtime.zero.partition_parameters
    init = parameters.InsertPostInitMethodToModuleSubClasses
    set_dtype = init._set_dtype

    def as_float32(self: Any, *args: Any) -> None:
        set_dtype(self, *args)
        if self.dtype == torch.float64:
            self.dtype = torch.float32  # a cast to it is lifted to float64 again

    with (
        mock.patch.object(accelerator, "supported_dtypes", return_value=types),
        mock.patch.object(init, "_set_dtype", as_float32),
    ):
        yield
