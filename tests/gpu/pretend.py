"""A CUDA device that is not there, as a pytest plugin: `PYTHONPATH=tests/gpu pytest -p pretend
FILE`, before torch is imported.

A tensor says it is on cuda:0 or cuda:1, holds its numbers on the CPU, and refuses what a device
refuses: tensors of two devices in one operation, a generator of another device,
a synchronisation in a graph's capture. Synchronisations are counted, by kind and line of the
package. A captured graph is replayed on the memory it was captured with.
A Triton kernel runs in Triton's interpreter. There is no asynchrony, no memory limit and no time
here.
"""
import contextlib
import copy
import ctypes
import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
ROOT = Path(__file__).resolve().parents[2]

# A device guard, hooks for autograd, and a new answer to "which accelerator is there?", which has
# to be loaded before torch's own.
GUARD = r"""
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/detail/CUDAHooksInterface.h>
using namespace c10;
static thread_local DeviceIndex current = 0;
struct Guard final : public impl::DeviceGuardImplInterface {
  Device whole(Device d) const {
    return Device(DeviceType::CUDA, d.index() < 0 ? current : d.index());
  }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    auto old = getDevice(); setDevice(d); return old;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device d) const override { if (d.index() >= 0) current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  Stream getStream(Device d) const noexcept override { return Stream(Stream::DEFAULT, whole(d)); }
  Stream exchangeStream(Stream s) const noexcept override { return s; }
  DeviceIndex deviceCount() const noexcept override { return 2; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
extern "C" int pretend_current() { return current; }
extern "C" void pretend_set(int i) { if (i >= 0) current = i; }
namespace at {
struct CUDAHooks final : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  void init() const override {}
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}
"""
ACCELERATOR = r"""
#include <cstdint>
#include <optional>
namespace c10 { enum class DeviceType : int8_t { CPU = 0, CUDA = 1 }; }
namespace at::accelerator {
__attribute__((visibility("default")))
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}
"""


def load_guard():
    torch = Path(importlib.util.find_spec("torch").origin).parent
    with tempfile.TemporaryDirectory() as folder:
        def build(name, source, *options):
            path = Path(folder) / f"{name}.so"
            command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-xc++", "-", "-o",
                       str(path), *options]
            subprocess.run(command, input=source, text=True, check=True)
            return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        build("accelerator", ACCELERATOR)
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(torch / "lib" / name), mode=ctypes.RTLD_GLOBAL)
        return build("guard", GUARD, f"-I{torch}/include", f"-L{torch}/lib", "-lc10", "-ltorch_cpu")


assert "torch" not in sys.modules, "the pretended GPU has to be loaded before torch"
C = load_guard()
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.utils._device  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

RealGenerator, real_tensor, real_as_tensor = torch.Generator, torch.tensor, torch.as_tensor
PINNED = []  # weak references to tensors in pinned memory: a copy of one waits for nobody
real_module_apply, real_set_swap = (torch.nn.Module._apply,
                                    torch.__future__.set_swap_module_params_on_conversion)
EVENTS = Counter()
# all launches; a capture: into which graph, on which device, launches elsewhere; Triton's launches;
# recordings of a training step
STATE = SimpleNamespace(real=False, launches=0, graph=None, device=None, outside=0, kernels=0,
                        recorded=0)


def place():
    "The line of the package or the benchmark that asks, with that of a library below it."
    frame, library = sys._getframe(1), ""
    while frame:
        name = os.path.abspath(frame.f_code.co_filename)
        if name.startswith((str(ROOT / "rlhf_notes"), str(ROOT / "benchmarks"))):
            return os.path.relpath(name, ROOT) + f":{frame.f_lineno}{library}"
        if not library and "/site-packages/" in name and "/torch/" not in name:
            library = f" ({name.split('/site-packages/')[1]})"
        frame = frame.f_back
    return "a test" + library


def event(kind, device=0):
    if STATE.graph and STATE.device == device:
        raise RuntimeError(
            f"CUDA error: operation not permitted when stream is capturing ({kind} at {place()})")
    EVENTS[kind, place()] += 1


@contextlib.contextmanager
def counted():
    """Synchronisations by kind (`kinds`) and by line (`lines`), and launches, of what happens
    inside.
    """
    events, launches, found = Counter(EVENTS), STATE.launches, SimpleNamespace()
    yield found
    found.lines, found.kinds = EVENTS - events, Counter()
    found.launches = STATE.launches - launches
    for (kind, _), n in found.lines.items(): found.kinds[kind] += n


def where(device):
    d = torch.device(device)
    return torch.device("cuda", C.pretend_current()) if d.type == "cuda" and d.index is None else d


# --- tensors

class CudaTensor(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner, device):
        layout = dict(strides=inner.stride(), storage_offset=inner.storage_offset(),
                      dtype=inner.dtype, layout=inner.layout)
        new = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **layout, device=device)
        new._inner = inner
        return new

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    @property
    def data(self): return CudaTensor(self._inner.detach(), self.device)
    @data.setter
    def data(self, new):
        assert new.device == self.device
        assert new.shape == self.shape
        assert new.stride() == self.stride()
        assert new.dtype == self.dtype
        self._inner = new._inner

    def data_ptr(self): return self._inner.data_ptr()
    def untyped_storage(self): return self._inner.untyped_storage()
    def new_tensor(self, data, dtype=None):
        return tensor(data, dtype=dtype or self.dtype, device=self.device)
    def numpy(self, *_, **__):
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")
    __array__ = numpy
    def tolist(self):
        event("D2H", self.device.index)
        return self._inner.tolist()
    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = new = CudaTensor(
                self._inner.detach().clone(), self.device).requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False): new._is_param = True
            new.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]
    def __reduce_ex__(self, protocol):  # comes back on the CPU, as with map_location="cpu"
        event("D2H", self.device.index)
        return self._inner.detach().__reduce_ex__(protocol)
    def __repr__(self, **_): return f"CudaTensor({self._inner}, {self.device})"
    def __format__(self, spec): return format(self.item(), spec)


def inner(x): return x._inner if isinstance(x, CudaTensor) else x
def on_cpu(tree):
    return pytree.tree_map(lambda x: inner(x).detach() if isinstance(x, torch.Tensor) else x, tree)


def to_gpu(tree, index=0):
    "Copies on the device; not counted."
    def copied(x):
        if not isinstance(x, torch.Tensor): return x
        return CudaTensor(
            x.detach().clone(), torch.device("cuda", index)).requires_grad_(x.requires_grad)
    return pytree.tree_map(copied, tree)


class Generator(RealGenerator):
    "One of a device has numbers of its own and a state that no other device takes."
    OF = {}  # _cdata -> generator: C++ hands out plain ones
    def __new__(cls, device="cpu"):
        if where(device).type != "cuda": return RealGenerator(device)
        self = RealGenerator.__new__(cls)
        Generator.OF[self._cdata], self._where = self, where(device)
        return self
    def __init__(self, device="cpu"): pass
    @property
    def device(self): return self._where
    def get_state(self):
        raise NotImplementedError("a CUDA generator's state fits no generator of a CPU")
    def manual_seed(self, seed): return super().manual_seed(seed + 1) and self


# --- operators

SYNCING = {"nonzero", "masked_select", "equal", "_unique", "_unique2", "unique_dim", "bincount",
           "is_nonzero", "_linalg_check_errors"}
FREE = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias",
        "lift_fresh", "_unsafe_view"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
ZERO_DIM = {"where", "masked_fill", "masked_fill_", "fill", "fill_", "lerp", "addcmul", "addcmul_",
            "addcdiv", "addcdiv_"}
LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}


def two_devices(func, a, b):
    raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two "
                       f"devices, {a} and {b}! ({func} at {place()})")


def dispatch(func, args, kwargs):
    flat = pytree.tree_leaves((args, kwargs))
    ours, plain = ([x for x in flat if isinstance(x, CudaTensor)],
                   [x for x in flat if isinstance(x, torch.Tensor)
                    and not isinstance(x, CudaTensor)])
    asked = None if kwargs.get("device") is None else where(kwargs["device"])
    target = asked or (ours[0].device if ours else torch.device("cpu"))
    for g in flat:
        if isinstance(g, RealGenerator) and (
            "cuda" if g._cdata in Generator.OF else "cpu") != target.type:
            raise RuntimeError(
                f"Expected a '{target.type}' device type for generator ({func} at {place()})")
    if not ours and target.type != "cuda":
        if not kwargs.get("pin_memory"): return func(*args, **kwargs)
        return pin_memory(func(*args, **kwargs | {"pin_memory": False}))
    if func.namespace == "rlhf_notes": return own_operator(func, args)
    schema, name = func._schema, func._schema.name.removeprefix("aten::")
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with MODE: return func.decompose(*args, **kwargs)  # in inference mode these arrive whole
    if name in ("_to_copy", "copy_"):
        a, b = (args[0].device, target) if name == "_to_copy" else (
            args[1].device, target := args[0].device)
        free = kwargs.get("non_blocking") or name == "copy_" and args[2:] == (True,)
        pinned = free and any(x() is args[0] for x in PINNED)
        if (a.type, b.type) == ("cpu", "cuda") and not pinned: event("H2D", b.index)
        if (a.type, b.type) == ("cuda", "cpu") and not pinned: event("D2H", a.index)
    elif name == "_local_scalar_dense":
        event("item", target.index)
        return func(inner(args[0]))
    elif ours:
        check_devices(func, name, ours, plain, args, asked)
        if name == "_fused_sdp_choice": return 0
        if name == "is_pinned": return False
    return run(func, schema, name, ours, target, args, kwargs)


def check_devices(func, name, ours, plain, args, asked):
    "Raise where devices are mixed; count what waits for the device."
    here = ours[0].device
    indices = {id(x) for x in args[1]} if name in INDEXING else set()
    for x in ours:
        if x.device != here: two_devices(func, here, x.device)
    for x in plain:
        if id(x) in indices: event("H2D", here.index)
        elif x.dim() == 0 and (torch.Tag.pointwise in func.tags or name in ZERO_DIM):
            if name == "where": event("H2D", here.index)
        elif x.device.type != "meta" and not (asked and name in LIKE):
            two_devices(func, here, x.device)
    boolean = any(id(x) in indices and x.dtype in (torch.bool, torch.uint8) for x in ours)
    if boolean and (name in ("index", "_unsafe_index") or args[2].numel() > 1):
        event("nonzero", here.index)
    if name in SYNCING or name == "repeat_interleave" and func._overloadname == "Tensor":
        event("nonzero", here.index)
    if name.startswith("masked_fill") and func._overloadname == "Tensor" and isinstance(
        args[2], CudaTensor):
        event("item", here.index)


def own_operator(func, args):
    "An operator of the package: its kernel for CUDA, or the one for all devices."
    kernels = torch._library.custom_ops.OPDEFS[func._schema.name]._backend_fns
    with MODE: return kernels.get("cuda", kernels.get(None))(*args)


def run(func, schema, name, ours, target, args, kwargs):
    "The operator on the inner tensors; recorded where a graph is captured."
    a, k = pytree.tree_map(
        inner,
        (args,
         kwargs | ({"device": torch.device("cpu")} if kwargs.get("device") is not None else {})))
    if k.get("pin_memory"): k["pin_memory"] = False
    # half_to_float is for a GPU alone
    if name in ("_softmax", "_log_softmax") and a[2]: a = (a[0].float(), a[1], False)
    # a GPU's alone too
    if func is torch.ops.aten.mm.dtype:
        func, a = torch.ops.aten.mm.default, (a[0].to(a[2]), a[1].to(a[2]))
    out = func(*a, **k)
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    if not view and name not in FREE: STATE.launches += 1
    if STATE.graph is not None and target.type == "cuda" and not view:
        if STATE.device != target.index: STATE.outside += name not in FREE
        else:
            STATE.graph.records.append(
                (func, a, k, out,
                 any(x.alias_info is not None and x.alias_info.is_write for x in schema.arguments)))
    same = {id(x._inner): x for x in ours}
    def wrap(x):
        if not isinstance(x, torch.Tensor): return x
        return same.get(
            id(x)) if id(x) in same else CudaTensor(x, target) if target.type == "cuda" else x
    # in inference mode a view of a normal tensor is a normal tensor
    normal = view and torch.is_inference_mode_enabled() and not ours[0].is_inference()
    with torch.inference_mode(False) if normal else contextlib.nullcontext():
        return pytree.tree_map(wrap, out)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


MODE = Mode()


# --- streams, graphs, kernels

class Stream:
    def __init__(self, device="cuda", **_): self.device = where(device)
    def wait_stream(self, other): pass


def current_stream(device="cuda"): return Stream(device)


@contextlib.contextmanager
def on_device(index):
    before = C.pretend_current()
    C.pretend_set(index)
    try: yield
    finally: C.pretend_set(before)


class CUDAGraph:
    def __init__(self): self.records = []
    def replay(self):
        with torch.no_grad(), _disable_current_modes():
            for func, args, kwargs, out, writes in self.records:
                new = func(*args, **kwargs)
                if not writes:
                    for old, x in zip(pytree.tree_leaves(out), pytree.tree_leaves(new)):
                        if isinstance(old, torch.Tensor): old.copy_(x)


@contextlib.contextmanager
def capture(graph, stream=None):
    stream = stream or Stream("cuda:0")  # torch makes its own once, on the device of the moment
    event("synchronize", stream.device.index)
    with on_device(stream.device.index):
        STATE.graph, STATE.device = graph, stream.device.index
        try: yield
        finally: STATE.graph = None
    if not graph.records: warnings.warn("The CUDA Graph is empty")


def make_graphed_callables(f, inputs, allow_unused_input=False):
    """The same function, if neither it nor its gradient waits while it is recorded; no leaf is a
    weight that learns, whose gradient would be added up on the recording's stream.
    """
    assert all(x.grad is None for x in inputs)
    with capture(CUDAGraph()): outputs = f(*inputs)
    with capture(CUDAGraph()):
        torch.autograd.grad(sum(y.sum() for y in outputs if y.requires_grad),
                            [x for x in inputs if x.requires_grad], allow_unused=allow_unused_input)
    STATE.recorded += 1
    return f


class Launcher:
    "A Triton kernel: interpreted, on the inner tensors, if their device is the current one."
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        assert all(n <= most for n, most in zip(grid, (2**31 - 1, 65535, 65535))), f"grid {grid}"
        def launch(*args, **kwargs):
            for x in args:
                if not isinstance(x, torch.Tensor): continue
                if not isinstance(x, CudaTensor):
                    raise ValueError(
                        "Pointer argument cannot be accessed from Triton (cpu tensor?)")
                if x.device.index != C.pretend_current():
                    raise RuntimeError(
                        f"a tensor on {x.device} in a launch on cuda:{C.pretend_current()}")
            def go(*args):
                with _disable_current_modes(): self.kernel[grid](*args, **kwargs)
            args = [inner(x) for x in args]
            go(*args)
            STATE.launches += 1
            STATE.kernels += 1
            if STATE.graph is not None and STATE.device == C.pretend_current():
                STATE.graph.records.append((go, args, {}, None, True))
        return launch


# --- torch as it is with a GPU

def tensor(data, *args, device=None, requires_grad=False, **kwargs):
    if device is None or torch.device(device).type != "cuda":
        return real_tensor(data, *args, device=device, requires_grad=requires_grad, **kwargs)
    return real_tensor(data, *args, **kwargs).to(device).requires_grad_(requires_grad)


def as_tensor(data, dtype=None, device=None):
    if isinstance(data, torch.Tensor) or device is None or torch.device(device).type != "cuda":
        return real_as_tensor(data, dtype=dtype, device=device)
    return real_tensor(data, dtype=dtype).to(device)


def module_apply(self, fn, recurse=True):
    "A parameter that goes to the device stays the same object, so that tied weights stay tied."
    real_set_swap(True)
    try: return real_module_apply(self, fn, recurse)
    finally: real_set_swap(False)


def pin_memory(x):
    new = x.clone()
    PINNED.append(weakref.ref(new))
    return new


def index_of(device):
    return device if isinstance(device, int) else where("cuda" if device is None else device).index


def patch():
    c = torch.cuda
    def answer(value, *names):  # a function for each: torch's compiler tells them apart
        for name in names: setattr(c, name, lambda *_, **__: value)
    answer(None, "_lazy_init", "init", "empty_cache", "reset_peak_memory_stats", "manual_seed",
           "manual_seed_all")
    answer(True, "is_available", "is_initialized", "is_bf16_supported")
    answer(0, "memory_allocated", "max_memory_allocated", "memory_reserved")
    answer("Pretended GPU", "get_device_name")
    answer((9, 0), "get_device_capability")
    answer((70 * 10**9, 80 * 10**9), "mem_get_info")
    answer(SimpleNamespace(name="Pretended GPU", total_memory=80 * 10**9, multi_processor_count=132,
                           major=9, minor=0), "get_device_properties")
    c.device_count, c.current_device = lambda: 2, lambda: C.pretend_current()
    c.set_device = lambda d: C.pretend_set(index_of(d))
    c.device_of = lambda x: on_device(x.get_device() if x.is_cuda else -1)
    c.device = lambda d: on_device(index_of(d))
    c.synchronize = lambda device=None: event("synchronize", index_of(device))
    c.Stream, c.CUDAGraph, c.graph, c.current_stream = Stream, CUDAGraph, capture, current_stream
    c.stream = lambda s: on_device(s.device.index)
    c.make_graphed_callables = make_graphed_callables
    c.is_current_stream_capturing = lambda: STATE.graph is not None
    c.amp.common.amp_definitely_not_available = lambda: False
    torch.Tensor.pin_memory = pin_memory
    torch.utils._device._device_constructors()  # remembers torch.tensor as it is
    torch.Generator, torch.tensor, torch.as_tensor, torch.nn.Module._apply = (Generator, tensor,
                                                                              as_tensor,
                                                                              module_apply)


patch()


@pytest.fixture(autouse=True)
def pretended(monkeypatch):
    "Operators go through the device; its kernels are off."
    from rlhf_notes import fast
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(fast, "eager",
                        lambda x: type(x) in (torch.Tensor, torch.nn.Parameter, CudaTensor)
                        and not torch.compiler.is_compiling() and not fast.transformed())
    monkeypatch.setattr(fast, "_interpreted", lambda: False)
    with MODE: yield


@pytest.fixture
def with_kernels(pretended, monkeypatch):
    "Triton's kernels, however few the numbers."
    from rlhf_notes import fast
    from rlhf_notes.fast import kernels, rows
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("_forward", "_backward", "_draw", "_scan", "_gae"):
        monkeypatch.setattr(kernels, name, Launcher(getattr(kernels, name)))
    monkeypatch.setattr(rows, "LARGE", 0)
    fast._runs.cache_clear()
    yield
    fast._runs.cache_clear()
