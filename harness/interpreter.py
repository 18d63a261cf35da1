"""Where Triton kernels run: natively on a GPU, in Triton's interpreter on a CPU."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from attnmatrix.harness.lazy import torch

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
        _quicken()


@cache
def _quicken() -> None:
    """Halve the interpreter's time, results unchanged: 32-bit integers wrap, as in compiled kernels, instead of each product being checked;
    and what each call of a device function patches in Triton's language is looked up by name instead of among all members."""
    from triton import language
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if builder.options.sanitize_overflow:
        builder.options = replace(builder.options, sanitize_overflow=False)
    patched = (language, language.core, language.tensor, language.math, language.core.tensor_descriptor_base)
    names = {part: [name for name, member in inspect.getmembers(part) if language.core.is_builtin(member)] for part in patched}

    def patch(part: Any, builder: Any, scope: Any, search: Callable[..., None] = interpreter._patch_builtin) -> None:
        if part not in names:
            search(part, builder, scope)
            return
        for name in names[part]:
            member = getattr(part, name)
            if language.core.is_builtin(member):
                interpreter._patch_attr(part, name, member, builder, scope)

    interpreter._patch_builtin = patch
