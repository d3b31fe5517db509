from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_TRAIN: _ClassVar[Purpose]
    PURPOSE_REPORT: _ClassVar[Purpose]
PURPOSE_TRAIN: Purpose
PURPOSE_REPORT: Purpose

class ArraySpec(_message.Message):
    __slots__ = ("shape", "dtype", "classes")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    classes: int
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., classes: _Optional[int] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("name", "array")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    name: str
    array: ArraySpec
    def __init__(self, name: _Optional[str] = ..., array: _Optional[_Union[ArraySpec, _Mapping]] = ...) -> None: ...

class RowSpec(_message.Message):
    __slots__ = ("obs", "action", "latents")
    OBS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    LATENTS_FIELD_NUMBER: _ClassVar[int]
    obs: _containers.RepeatedCompositeFieldContainer[Column]
    action: _containers.RepeatedCompositeFieldContainer[Column]
    latents: _containers.RepeatedCompositeFieldContainer[Column]
    def __init__(self, obs: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., action: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., latents: _Optional[_Iterable[_Union[Column, _Mapping]]] = ...) -> None: ...

class WindowSpec(_message.Message):
    __slots__ = ("length", "context", "cross_episodes", "closed_only", "start", "last_start", "latents", "online", "annotate")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CROSS_EPISODES_FIELD_NUMBER: _ClassVar[int]
    CLOSED_ONLY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LAST_START_FIELD_NUMBER: _ClassVar[int]
    LATENTS_FIELD_NUMBER: _ClassVar[int]
    ONLINE_FIELD_NUMBER: _ClassVar[int]
    ANNOTATE_FIELD_NUMBER: _ClassVar[int]
    length: int
    context: int
    cross_episodes: bool
    closed_only: bool
    start: str
    last_start: bool
    latents: str
    online: bool
    annotate: bool
    def __init__(self, length: _Optional[int] = ..., context: _Optional[int] = ..., cross_episodes: _Optional[bool] = ..., closed_only: _Optional[bool] = ..., start: _Optional[str] = ..., last_start: _Optional[bool] = ..., latents: _Optional[str] = ..., online: _Optional[bool] = ..., annotate: _Optional[bool] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("row", "window", "capacity", "max_envs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    MAX_ENVS_FIELD_NUMBER: _ClassVar[int]
    row: RowSpec
    window: WindowSpec
    capacity: int
    max_envs: int
    def __init__(self, row: _Optional[_Union[RowSpec, _Mapping]] = ..., window: _Optional[_Union[WindowSpec, _Mapping]] = ..., capacity: _Optional[int] = ..., max_envs: _Optional[int] = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("table", "spec", "seed")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    table: str
    spec: TableSpec
    seed: int
    def __init__(self, table: _Optional[str] = ..., spec: _Optional[_Union[TableSpec, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...

class ConfigureResponse(_message.Message):
    __slots__ = ("incarnation", "bytes")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    bytes: int
    def __init__(self, incarnation: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class OpenStreamRequest(_message.Message):
    __slots__ = ("table", "stream", "num_envs")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NUM_ENVS_FIELD_NUMBER: _ClassVar[int]
    table: str
    stream: str
    num_envs: int
    def __init__(self, table: _Optional[str] = ..., stream: _Optional[str] = ..., num_envs: _Optional[int] = ...) -> None: ...

class OpenStreamResponse(_message.Message):
    __slots__ = ("incarnation", "epoch", "next_tick", "first_env_id")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_TICK_FIELD_NUMBER: _ClassVar[int]
    FIRST_ENV_ID_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    epoch: int
    next_tick: int
    first_env_id: int
    def __init__(self, incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., next_tick: _Optional[int] = ..., first_env_id: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("header", "payload", "padding")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    header: Header
    payload: bytes
    padding: bytes
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., payload: _Optional[bytes] = ..., padding: _Optional[bytes] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("table", "incarnation", "columns", "count", "append", "windows", "write_back", "shared", "slot")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    WRITE_BACK_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    table: str
    incarnation: int
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    count: int
    append: AppendHeader
    windows: WindowsHeader
    write_back: WriteBackHeader
    shared: SharedMemory
    slot: int
    def __init__(self, table: _Optional[str] = ..., incarnation: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., count: _Optional[int] = ..., append: _Optional[_Union[AppendHeader, _Mapping]] = ..., windows: _Optional[_Union[WindowsHeader, _Mapping]] = ..., write_back: _Optional[_Union[WriteBackHeader, _Mapping]] = ..., shared: _Optional[_Union[SharedMemory, _Mapping]] = ..., slot: _Optional[int] = ...) -> None: ...

class AppendHeader(_message.Message):
    __slots__ = ("stream", "epoch", "tick", "ticks", "env_id")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICK_FIELD_NUMBER: _ClassVar[int]
    TICKS_FIELD_NUMBER: _ClassVar[int]
    ENV_ID_FIELD_NUMBER: _ClassVar[int]
    stream: str
    epoch: int
    tick: int
    ticks: int
    env_id: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stream: _Optional[str] = ..., epoch: _Optional[int] = ..., tick: _Optional[int] = ..., ticks: _Optional[int] = ..., env_id: _Optional[_Iterable[int]] = ...) -> None: ...

class WindowsHeader(_message.Message):
    __slots__ = ("last", "items")
    LAST_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    last: bool
    items: int
    def __init__(self, last: _Optional[bool] = ..., items: _Optional[int] = ...) -> None: ...

class WriteBackHeader(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("path", "slot_bytes", "slots")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    path: str
    slot_bytes: int
    slots: int
    def __init__(self, path: _Optional[str] = ..., slot_bytes: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class AppendAck(_message.Message):
    __slots__ = ("tick",)
    TICK_FIELD_NUMBER: _ClassVar[int]
    tick: int
    def __init__(self, tick: _Optional[int] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("table", "batch", "purpose", "shared", "slot")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    table: str
    batch: int
    purpose: Purpose
    shared: SharedMemory
    slot: int
    def __init__(self, table: _Optional[str] = ..., batch: _Optional[int] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., shared: _Optional[_Union[SharedMemory, _Mapping]] = ..., slot: _Optional[int] = ...) -> None: ...

class WriteBackAck(_message.Message):
    __slots__ = ("written",)
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    written: int
    def __init__(self, written: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: str
    def __init__(self, table: _Optional[str] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("rows", "rows_held", "bytes_held", "episodes", "items", "online_queue", "sampled_windows", "written_back", "stale", "incarnation", "num_envs", "credit")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_HELD_FIELD_NUMBER: _ClassVar[int]
    BYTES_HELD_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ONLINE_QUEUE_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BACK_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_ENVS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    rows: int
    rows_held: int
    bytes_held: int
    episodes: int
    items: int
    online_queue: int
    sampled_windows: int
    written_back: int
    stale: int
    incarnation: int
    num_envs: int
    credit: int
    def __init__(self, rows: _Optional[int] = ..., rows_held: _Optional[int] = ..., bytes_held: _Optional[int] = ..., episodes: _Optional[int] = ..., items: _Optional[int] = ..., online_queue: _Optional[int] = ..., sampled_windows: _Optional[int] = ..., written_back: _Optional[int] = ..., stale: _Optional[int] = ..., incarnation: _Optional[int] = ..., num_envs: _Optional[int] = ..., credit: _Optional[int] = ...) -> None: ...

class GrantRequest(_message.Message):
    __slots__ = ("table", "rows")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    table: str
    rows: int
    def __init__(self, table: _Optional[str] = ..., rows: _Optional[int] = ...) -> None: ...

class GrantResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MarkRequest(_message.Message):
    __slots__ = ("table", "name")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    table: str
    name: str
    def __init__(self, table: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class MarkResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("table", "name")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    table: str
    name: str
    def __init__(self, table: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class ListMarksRequest(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: str
    def __init__(self, table: _Optional[str] = ...) -> None: ...

class ListMarksResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("table", "name")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    table: str
    name: str
    def __init__(self, table: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ForgetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
