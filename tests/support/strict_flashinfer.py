"""A strict stand-in for the parts of FlashInfer 0.6.13 that the rows call, put in the package's place by ``install``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from strict_flashinfer_decode import BatchDecodeWithPagedKVCacheWrapper
from strict_flashinfer_prefill import BatchPrefillWithPagedKVCacheWrapper
from strict_flashinfer_wrappers import MODULES, determine_attention_backend, get_batch_prefill_attention_sink_uri
from strict_flashinfer_xqa import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in where ``import flashinfer`` finds it, until the test ends."""
    MODULES.clear()
    members: dict[str, dict[str, Any]] = {
        "flashinfer": {
            "BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper,
            "BatchDecodeWithPagedKVCacheWrapper": BatchDecodeWithPagedKVCacheWrapper,
        },
        "flashinfer.decode": {"trtllm_batch_decode_with_kv_cache": trtllm_batch_decode_with_kv_cache},
        "flashinfer.prefill": {"trtllm_batch_context_with_kv_cache": trtllm_batch_context_with_kv_cache},
        "flashinfer.utils": {"determine_attention_backend": determine_attention_backend},
        "flashinfer.jit": {},
        "flashinfer.jit.attention": {"get_batch_prefill_attention_sink_uri": get_batch_prefill_attention_sink_uri},
        "flashinfer.jit.attention.variants": {"attention_sink_decl": {"fa2": "code of fa2", "fa3": "code of fa3"}},
    }
    for name, found in members.items():
        module = ModuleType(name)
        vars(module).update(found)
        monkeypatch.setitem(sys.modules, name, module)
