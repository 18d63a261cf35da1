"""SGLang's ``LightningAttentionBackend`` out of the installed wheel, with the engine around it reduced to data.

The class, its base classes, its metadata and ``ForwardBatch`` are the package's own. Modules that they import for annotations, for other
hardware or for configuration, which pull in several dozen packages, are stood in for: what configuration the class reads is :data:`SETTINGS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from attnmatrix.harness.lazy import torch
from attnmatrix.harness.wheel_modules import load_modules

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.context import Context

LAYERS, RUN = "sglang.srt.layers.attention", "sglang.srt.model_executor"
OWN = (
    f"{LAYERS}.linear.lightning_backend",
    f"{LAYERS}.linear.linear_metadata",
    f"{LAYERS}.hybrid_linear_attn_backend",
    f"{LAYERS}.base_attn_backend",
    f"{LAYERS}.mamba.mamba2_metadata",
    f"{LAYERS}.mamba.prefill_track_metadata",
    f"{LAYERS}.mamba.replay_state_indices_validator",
    f"{RUN}.forward_batch_info",
    "sglang.kernels.ops.attention.linear.seg_la",
    "sglang.kernels.kernel_api_logging",
    "sglang.srt.environ",
)
ABSENT = (
    f"{LAYERS}.linear.utils",
    f"{LAYERS}.mamba.mamba",
    f"{RUN}.cuda_graph_config",
    f"{RUN}.forward_batch_deepseek_mha_mixin",
    f"{RUN}.model_runner",
    "sglang.kernels.ops.attention.clamp_position",
    "sglang.kernels.ops.attention.linear.lightning_attn",
    "sglang.kernels.ops.attention.position",
    "sglang.kernels.ops.mamba.causal_conv1d_triton",
    "sglang.kernels.ops.mamba.mamba_state_indices_triton",
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton",
    "sglang.srt.configs.hybrid_arch",
    "sglang.srt.distributed.utils",
    "sglang.srt.kv_canary.req_to_expected_token_ids_manager",
    "sglang.srt.layers.dp_attention",
    "sglang.srt.layers.radix_attention",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.speculative.eagle_info",
    "sglang.srt.speculative.spec_info",
)
PAD_SLOT_ID = -1  # the package's own, of a kernel file that is not loaded


@dataclass
class Settings:
    """What the class asks the running server: ``--speculative-eagle-topk`` and its slice of the model's heads."""

    topk: int = 0
    rank: int = 0
    ranks: int = 1


SETTINGS = Settings()


class _Absent(ModuleType):
    """A module whose every name is an empty class: good for annotations, base classes and instance checks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return self.__dict__[name]


def _module(name: str, **values: Any) -> ModuleType:
    module = _Absent(name)
    vars(module).update(values)
    return module


def _no(*_: object) -> bool:
    return False


def _stand_ins() -> dict[str, ModuleType]:
    other_hardware: dict[str, Any] = {"get_bool_env_var": _no, "is_cpu": _no, "is_hip": _no, "is_npu": _no, "is_pin_memory_available": _no}
    runtime: dict[str, Any] = {
        "get_spec": lambda: SimpleNamespace(speculative_eagle_topk=SETTINGS.topk),
        "get_memory": lambda: SimpleNamespace(enable_unified_memory=False),
        "get_parallel": lambda: SimpleNamespace(attn_tp_size=SETTINGS.ranks, attn_tp_rank=SETTINGS.rank),
    }
    special: dict[str, dict[str, Any]] = {
        "sglang.srt.utils": other_hardware,
        "sglang.srt.utils.common": other_hardware,
        "sglang.srt.runtime_context": runtime,
        "sglang.kernels.ops.mamba.causal_conv1d_triton": {"PAD_SLOT_ID": PAD_SLOT_ID},
    }
    return {name: _module(name, **special.get(name, {})) for name in dict.fromkeys((*ABSENT, *special))}


@dataclass(frozen=True)
class Engine:
    """The package's names: the backend class, ``ForwardBatch`` and ``ForwardMode``."""

    backend: Any
    forward_batch: Any
    forward_mode: Any


def load_engine() -> Engine:
    """Raises LookupError when the wheel is absent or has no such file."""
    loaded = load_modules("sglang", OWN, _stand_ins())
    batches = loaded[f"{RUN}.forward_batch_info"]
    return Engine(loaded[f"{LAYERS}.linear.lightning_backend"].LightningAttentionBackend, batches.ForwardBatch, batches.ForwardMode)


class Pools:
    """What the class reads of the engine's request pool: the state slot of each request row, and each layer's states.

    ``slots`` int32 ``[rows]``. The states are the context's own tensors.
    """

    def __init__(self, context: Context) -> None:
        assert context.states is not None
        self._states = context.states
        self._conv = [torch.empty(0, 0, device=context.device)]  # Lightning has no convolution
        self.slots = torch.full((context.req_to_token.shape[0],), PAD_SLOT_ID, dtype=torch.int32, device=context.device)
        self.mamba_pool = SimpleNamespace(
            mamba_cache=SimpleNamespace(conv=self._conv), enable_linear_replayssm=False, replayssm_write_pos=None
        )

    def get_mamba_indices(self, rows: Tensor) -> Tensor:
        return self.slots[rows]

    def translate_mamba_indices(self, slots: Tensor) -> Tensor:
        return slots

    def mamba2_layer_cache(self, layer: int) -> SimpleNamespace:
        states = self._states
        return SimpleNamespace(conv=self._conv, temporal=states.state(layer), intermediate_ssm=states.intermediate(layer))


def build_backend(engine: Engine, context: Context, pools: Pools, settings: Settings, linear_backend: str = "seg_la") -> Any:
    """The backend as an engine builds it for a model of ``context.num_layers`` Lightning layers. Raises what the class raises."""
    model = SimpleNamespace(
        num_attention_heads=context.heads.q * settings.ranks, num_hidden_layers=context.num_layers, linear_backend=linear_backend
    )
    runner = SimpleNamespace(
        server_args=SimpleNamespace(enable_mis=False),
        device=str(context.device),
        is_draft_worker=False,
        req_to_token_pool=pools,
        token_to_kv_pool=None,
        sliding_window_size=None,
        kv_cache_dtype=context.dtype,
        kv_cache_dtype_str="auto",
        model_config=SimpleNamespace(context_len=context.max_seq_len, is_encoder_decoder=False, hf_config=model, hf_text_config=model),
    )
    before = vars(SETTINGS).copy()
    vars(SETTINGS).update(vars(settings))
    try:
        return engine.backend(runner)
    finally:
        vars(SETTINGS).update(before)
