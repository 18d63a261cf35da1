"""Where Triton kernels run: natively on a GPU, in Triton's interpreter on a CPU."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from attnmatrix.harness.lazy import torch
from attnmatrix.harness.quick_interpreter import quicken

if TYPE_CHECKING:
    from torch import device as Device

VARIABLE = "TRITON_INTERPRET"


def prepare_triton(device: Device, interpreted: bool) -> None:
    """Choose Triton's interpreter for a CPU, before anything imports Triton, which reads the choice only then.

    Every CPU run makes it where there is no GPU, since torch itself imports Triton in some operators; with a GPU only
    ``interpreted`` rows do. Raises RuntimeError when the process has chosen otherwise already.
    """
    if device.type == "cpu" and "triton" not in sys.modules and (interpreted or not torch.cuda.is_available()):
        os.environ[VARIABLE] = "1"
    if not interpreted:
        return
    chosen = os.environ.get(VARIABLE, "0") == "1"
    if chosen != (device.type == "cpu"):
        raise RuntimeError(
            f"Triton was imported {'for the interpreter' if chosen else 'to compile kernels'}, but this row runs on {device.type}: "
            f"use one process per device and {'unset' if chosen else 'set'} {VARIABLE}{'' if chosen else '=1'} in it"
        )
    if chosen:
        quicken()
