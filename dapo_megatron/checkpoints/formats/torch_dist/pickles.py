"""Reading pickles without running them.

A pickle names classes and functions, and asks the reader to call them. This reader calls none: each
allowed name becomes an `Inert` object that only keeps what it was called with. Any other name is an
error.
"""

from __future__ import annotations

import io
import pickle
import reprlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from dapo_megatron.types import CheckpointError

MAX_INTEGER = 2**63 - 1
"""Maximum of sizes and offsets."""


class _Shortener(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write integers of thousands of digits.
        bits = x.bit_length()
        return f"an integer of {bits:,} bits" if bits > 1000 else super().repr_int(x, level)


shorten = _Shortener().repr
"""Returns a short form of repr for any value."""


class Inert:
    """Stands for an object of a pickle. It keeps the arguments and the state of that object."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an item of a dict subclass."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the object that was pickled."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


_CHECKPOINT = "torch.distributed.checkpoint."
_MEGATRON = "megatron.core."
_NAMES = {
    _CHECKPOINT + "metadata": (
        "Metadata MetadataIndex TensorStorageMetadata ChunkStorageMetadata BytesStorageMetadata "
        "TensorProperties StorageMeta _MEM_FORMAT_ENCODING"
    ),
    _CHECKPOINT + "filesystem": "_StorageInfo",
    _CHECKPOINT + "planner": "SavePlan WriteItem WriteItemType TensorWriteData",
    # Placeholders in checkpoints of Megatron-core 0.15 and before.
    _MEGATRON + "dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    # What torch.save writes for tensors.
    "torch._utils": "_rebuild_tensor_v2 _rebuild_parameter",
    "torch.serialization": "_get_layout",
    "torch": (
        "device DoubleStorage FloatStorage HalfStorage BFloat16Storage LongStorage IntStorage "
        "ShortStorage CharStorage ByteStorage BoolStorage"
    ),
    # What Megatron-core allows in common.pt (megatron/core/safe_globals.py).
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
    "signal": "Signals",
    "_io": "BytesIO",
    "numpy": "ndarray dtype",
    "numpy.dtypes": "UInt32DType",
    "numpy.core.multiarray": "_reconstruct",
    "numpy._core.multiarray": "_reconstruct",
    _MEGATRON + "enums": "ModelType",
    _MEGATRON + "optimizer.optimizer_config": "OptimizerConfig",
    _MEGATRON + "rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    _MEGATRON + "transformer.enums": (
        "AttnBackend CudaGraphModule CudaGraphScope InferenceCudaGraphScope"
    ),
    # How pickle writes bytes and sets in protocol 2.
    "_codecs": "encode",
    "builtins": "set frozenset bytearray",
}
_ALLOWED = {(module, name) for module, names in _NAMES.items() for name in names.split()}
_DTYPES = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8"


_MAX_KEY = 16
"""Maximum length of a tuple that is a key. Megatron's have two numbers."""
_NUM_BYTES = {
    pickle.EMPTY_SET: 216,
    pickle.FROZENSET: 216,
    pickle.EMPTY_DICT: 64,
    pickle.DICT: 64,
    pickle.EMPTY_LIST: 56,
    pickle.LIST: 56,
    pickle.MARK: 56,
}
"""Memory of what an opcode of one byte creates."""
_MAX_GROWTH = 24
"""Maximum of this memory per byte of the pickle. Those written here have about 2."""


def _size(values: tuple[int, ...]) -> tuple[int, ...]:
    """Return `values` as they are. A copy of a long one at each of many calls takes memory."""
    if type(values) is not tuple:
        raise TypeError("torch.Size of something else than a tuple")
    return values


def _ordered_dict() -> OrderedDict[Any, Any]:
    """Return an empty dict, which the pickle fills. Arguments would be copied."""
    return OrderedDict()


# Harmless values that the reader needs as they are.
_VALUES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _ordered_dict,
    **{("torch", name): getattr(torch, name) for name in (*_DTYPES.split(), "bool")},
}


class _Unpickler(pickle._Unpickler):
    """Unpickles into `Inert` objects. Each unpickler creates the classes again, so that a pickle
    that changes one changes nothing outside of itself.

    It is the unpickler in Python: that in C allocates as much memory as a single number in the
    pickle says. Time and memory are proportional to the length of the pickle: whatever it names
    twice is neither copied nor hashed twice.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._classes: dict[tuple[str, str], type[Inert]] = {}
        self.room = 2**20 + _MAX_GROWTH * len(data)
        """Bytes that empty containers may still take."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        if (module, name) not in _ALLOWED:
            raise _RefusedError(f"{module}.{name}")
        key = (module, name)
        return self._classes.setdefault(key, type(name, (Inert,), {}))

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of a storage: ('storage', class, key, device, elements)."""
        return pid

    def _call(self) -> None:
        """Replace a class or function and its arguments on the stack by an object."""
        args = self.stack.pop()
        function = self.stack.pop()
        if type(args) is not tuple:
            raise TypeError("a call whose arguments are no tuple")
        if isinstance(function, type) and issubclass(function, Inert):
            result: Any = function()
            result.args = args
        elif function in (_size, _ordered_dict) and len(args) == (function is _size):
            result = function(*args)
        else:
            raise TypeError("a call of something that is no function, or with other arguments")
        self.stack.append(result)

    def _set_state(self) -> None:
        """Give an object its state. That of other objects than Inert ones is not needed."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Inert):
            self.stack[-1].state = state

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _call
    dispatch[pickle.BUILD[0]] = _set_state
    # Calls that Python 3 writes for no class in the list.
    for opcode in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX):
        del dispatch[opcode[0]]


def _with_short_keys(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """Return the reader of an opcode, which raises TypeError if one of its keys takes long to hash.
    A pickle can use one key often. `keys` are their places on the stack."""

    def checked(unpickler: _Unpickler) -> None:
        for key in unpickler.stack[keys]:
            items = key if type(key) is tuple else (key,)
            if len(items) > _MAX_KEY or not all(map(_is_short, items)):
                raise TypeError("a key that is neither a name nor a number")
        load(unpickler)

    return checked


def _is_short(value: Any) -> bool:
    if type(value) is int:
        return value.bit_length() <= 64
    return value is None or isinstance(value, (str, bytes, bool, float, torch.dtype, Inert))


for _opcode, _keys in {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}.items():
    _load = _Unpickler.dispatch[_opcode[0]]
    _Unpickler.dispatch[_opcode[0]] = _with_short_keys(_load, _keys)


def _limited(load: Callable[[Any], None], num_bytes: int) -> Callable[[Any], None]:
    """Return the reader of an opcode that creates a container of `num_bytes`."""

    def checked(unpickler: _Unpickler) -> None:
        unpickler.room -= num_bytes
        if unpickler.room < 0:
            raise MemoryError("too many empty containers")
        load(unpickler)

    return checked


for _opcode, _num_bytes in _NUM_BYTES.items():
    _load = _Unpickler.dispatch[_opcode[0]]
    _Unpickler.dispatch[_opcode[0]] = _limited(_load, _num_bytes)


class _RefusedError(Exception):
    """A pickle names a class or function that is not allowed."""


def load_pickle(data: bytes, where: str) -> Any:
    """Return the content of a pickle, with `Inert` objects in place of its classes.

    Raises CheckpointError that begins with `where` and names what is refused or damaged.
    """
    try:
        return _Unpickler(data).load()
    except _RefusedError as refused:
        raise CheckpointError(
            f"{where}: refused, because its pickle names {refused}, which no checkpoint of "
            "Megatron needs; loading it elsewhere could run a program. Get it from its source again"
        ) from None
    except Exception as error:  # noqa: BLE001 - damaged data may raise anything
        raise CheckpointError(
            f"{where}: damaged: it cannot be unpickled ({type(error).__name__}: {error}); copy it "
            "again"
        ) from None


def kind_of(value: Any) -> str:
    """Return the name of the class that an object had when it was pickled."""
    return type(value).__name__
