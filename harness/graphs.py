"""Graphs behind one interface: ``torch.cuda.CUDAGraph`` on a GPU, the tape elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

import torch

from attnmatrix.harness.tape import Tape


class Graph(Protocol):
    """What ran between :meth:`begin` and :meth:`end`, ready to run again on the same memory.

    ``kind`` is what the evidence says: ``cuda`` or ``tape``. After :meth:`end` the captured work has also run once.
    """

    kind: str

    def begin(self) -> None:
        """Start to capture. Whatever a graph cannot capture raises from here on."""

    def end(self) -> None:
        """Stop capturing."""

    def abort(self) -> None:
        """Stop capturing after an exception; the graph is of no use."""

    def replay(self) -> None:
        """Run what was captured."""


class CudaGraph:
    """A CUDA graph captured on a stream of its own. Graphs that feed each other share a ``pool``."""

    kind = "cuda"

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def begin(self) -> None:
        with ExitStack() as held:
            held.enter_context(_no_collection())
            torch.cuda.synchronize()
            held.enter_context(torch.cuda.stream(torch.cuda.Stream()))
            self._graph.capture_begin(pool=self._pool)
            self._held = held.pop_all()

    def end(self) -> None:
        with self._held:
            self._graph.capture_end()
        self.replay()
        torch.cuda.synchronize()

    def abort(self) -> None:
        with self._held, suppress(RuntimeError):  # the error that broke the capture is on its way already
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No cyclic garbage is collected within: destroying another graph would invalidate the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphMaker:
    """Makes the graphs of one captured size; on a GPU they share a private memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self) -> Graph:
        return Tape() if self._pool is None else CudaGraph(self._pool)


@contextmanager
def capturing(graph: Graph) -> Iterator[None]:
    """Capture the block."""
    graph.begin()
    try:
        yield
    except BaseException:
        graph.abort()
        raise
    graph.end()


def warm_up(device: torch.device, run: Callable[[], Any]) -> Any:
    """Run once outside any capture, on a side stream where there are streams: kernels are compiled, workspaces allocated."""
    if device.type != "cuda":
        return run()
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        result = run()
    current.wait_stream(side)
    torch.cuda.synchronize()
    return result
