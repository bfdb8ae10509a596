"""What the processes of a run have to agree on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hf_treespec.errors import TrainError, TreeSpecError

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["check_accelerator", "on_first", "patient_accelerator"]

_PARALLEL = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU")
_PRECISIONS = ("no", "bf16")


# The first process may make texts, or measure, while the others wait; torch's own limit is half an hour.
_PATIENCE = timedelta(days=30)


def patient_accelerator(**options: Any) -> Accelerator:
    """An accelerator whose processes wait for one another for days.

    Args:
        **options: of `Accelerator`.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    return Accelerator(**options, kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)])


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse ways of training that checkpoints and gradients here are not made for.

    Raises:
        TrainError: naming the way.
    """
    way = accelerator.distributed_type.name
    if way not in _PARALLEL:
        raise TrainError(f"accelerate with distributed_type={way}: drafts are small; train one whole on each process")
    if accelerator.mixed_precision not in _PRECISIONS:
        raise TrainError(f"mixed_precision={accelerator.mixed_precision!r}: expected one of {', '.join(_PRECISIONS)}")


def on_first(accelerator: Accelerator, act: Callable[[], object]) -> None:
    """Let the first process do something while the others wait; a fault there is one of all of them.

    Raises:
        TreeSpecError: that `act` raised; TrainError for what the system said to it.
    """
    from accelerate.utils import broadcast_object_list

    fault: list[TreeSpecError | None] = [None]
    if accelerator.is_main_process:
        try:
            act()
        except TreeSpecError as error:
            fault = [error]
        except OSError as error:
            fault = [TrainError(f"{error.filename or 'a folder of the run'}: {error.strerror or error}")]
    broadcast_object_list(fault)
    if fault[0] is not None:
        raise fault[0]
