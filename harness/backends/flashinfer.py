"""Rows ``fi``, ``fi-fa2``, ``fi-fa3`` and ``fi-hnd``: FlashInfer's wrappers for paged prefill and decode, and which kernels they may take."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.harness.backends import flashinfer_lists as lists_file
from attnmatrix.harness.backends import flashinfer_wrappers as wrappers_file
from attnmatrix.harness.backends.flashinfer_lists import lacks_parameter
from attnmatrix.harness.backends.flashinfer_wrappers import PACKAGE, Choice, FlashInfer
from attnmatrix.harness.capabilities import Blocked, Capabilities, Claim, Conventions, Deferred, KnownFault, NotApplicable, RoundingStep
from attnmatrix.harness.installed import installed_file
from attnmatrix.harness.registry import Row, register

MERGED_DIMS = (64, 128, 256, 512)  # head dims that the kernel which merges parts of a split is compiled for (utils.cuh, DISPATCH_HEAD_DIM)


def _lacks(pattern: str) -> Callable[[], bool]:
    prefill = partial(lacks_parameter, PACKAGE, "flashinfer/prefill.py", "BatchPrefillWithPagedKVCacheWrapper")
    decode = partial(lacks_parameter, PACKAGE, "flashinfer/decode.py", "BatchDecodeWithPagedKVCacheWrapper")
    return lambda: all(wrapper(methods=("__init__", "plan", "run"), pattern=pattern) for wrapper in (prefill, decode))


def _sink_variant_lacks(word: str) -> Callable[[], bool]:
    return lambda: word not in installed_file(PACKAGE, "flashinfer/jit/attention/variants.py").read_text()


def has_tree(case: Case) -> bool:
    """Whether a request's draft tokens are no chain."""
    return any(case.tree(request) != tuple(range(-1, new - 1)) for request, new in enumerate(case.new_lens))


def runs_fa3(choice: Choice, case: Case) -> bool:
    """Whether a batch's kernels are fa3's on SM 9.0; the package itself leaves masks, ALiBi and fp8 caches to fa2."""
    decode = case.forward is ForwardMode.DECODE and not case.sinks
    backend = choice.decode_backend if decode else choice.prefill_backend
    return backend == "fa3" or (backend == "auto" and not decode and not case.alibi and not has_tree(case) and case.kv_dtype is None)


def _why_not(choice: Choice, case: Case) -> Claim | None:
    if not case.num_tokens:
        return None
    if case.alibi and has_tree(case):
        return NotApplicable("no argument for positions: ALiBi counts a tree's keys, not their depth", _lacks("position|depth"))
    for asked, word in ((case.soft_cap, "soft_cap"), (case.alibi, "alibi"), (has_tree(case), "custom_mask")):
        if case.sinks and asked:
            return NotApplicable(f"the variant with sinks knows no {word}", _sink_variant_lacks(word))
    if case.dtype == "fp32":
        return Blocked("float32 has no kernel", "KeyError", r"torch\.float32")
    if case.kv_dtype is not None and case.sinks:
        return Deferred("the variant with sinks leaves the scales of an fp8 cache out", "#5")
    if case.kv_dtype is not None and choice.prefill_backend == "fa3":
        return Deferred("fa3 reads an fp8 cache with fp8 queries only, which no case has yet", "#5")
    if choice.prefill_backend == "fa3" and has_tree(case):
        return Blocked("fa3 kernels take no mask", "RuntimeError", "operation not supported")
    if runs_fa3(choice, case) and case.heads.dim not in (64, 128, 256):
        return Blocked("fa3 kernels have head dims 64, 128 and 256", "RuntimeError", "static assertion failed")
    return None


def _merged(choice: Choice, case: Case, mode: RunnerMode) -> bool:
    """A wrapper made for a graph, and one of a batch with long keys, is planned with its keys split, and the kernel that merges fa2's parts
    checks the head dim."""
    if not case.num_tokens or case.heads.dim in MERGED_DIMS or runs_fa3(choice, case):
        return False
    return (mode.uses_graph and not mode.pads_tokens) or any(map(_splits, (case, *schedule(case, mode).batches)))


def _splits(batch: Case) -> bool:
    """Whether the keys of a small batch are planned in parts: of 128 tokens, or of one page where that is larger."""
    return max(batch.kv_lens, default=0) > max(128 // batch.page_size, 1) * batch.page_size


def _unaligned(choice: Choice, case: Case, mode: RunnerMode) -> bool:
    """Whether fa2's kernels, on tensor cores or CUDA cores, run a head dim that is no multiple of 64."""
    return bool(case.num_tokens and case.heads.dim % 64) and not runs_fa3(choice, case)


def _uneven_lanes(choice: Choice, case: Case, mode: RunnerMode) -> bool:
    """Whether the kernel for CUDA cores adds a score over a number of threads that is no power of two."""
    lanes = case.heads.dim // max(16 // (1 if case.kv_dtype is not None else 2), case.heads.dim // 32)
    return bool(case.num_tokens) and not _tensor_cores(choice, case) and lanes & (lanes - 1) != 0


def _no_bias(choice: Choice, case: Case, mode: RunnerMode) -> bool:
    return case.alibi and runs_fa3(choice, case) and max(case.kv_lens, default=0) > 1


def _shifted_lse(choice: Choice, case: Case, mode: RunnerMode) -> bool:
    """The LSE is judged where attention runs without a graph around it."""
    cached = any(prefix and new for prefix, new in zip(case.prefix_lens, case.new_lens, strict=True))
    return case.alibi and cached and mode in (RunnerMode.EAGER, RunnerMode.VERIFY) and not runs_fa3(choice, case)


def _tensor_cores(choice: Choice, case: Case) -> bool:
    """Whether a batch's kernels are those of prompts, fa2's or fa3's."""
    return case.forward is not ForwardMode.DECODE or case.sinks or choice.tensor_cores(case.heads.group)


def _below_the_mask(choice: Choice, case: Case) -> bool:
    """Every score is below the 50,000 that these kernels take for minus infinity, before the scale."""
    deep = case.soft_cap is None and case.score_drop * math.sqrt(case.heads.dim) > 5e4
    return bool(case.num_tokens) and deep and _tensor_cores(choice, case)


def _below_the_mask_of(backend: str, choice: Choice, case: Case, mode: RunnerMode) -> bool:
    return _below_the_mask(choice, case) and runs_fa3(choice, case) == (backend == "fa3")


def _known_faults(choice: Choice) -> tuple[KnownFault, ...]:
    dims, deep = "flashinfer_fa2_head_dim_80_is_read_to_64", "flashinfer_minus_infinity_is_50000"
    return (
        KnownFault(
            partial(_merged, choice),
            finding=dims,
            diagnosis="raises: Unsupported head_dim",
            reason="head dims other than 64, 128, 256 and 512 are planned and compiled, and raise where the parts of a split are merged",
        ),
        KnownFault(
            partial(_unaligned, choice),
            finding=dims,
            diagnosis="undefined",
            reason="fa2's kernels move whole blocks of 64 dims: the rest of a head dim of 80 or 96 is never loaded, nor is its output written",
        ),
        KnownFault(
            partial(_uneven_lanes, choice),
            finding="flashinfer_cuda_core_decode_of_head_dim_192",
            diagnosis="unexplained",
            reason="CUDA-core decode adds scores over 24 threads as if they were a power of two: each thread gets the sum of 16, and its own weights",
        ),
        KnownFault(
            partial(_no_bias, choice),
            finding="flashinfer_fa3_leaves_alibi_out",
            diagnosis="X59",
            reason="fa3 takes pos_encoding_mode='ALIBI' without a word and adds no bias",
        ),
        KnownFault(
            partial(_shifted_lse, choice),
            finding="flashinfer_alibi_shifts_lse",
            diagnosis="X69",
            reason="ALiBi's bias counts from the query's index among the new tokens: the LSE is off by slope times prefix length, the output right",
        ),
        KnownFault(
            partial(_below_the_mask_of, "fa2", choice),
            finding=deep,
            diagnosis="X103",
            reason="minus infinity is -50,000, before the scale: the running maximum of lower scores stays there, and the output is zero",
        ),
        KnownFault(
            partial(_below_the_mask_of, "fa3", choice),
            finding=deep,
            diagnosis="X109",
            reason="masked scores are -50,000, before the scale: among lower scores they are the largest, and later keys take all the weight",
        ),
    )


CONVENTIONS = Conventions(window="exclusive", window_may_hold_nan=False)
"""A key that the window has left behind is loaded with its tile and keeps weight 0, and 0 times NaN is NaN."""
CHOICES = {
    "fi": (Choice("NHD", "auto", "auto"), "FlashInfer's own choice: prompts fa3 (masks and ALiBi fa2), decode fa2 on tensor cores"),
    "fi-fa2": (
        Choice("NHD", "fa2", "fa2", cuda_cores=True),
        "FlashInfer fa2; decode on CUDA cores, on tensor cores for GQA 5 to 7 and above 8",
    ),
    "fi-fa3": (Choice("NHD", "fa3", "fa3"), "FlashInfer fa3, decode included"),
    "fi-hnd": (Choice("HND", "auto", "auto"), "as fi, pages with the heads outside"),
}


def _sums_rounded_weights(choice: Choice, case: Case, device: str) -> bool:
    """Whether a batch's kernels are fa2's on tensor cores."""
    return case.dtype != "fp32" and _tensor_cores(choice, case) and not runs_fa3(choice, case)


def _soft_cap(case: Case, device: str) -> bool:
    return case.soft_cap is not None


for row_name, (choice, summary) in CHOICES.items():
    register(
        Row(
            name=row_name,
            kind=AttentionKind.SOFTMAX,
            create=partial(FlashInfer, choice=choice),
            capabilities=Capabilities(why_not=partial(_why_not, choice), known_faults=_known_faults(choice)),
            conventions=Conventions(
                kv_layout=choice.layout,
                window=CONVENTIONS.window,
                window_may_hold_nan=CONVENTIONS.window_may_hold_nan,
                rounding=(
                    RoundingStep(
                        "weights rounded to the input dtype before they are summed",
                        "attention/prefill.cuh, compute_sfm_v: s_frag is cast to DTypeQ (s_frag_f16), mma::m16k16_rowsum_f16f16f32 sums that into d",
                        partial(_sums_rounded_weights, choice),
                    ),
                    RoundingStep(
                        "the soft cap's tanh to 11 bits",
                        "math.cuh, tanh: tanh.approx.f32; called by LogitsTransform in attention/variants.cuh and attention/hopper/variants.cuh",
                        _soft_cap,
                    ),
                ),
            ),
            distributions=(PACKAGE, "apache-tvm-ffi"),
            devices=("cuda",),
            summary=summary,
            source=__file__,
            more_sources=(wrappers_file.__file__, lists_file.__file__),
        )
    )
