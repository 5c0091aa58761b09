"""Let a step compute in float64 throughout, so that nothing rounds what is compared."""

import contextlib
import gc
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

LOWER = (torch.float32, torch.bfloat16, torch.float16)


class Lifted(TorchDispatchMode):
    """Replace float32, bfloat16 and float16 by float64, whoever asks for them.

    A cast that a loss or an optimizer such as Muon makes is not made then: what is left to
    differ is no rounding. Scalars without a gradient
    stay: they are counts, which are exact, or the scale of a GradScaler, whose kernels
    take float32 alone.

    Attributes:
        left: the lower types that operators returned all the same, by their names.
    """

    def __init__(self, active: bool):
        super().__init__()
        self.active = active
        self.left: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.active or func.namespace not in ("aten", "prims"):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        asked = kwargs.get("dtype")
        if asked in LOWER and name != "view" and not self._is_scalar(name, args):
            kwargs = kwargs | {"dtype": torch.float64}
        if name == "convert_element_type" and args[1] in LOWER:
            args = (args[0], torch.float64)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.dtype in LOWER:
            if result.numel() > 1 and name == "lift_fresh":
                return result.to(torch.float64)
            # of a result nobody knows here yet whether it needs a gradient
            tensors = (each for each in args if isinstance(each, torch.Tensor))
            if result.numel() > 1 and any(each.requires_grad for each in tensors):
                self.left.add(str(result.dtype).removeprefix("torch."))
        return result

    @staticmethod
    def _is_scalar(name: str, args: tuple) -> bool:
        """Return whether what is cast or made has no dimension, and needs no gradient."""
        first = args[0] if args else None
        if isinstance(first, torch.Tensor):
            return first.ndim == 0 and not first.requires_grad
        return isinstance(first, (list, tuple)) and not first


@contextlib.contextmanager
def without_policies() -> Iterator[None]:
    """Let FSDP2 cast nothing: its policies are empty within, wherever it holds them."""
    types = ("param_dtype", "reduce_dtype", "output_dtype")
    found = [each for each in gc.get_objects() if type(each) is MixedPrecisionPolicy]
    kept = [{name: getattr(policy, name) for name in types} for policy in found]
    for policy in found:
        for name in types:
            object.__setattr__(policy, name, None)  # it is frozen
    try:
        yield
    finally:
        for policy, before in zip(found, kept):
            for name, value in before.items():
                object.__setattr__(policy, name, value)
