"""The implementations that benches/peers.py sets side by side, each set up as its own users would on a CPU in float32.

An implementation is a function (model, x, n_loops, n_threads) -> settings: by name, calls that take prompts like x [B, T, d]
and give predictions [B, N] as an array. Where it is not plain which setting is the fastest, all are given, and peers.py takes
the best.
"""

from __future__ import annotations

import functools
import importlib
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from heap import KEEP_HEAP
from torch import Tensor, nn

import looped
from looped.bench.rounds import Way, sample
from looped.bench.shapes import random_model
from looped.model import LoopedTransformer

Call = Callable[[Tensor], np.ndarray]
Settings = dict[str, Call]


class AllLoops(nn.Module):
    """The whole pass, with the number of loops fixed: what is compiled and exported."""

    def __init__(self, model: LoopedTransformer, n_loops: int) -> None:
        super().__init__()
        self.model, self.n_loops = model, n_loops

    def forward(self, prompts: Tensor) -> Tensor:
        return self.model(prompts, n_loops=self.n_loops, backend="eager")


def ours(model: LoopedTransformer, x: Tensor, n_loops: int, n_threads: int) -> Settings:
    return {"solve": lambda x: looped.solve(model, x, n_loops=n_loops, backend="cpu").prediction.numpy()}


def eager(model: LoopedTransformer, x: Tensor, n_loops: int, n_threads: int) -> Settings:
    @torch.inference_mode()
    def call(x: Tensor) -> np.ndarray:
        return model(x, n_loops=n_loops, backend="eager").numpy()

    return {"": call}


def compiled(model: LoopedTransformer, x: Tensor, n_loops: int, n_threads: int, with_whole: bool = True) -> Settings:
    """torch.compile of one loop, and for single prompts of all loops in one graph, where a call's overhead counts."""
    step, whole = torch.compile(model.step, dynamic=False), torch.compile(AllLoops(model, n_loops), dynamic=False)

    @torch.inference_mode()
    def call_step(x: Tensor) -> np.ndarray:
        P = model.embed(x)
        Y = model.initial_state(P)
        for _ in range(n_loops):
            Y = step(Y, P)
        return model.read(Y).numpy()

    @torch.inference_mode()
    def call_whole(x: Tensor) -> np.ndarray:
        return whole(x).numpy()

    return {"one loop": call_step} | ({"all loops": call_whole} if len(x) == 1 and with_whole else {})


def onnxruntime(model: LoopedTransformer, x: Tensor, n_loops: int, n_threads: int) -> Settings:
    """ONNX Runtime on the exported graph: the loops unrolled, and as an ONNX Loop."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = n_threads, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3

    def settings() -> Iterator[tuple[str, Call]]:
        graphs = {"unrolled": export(AllLoops(model, n_loops), x), "Loop": export_loop(model, x, n_loops)}
        for name, graph in graphs.items():
            session = ort.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
            key = session.get_inputs()[0].name
            yield name, lambda x, session=session, key=key: session.run(None, {key: x.numpy()})[0]

    return dict(settings())


@functools.cache
def openvino_core() -> Any:
    """The one OpenVINO core of this process.

    Each core's CPU plugin sets an alternate signal stack and, when it goes, brings back the one that it found. Of two cores the
    first to go frees the stack that the second then brings back, and the next signal kills the process (seen with 2026.4).
    """
    import openvino as ov

    return ov.Core()


def openvino(model: LoopedTransformer, x: Tensor, n_loops: int, n_threads: int) -> Settings:
    """OpenVINO on the converted module: for latency, and for batches also as one stream a thread."""
    import openvino as ov

    core = openvino_core()
    config: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": n_threads}

    def compile_for(batch: int, hint: dict[str, Any]) -> Any:
        example = x[:batch].clone()
        with quiet():
            converted = ov.convert_model(AllLoops(model, n_loops), example_input=example, input=list(example.shape))
        return core.compile_model(converted, "CPU", config | hint)

    whole = compile_for(len(x), {"PERFORMANCE_HINT": "LATENCY"})
    settings: Settings = {"latency": lambda x: whole(x.numpy())[0]}
    if n_threads > 1 and len(x) >= n_threads and len(x) % n_threads == 0:
        share = len(x) // n_threads
        streams = compile_for(share, {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": n_threads})
        queue = ov.AsyncInferQueue(streams, n_threads)

        def call(x: Tensor) -> np.ndarray:
            parts: dict[int, np.ndarray] = {}
            queue.set_callback(lambda request, i: parts.__setitem__(i, request.get_output_tensor(0).data.copy()))
            for i, part in enumerate(x.split(share)):
                queue.start_async(part.numpy(), i)
            queue.wait_all()
            return np.concatenate([parts[i] for i in range(len(parts))])

        settings["streams"] = call
    return settings


IMPLEMENTATIONS: dict[str, Callable[..., Settings]] = {
    "ours": ours,
    "eager": eager,
    "compile": compiled,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
}
NEEDS = {"onnxruntime": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino",)}


def missing(name: str) -> str | None:
    """The first package that an implementation needs and this installation lacks."""
    for package in NEEDS.get(name, ()):
        try:
            importlib.import_module(package)
        except ImportError:
            return package
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the exporters' notes on what they skip."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def export(module: nn.Module, *inputs: Tensor, names: tuple[list[str], list[str]] | None = None) -> Any:
    """An ONNX model."""
    named = {} if names is None else dict(input_names=names[0], output_names=names[1])
    with quiet():
        return torch.onnx.export(module, tuple(x.clone() for x in inputs), dynamo=True, verbose=False, **named).model_proto


class Method(nn.Module):
    """One method of a model as a module, for export."""

    def __init__(self, model: LoopedTransformer, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *inputs: Tensor) -> Tensor:
        return getattr(self.model, self.name)(*inputs)


def export_loop(model: LoopedTransformer, x: Tensor, n_loops: int) -> Any:
    """embed, an ONNX Loop of step, and read, as one model."""
    import onnx
    from onnx import TensorProto, helper

    B, T, d = x.shape
    state = torch.zeros(B, T, model.config.d_model)
    parts = [
        export(Method(model, "embed"), x, names=(["x"], ["P"])),
        export(Method(model, "step"), state, state, names=(["Y", "P"], ["Z"])),
        export(Method(model, "read"), state, names=(["last"], ["prediction"])),
    ]
    for i, part in enumerate(parts):  # ports keep their names, and join the parts; what is inside gets the part's number
        ports = {value.name for value in (*part.graph.input, *part.graph.output)}

        def renamed(name: str, i: int = i, ports: set[str] = ports) -> str:
            return name if name in ports or not name else f"{i}.{name}"

        for node in part.graph.node:
            node.name = f"{i}.{node.name}"
            node.input[:] = [renamed(name) for name in node.input]
            node.output[:] = [renamed(name) for name in node.output]
        for weight in part.graph.initializer:
            weight.name = renamed(weight.name)
    value = helper.make_tensor_value_info
    shape, go = [B, T, model.config.d_model], TensorProto.BOOL
    body = helper.make_graph(
        [*parts[1].graph.node, helper.make_node("Identity", ["go_in"], ["go_out"])],
        "one loop",
        [value("i", TensorProto.INT64, []), value("go_in", go, []), value("Y", TensorProto.FLOAT, shape)],
        [value("go_out", go, []), value("Z", TensorProto.FLOAT, shape)],
    )
    weights = [weight for part in parts for weight in part.graph.initializer]
    weights += [helper.make_tensor("n_loops", TensorProto.INT64, [], [n_loops]), helper.make_tensor("go", go, [], [True])]
    weights.append(onnx.numpy_helper.from_array(state.numpy(), "Y_0"))
    loop = helper.make_node("Loop", ["n_loops", "go", "Y_0"], ["last"], body=body)
    graph = helper.make_graph(
        [*parts[0].graph.node, loop, *parts[2].graph.node],
        "looped",
        [value("x", TensorProto.FLOAT, [B, T, d])],
        [value("prediction", TensorProto.FLOAT, [B, (T + 1) // 2])],
        weights,
    )
    made = helper.make_model(graph, opset_imports=parts[1].opset_import, ir_version=parts[1].ir_version)
    onnx.checker.check_model(made)
    return made


# Eager in a process with the default allocator --------------------------------------------------------------------------


class DefaultHeapEager:
    """Eager PyTorch in a process of its own that glibc's defaults govern; it waits while others are timed."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        kept = {name: os.environ.pop(name, None) for name in KEEP_HEAP}
        try:
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self.process.start()
        finally:
            os.environ.update({name: value for name, value in kept.items() if value is not None})
        theirs.close()

    def ask(self, *request: Any) -> Any:
        self.pipe.send(request)
        return self.pipe.recv()

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(5)
        self.process.kill()


def _serve(pipe: Any) -> None:
    """Answers requests until the pipe is closed: load (shape, prompts, n_loops, n_threads), use (part size), output (),
    sample (n_calls); or call (function, its arguments)."""
    prompts, model, call = None, None, None
    try:
        while True:
            what, *values = pipe.recv()
            answer: Any = None
            if what == "load":
                shape, prompts, n_loops, n_threads = values
                torch.set_num_threads(n_threads)
                model = eager(random_model(shape), prompts, n_loops, n_threads)[""]
            elif what == "use":
                call = in_parts(model, values[0])
            elif what == "call":
                answer = values[0](*values[1:])
            elif what == "output":
                answer = call(prompts)
            else:
                answer = sample(Way(functools.partial(call, prompts)), values[0])
            pipe.send(answer)
    except (EOFError, KeyboardInterrupt, OSError):
        pass


def in_parts(call: Call, size: int | None) -> Call:
    """A call that takes a batch in parts of `size` prompts, or whole for None: large batches leave the cache."""
    if size is None:
        return call
    return lambda x: np.concatenate([call(part) for part in x.split(size)])
