"""The runner modes: the columns of the matrix."""

from __future__ import annotations

from enum import Enum

from attnmatrix.cases.case import ForwardMode


class RunnerMode(str, Enum):
    """How a serving engine drives the backend; the value is the id, :attr:`column` the heading."""

    EAGER = "eager"
    CG_DECODE = "cg_decode"
    PCG_EXTEND = "pcg_extend"
    BCG_EXTEND = "bcg_extend"
    VERIFY = "verify"
    VERIFY_CG = "verify_cg"
    DE = "de"
    DE_CG = "de_cg"
    DE_V2_CG = "de_v2_cg"
    EAGLE_DRAFT = "eagle_draft"
    EAGLE_DE = "eagle_de"
    FKVMTP = "fkvmtp"
    HANDOFF = "handoff"

    @property
    def column(self) -> str:
        return _COLUMNS[self]

    @property
    def uses_graph(self) -> bool:
        """Whether the adapter captures and replays a graph (CUDA graph, or the tape on a CPU)."""
        return self not in (RunnerMode.EAGER, RunnerMode.VERIFY, RunnerMode.DE, RunnerMode.HANDOFF)

    @property
    def pads_tokens(self) -> bool:
        """Whether captured sizes count tokens; else they count requests."""
        return self in (RunnerMode.PCG_EXTEND, RunnerMode.BCG_EXTEND)

    @property
    def forward_modes(self) -> tuple[ForwardMode, ...]:
        """The forward modes this runner mode drives."""
        return _FORWARD[self]


_COLUMNS = {
    RunnerMode.EAGER: "Eager",
    RunnerMode.CG_DECODE: "CG decode",
    RunnerMode.PCG_EXTEND: "PCG extend",
    RunnerMode.BCG_EXTEND: "BCG extend",
    RunnerMode.VERIFY: "Verify eager",
    RunnerMode.VERIFY_CG: "Verify CG",
    RunnerMode.DE: "DE eager",
    RunnerMode.DE_CG: "DE CG",
    RunnerMode.DE_V2_CG: "DE-V2 CG",
    RunnerMode.EAGLE_DRAFT: "EAGLE-draft",
    RunnerMode.EAGLE_DE: "EAGLE-DE",
    RunnerMode.FKVMTP: "FKVMTP",
    RunnerMode.HANDOFF: "Handoff",
}

_FORWARD = {
    RunnerMode.EAGER: (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.IDLE),
    RunnerMode.CG_DECODE: (ForwardMode.DECODE,),
    RunnerMode.PCG_EXTEND: (ForwardMode.EXTEND, ForwardMode.MIXED),
    RunnerMode.BCG_EXTEND: (ForwardMode.EXTEND, ForwardMode.MIXED),
    RunnerMode.VERIFY: (ForwardMode.TARGET_VERIFY,),
    RunnerMode.VERIFY_CG: (ForwardMode.TARGET_VERIFY,),
    RunnerMode.DE: (ForwardMode.DRAFT_EXTEND,),
    RunnerMode.DE_CG: (ForwardMode.DRAFT_EXTEND,),
    RunnerMode.DE_V2_CG: (ForwardMode.DRAFT_EXTEND_V2,),
    RunnerMode.EAGLE_DRAFT: (ForwardMode.DECODE,),
    RunnerMode.EAGLE_DE: (ForwardMode.DRAFT_EXTEND,),
    RunnerMode.FKVMTP: (ForwardMode.DECODE,),
    RunnerMode.HANDOFF: (ForwardMode.EXTEND,),
}
