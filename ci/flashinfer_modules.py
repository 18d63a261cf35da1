"""Compile what FlashInfer's rows need, all at once: the modules that the suite's cases ask for, which the package else compiles one by one,
each at its first use and for a minute or more.

usage: python ci/flashinfer_modules.py [--row NAME]... [--mode MODE]... [--quantised] [--list] [--export DIR] [--jobs N]

Works offline, with nvcc and ninja, and without a GPU when FLASHINFER_CUDA_ARCH_LIST names one (``9.0a``). Modules go where the package looks
for them (FLASHINFER_WORKSPACE_BASE). ``--export`` also copies the libraries to DIR as ``NAME/NAME.so``: put into ``flashinfer/data/aot`` of
another machine's installation they are used as they are, without nvcc. Exit code 1 when a module does not compile.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.suites import suite
from attnmatrix.harness.backends.flashinfer import CHOICES, has_tree, runs_fa3
from attnmatrix.harness.backends.flashinfer_wrappers import Choice
from attnmatrix.harness.capabilities import Deferred, Supported
from attnmatrix.harness.registry import find_row

ROWS = (*CHOICES, "trtllm")
LIKELY_DIMS = (64, 128, 256)


class Module(NamedTuple):
    """What tells one compiled module of the package from another. ``kind``: decode (CUDA cores), prefill (tensor cores), sinks, xqa or
    quantization; ``page``, ``group`` and ``width`` (query tokens per request) count for xqa only."""

    kind: str
    backend: str = ""
    dtype: str = ""
    kv_dtype: str = ""  # of a quantised cache
    dim: int = 0
    alibi: bool = False
    window: bool = False
    soft_cap: bool = False
    page: int = 0
    group: int = 0
    width: int = 0


def modules_of(row: str, case: Case) -> set[Module]:
    """What a row compiles for a case and the batches derived from it, on SM 9.0. Cases that are refused before that need nothing; what a row
    defers is run too, but fa3 has no kernels that read an fp8 cache with such queries: those do not compile."""
    claim = find_row(row, AttentionKind.SOFTMAX).capabilities.claim(RunnerMode.EAGER, case, "cuda")
    if not case.num_tokens or not isinstance(claim, (Supported, Deferred)):
        return set()
    windows = {case.layer_window(layer) is not None for layer in (0, 1)}
    if row == "trtllm":
        shape = {"page": case.page_size, "group": case.heads.group, "width": max(case.new_lens)}
        kinds = {"dtype": case.dtype, "kv_dtype": case.kv_dtype or "", "dim": case.heads.dim}
        return {Module("xqa", window=window, **kinds, **shape) for window in windows}
    found = {module for window in windows for module in _wrapper_modules(CHOICES[row][0], case, window)}
    return {module for module in found if not (module.backend == "fa3" and module.kv_dtype)}


def _wrapper_modules(choice: Choice, case: Case, window: bool) -> Iterable[Module]:
    shape = (case.dtype, case.kv_dtype or "", case.heads.dim, case.alibi, window, case.soft_cap is not None)
    chain = case.but(trees=())
    backend = "fa3" if runs_fa3(choice, chain) else "fa2"
    if case.sinks:
        yield Module("sinks", backend, *shape)
    elif case.forward is ForwardMode.DECODE and not choice.tensor_cores(case.heads.group):
        yield Module("decode", "", *shape)
    else:
        yield Module("prefill", backend, *shape)
    if has_tree(case):  # the window is in the mask
        yield Module("quantization")
        yield Module("prefill", "fa3" if runs_fa3(choice, case) else "fa2", case.dtype, case.kv_dtype or "", case.heads.dim, case.alibi)


def needed(rows: Iterable[str], modes: Iterable[RunnerMode]) -> list[Module]:
    """All modules of some rows' cells, in a fixed order."""
    wanted = [case for mode in modes for case in suite(AttentionKind.SOFTMAX, mode)]
    return sorted({module for row in rows for case in wanted for module in modules_of(row, case)})


def spec_of(module: Module) -> Any:
    """The package's build recipe for a module."""
    import torch
    from flashinfer.jit import attention
    from flashinfer.jit.quantization import gen_quantization_module
    from flashinfer.jit.xqa import gen_xqa_module

    if module.kind == "quantization":
        return gen_quantization_module()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[module.dtype]
    kv_dtype = torch.float8_e4m3fn if module.kv_dtype else dtype
    if module.kind == "xqa":
        return gen_xqa_module(dtype, kv_dtype, module.page, module.dim, module.group, module.window, dtype, module.width)
    types = (
        dtype,
        kv_dtype,
        dtype,
        torch.int32,
        module.dim,
        module.dim,
        2 if module.alibi else 0,
        module.window,
    )
    if module.kind == "sinks":
        return attention.gen_batch_prefill_attention_sink_module(module.backend, *types)
    if module.kind == "decode":
        return attention.gen_batch_decode_module(*types, module.soft_cap)
    return attention.gen_batch_prefill_module(module.backend, *types, module.soft_cap, False)


def build(modules: list[Module]) -> list[Any]:
    """Compile the modules in one run of ninja, those of unusual head dims in a second one, whose failure does not stop the first.

    Returns the recipes of what there is now.
    """
    from flashinfer.jit.core import build_jit_specs

    built: list[Any] = []
    for usual in (True, False):
        specs = [spec_of(module) for module in modules if (module.kind == "quantization" or module.dim in LIKELY_DIMS) is usual]
        begin = time.perf_counter()
        try:
            build_jit_specs(specs)
        except RuntimeError as error:
            print(str(error)[-4000:], file=sys.stderr)
        built += [spec for spec in specs if spec.is_compiled]
        print(f"{sum(spec.is_compiled for spec in specs)} of {len(specs)} modules in {time.perf_counter() - begin:.0f} s", flush=True)
    return built


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--row", action="append", choices=ROWS, help="only this row's modules")
    parser.add_argument("--quantised", action="store_true", help="only the modules that read a quantised cache")
    parser.add_argument("--mode", action="append", choices=[mode.value for mode in RunnerMode], help="only this runner mode's modules")
    parser.add_argument("--list", action="store_true", help="name the modules and stop")
    parser.add_argument("--export", type=Path, metavar="DIR", help="copy the libraries to DIR")
    parser.add_argument("--jobs", type=int, help="processes at a time (default: ninja's)")
    given = parser.parse_args()
    modules = needed(given.row or ROWS, [RunnerMode(mode) for mode in given.mode] if given.mode else tuple(RunnerMode))
    if given.quantised:
        modules = [module for module in modules if module.kv_dtype]
    if given.list:
        print(
            "\n".join(
                f"{module.kind:12} {' '.join(f'{k}={v}' for k, v in module._asdict().items() if v and k != 'kind')}" for module in modules
            )
        )
        print(f"{len(modules)} modules")
        return 0
    if given.jobs:
        os.environ["MAX_JOBS"] = str(given.jobs)
    built = build(modules)
    for spec in built if given.export else ():
        folder = given.export / spec.name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(spec.get_library_path(), folder)
    return 0 if len(built) == len(modules) else 1


if __name__ == "__main__":
    sys.exit(main())
