"""Reads pickles without executing them: the one reader of pickled data in this project.

A pickle is a program for a small stack machine.  This one knows the instructions that CPython's pickler writes for
plain values in protocols 2 to 5, and a table of admitted names.  It imports nothing, looks nothing up by name, and
calls nothing but the functions of the table, which are ours and only build descriptions of the payload's content:

    bytes -> PayloadReader -> lists, tuples, dicts, text, numbers, `Record`s, and what the table's functions return

Bytes objects stay views of the payload.  No instruction takes memory for more than the payload holds, and a `Budget`
bounds instructions, so time and memory are bounded by the caps alone.

A dict may be read in two halves: what the second half makes depends on a `Front` alone, and may be remembered.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from weight_sync.errors import WeightRequestError

_MAX_MARKS = 64
_MAX_INT_BYTES = 16  # torch's magic number has ten
_MAX_NAME_BYTES = 256
_MAX_FRONT = 1000
"""Instructions of a front: a tensor has about 60."""


@dataclass
class Budget:
    """Instructions left to all pickles of one call."""

    instructions: int

    def spend(self, count: int) -> None:
        """Take `count` instructions from the budget.  Raises `WeightRequestError` if fewer are left."""
        self.instructions -= count
        if self.instructions < 0:
            raise WeightRequestError("the payload has too many instructions; send the tensors in smaller buckets")


@dataclass(frozen=True)
class Function:
    """An admitted name that a pickle may call: `call(*arguments)` with values that the reader made.

    `call` checks its arguments; a `TypeError` or `ValueError` of it means a malformed payload.  `is_plain`: it makes a
    value of plain values, and notes nothing.
    """

    call: Callable[..., Any]
    is_plain: bool = False


@dataclass(frozen=True)
class RecordType:
    """An admitted class whose instances are read as `Record`s; nothing of the class itself runs."""

    name: str
    fields: frozenset[str]


@dataclass
class Record:
    """An instance of an admitted class: its fields as the payload gives them.  `values` is None until they came."""

    type: RecordType
    values: dict[str, Any] | None = None


Admitted = Mapping[tuple[str, str], Any]
"""(module, name) -> `Function`, `RecordType`, or a value that the name stands for."""


class Front(NamedTuple):
    """A pickled dict that was read as far as its second key.

    `value`: of the first.  `rest`: the bytes after the second, without the headers of frames.  `memo`: what the pickle
    may fetch again.
    """

    value: Any
    rest: bytes
    memo: tuple[tuple[int, Any], ...]


class PayloadReader:
    """One buffer with one or more pickles in it.

    `resolve_persistent` gives the object that a persistent id names; without it persistent ids are refused.
    """

    def __init__(
        self,
        data: memoryview,
        admitted: Admitted,
        budget: Budget,
        resolve_persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self.position = 0
        self._frame_end = len(data)
        self._data = data
        self._admitted = admitted
        self._budget = budget
        self._resolve_persistent = resolve_persistent
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        """Return the next pickle's value; `position` is then the first byte behind it.

        Raises `WeightRequestError`, and nothing else whatever the bytes are.
        """
        with self._refusing():
            self._begin()
            return self._run()

    def read_front(self, first: str, kind: type, second: str) -> Front | None:
        """Read a dict as far as the second of two keys, where the first has a value of this kind.

        None for any other pickle, which another reader may `read`.  Raises as `read`.
        """
        with self._refusing():
            self._begin()
            for _ in range(_MAX_FRONT):
                opcode = self._byte()
                if opcode == _STOP or (self._marks or [self._stack])[0] not in ([], [{}]):
                    break
                self._budget.spend(1)
                self._step(opcode)
                if self._marks != [[{}]] or len(self._stack) != 3 or type(self._stack[1]) is not kind:
                    continue
                if self._stack[::2] == [first, second]:
                    return Front(self._stack[1], self._rest(), tuple(self._memo.items()))
        return None

    def read_rest(self, first: str, second: str, front: Front) -> Any:
        """Return the dict whose front was read; this reader's buffer is the rest.  Raises as `read`."""
        with self._refusing():
            self._marks, self._stack, self._memo = [[{}]], [first, front.value, second], dict(front.memo)
            return self._run()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except IndexError:
            raise WeightRequestError("malformed pickle: it takes values that are not there") from None
        except (ValueError, TypeError, KeyError) as error:
            raise WeightRequestError(f"malformed pickle: {type(error).__name__}: {str(error)[:200]}") from None
        finally:
            self._stack, self._marks, self._memo = [], [], {}

    def _begin(self) -> None:
        if self._byte() != 0x80 or not 2 <= self._byte() <= 5:
            raise WeightRequestError("not a pickle of protocol 2 to 5")

    def _run(self) -> Any:
        while True:
            self._budget.spend(1)
            opcode = self._byte()
            if opcode == _STOP:
                if len(self._stack) != 1 or self._marks:
                    raise ValueError("it leaves values on the stack at its end")
                return self._stack.pop()
            self._step(opcode)

    def _step(self, opcode: int) -> None:
        step = _STEPS.get(opcode)
        if step is None:
            raise WeightRequestError(f"the payload uses pickle instruction 0x{opcode:02x}, which is not allowed")
        step(self)

    def _rest(self) -> bytes:
        """Return the bytes from here on, without the headers of the frames that follow one another.

        Where a frame ends depends on the lengths of all before it, so equal values may be cut in other places.
        """
        parts = []
        while True:
            end = max(self.position, self._frame_end)
            parts.append(self._data[self.position : end])
            self.position = end
            if self._data[end : end + 1] != bytes([_FRAME]):
                return b"".join((*parts, self._data[end:]))
            self.position += 1
            self._begin_frame(self._number(_U8))

    # --- bytes ----------------------------------------------------------------------------------------------------

    def _byte(self) -> int:
        value = self._data[self.position]
        self.position += 1
        return value

    def _take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self._data):
            raise WeightRequestError("the payload ends in the middle of a pickle")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def _number(self, layout: struct.Struct) -> int:
        number: int = layout.unpack(self._take(layout.size))[0]
        return number

    def _line(self) -> str:
        window = bytes(self._data[self.position : self.position + _MAX_NAME_BYTES])
        length = window.index(b"\n")
        self.position += length + 1
        return window[:length].decode("ascii")

    def _begin_frame(self, count: int) -> None:
        self._frame_end = self.position + count
        if self._frame_end > len(self._data):
            raise WeightRequestError("the payload ends in the middle of a pickle")

    def _long(self, count: int) -> None:
        if count > _MAX_INT_BYTES:
            raise ValueError("an integer is too long")
        self._push(int.from_bytes(self._take(count), "little", signed=True))

    def _text(self, count: int) -> None:
        self._push(str(self._take(count), "utf-8"))

    # --- stack ----------------------------------------------------------------------------------------------------

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop_to_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def _mark(self) -> None:
        if len(self._marks) == _MAX_MARKS:
            raise ValueError("nested too deeply")
        self._marks.append(self._stack)
        self._stack = []

    # --- containers -----------------------------------------------------------------------------------------------

    def _short_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to an object other than a list")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        keys = items[::2]
        # Text only: the hash of a nested tuple recurses in C.
        if type(target) is not dict or len(items) % 2 or any(type(key) is not str for key in keys):
            raise ValueError("it sets an item outside a dict with text keys")
        target.update(zip(keys, items[1::2], strict=True))

    # --- names, calls, records ------------------------------------------------------------------------------------

    def _push_admitted(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("the name of a global is not text")
        try:
            self._push(self._admitted[module, name])
        except KeyError:
            shown = f"{module}.{name}"[:_MAX_NAME_BYTES]
            raise WeightRequestError(f"the payload names {shown!r}, which is not allowed") from None

    def _call(self) -> None:
        arguments, target = self._stack.pop(), self._stack.pop()
        if type(arguments) is not tuple:
            raise ValueError("the arguments of a call are not a tuple")
        if type(target) is RecordType and not arguments:
            self._push(Record(target))
        elif type(target) is Function:
            self._push(target.call(*arguments))
        else:
            raise WeightRequestError("the payload calls an object that is not an allowed function")

    def _new_record(self) -> None:
        arguments, target = self._stack.pop(), self._stack.pop()
        if type(target) is not RecordType or type(arguments) is not tuple or arguments:
            raise WeightRequestError("the payload creates an object of a class that is not allowed")
        self._push(Record(target))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is not Record or target.values is not None:
            raise WeightRequestError("the payload sets the state of an object that has none")
        if type(state) is not dict or not state.keys() <= target.type.fields:
            raise WeightRequestError(f"the payload sets unknown fields of a {target.type.name}")
        target.values = dict(state)

    def _persistent(self) -> None:
        if self._resolve_persistent is None:
            raise WeightRequestError("the payload uses a persistent id where none is allowed")
        self._push(self._resolve_persistent(self._stack.pop()))

    # --- memo -----------------------------------------------------------------------------------------------------

    def _remember(self, index: int) -> None:
        self._memo[index] = self._stack[-1]


_U1, _U2, _I4, _U4, _U8 = (struct.Struct(layout) for layout in ("<B", "<H", "<i", "<I", "<Q"))
_STOP = ord(".")
_FRAME = 0x95

Step = Callable[[PayloadReader], None]


def _constant(value: Any) -> Step:
    return lambda reader: reader._push(value)


def _numbered(codes: Mapping[int, struct.Struct], step: Callable[[PayloadReader, int], None]) -> dict[int, Step]:
    """Return instructions that begin with a number, each in a layout of its own, and do the same with it."""

    def read_first(layout: struct.Struct) -> Step:
        return lambda reader: step(reader, reader._number(layout))

    return {code: read_first(layout) for code, layout in codes.items()}


def _set_item(reader: PayloadReader) -> None:
    value, key = reader._stack.pop(), reader._stack.pop()
    reader._set_items([key, value])


def _stack_global(reader: PayloadReader) -> None:
    name, module = reader._stack.pop(), reader._stack.pop()
    reader._push_admitted(module, name)


# Left out on purpose: INST, OBJ, EXT1-4, NEWOBJ_EX, PERSID, DUP, sets, bytearrays, buffers, floats and all text forms.
_STEPS: dict[int, Step] = {
    **_numbered({_FRAME: _U8}, PayloadReader._begin_frame),
    ord("("): PayloadReader._mark,
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    **_numbered({ord("J"): _I4, ord("K"): _U1, ord("M"): _U2}, PayloadReader._push),
    **_numbered({0x8A: _U1}, PayloadReader._long),
    **_numbered({0x8C: _U1, ord("X"): _U4, 0x8D: _U8}, PayloadReader._text),
    **_numbered({ord("C"): _U1, ord("B"): _U4, 0x8E: _U8}, lambda reader, count: reader._push(reader._take(count))),
    ord("]"): lambda reader: reader._push([]),
    ord("}"): lambda reader: reader._push({}),
    ord(")"): _constant(()),
    0x85: lambda reader: reader._short_tuple(1),
    0x86: lambda reader: reader._short_tuple(2),
    0x87: lambda reader: reader._short_tuple(3),
    ord("t"): lambda reader: reader._push(tuple(reader._pop_to_mark())),
    ord("a"): lambda reader: reader._append([reader._stack.pop()]),
    ord("e"): lambda reader: reader._append(reader._pop_to_mark()),
    ord("s"): _set_item,
    ord("u"): lambda reader: reader._set_items(reader._pop_to_mark()),
    0x94: lambda reader: reader._remember(len(reader._memo)),
    **_numbered({ord("q"): _U1, ord("r"): _U4}, PayloadReader._remember),
    **_numbered({ord("h"): _U1, ord("j"): _U4}, lambda reader, index: reader._push(reader._memo[index])),
    ord("c"): lambda reader: reader._push_admitted(reader._line(), reader._line()),
    0x93: _stack_global,
    ord("R"): PayloadReader._call,
    0x81: PayloadReader._new_record,
    ord("b"): PayloadReader._build,
    ord("Q"): PayloadReader._persistent,
}
