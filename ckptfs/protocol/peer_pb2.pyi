from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OfferRequest(_message.Message):
    __slots__ = ("content", "inode", "generation", "size", "digest", "blocks", "whole")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    content: int
    inode: int
    generation: int
    size: int
    digest: bytes
    blocks: bytes
    whole: bytes
    def __init__(self, content: _Optional[int] = ..., inode: _Optional[int] = ..., generation: _Optional[int] = ..., size: _Optional[int] = ..., digest: _Optional[bytes] = ..., blocks: _Optional[bytes] = ..., whole: _Optional[bytes] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("transfer", "lacking")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    lacking: bytes
    def __init__(self, transfer: _Optional[int] = ..., lacking: _Optional[bytes] = ...) -> None: ...

class OffersRequest(_message.Message):
    __slots__ = ("offers",)
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    offers: _containers.RepeatedCompositeFieldContainer[OfferRequest]
    def __init__(self, offers: _Optional[_Iterable[_Union[OfferRequest, _Mapping]]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("verified", "code", "why")
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    verified: bool
    code: int
    why: str
    def __init__(self, verified: _Optional[bool] = ..., code: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class OffersReply(_message.Message):
    __slots__ = ("verdicts",)
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ...) -> None: ...

class TransferRequest(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    def __init__(self, transfer: _Optional[int] = ...) -> None: ...

class ProgressReply(_message.Message):
    __slots__ = ("lacking",)
    LACKING_FIELD_NUMBER: _ClassVar[int]
    lacking: bytes
    def __init__(self, lacking: _Optional[bytes] = ...) -> None: ...

class FinishReply(_message.Message):
    __slots__ = ("verified",)
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    verified: bool
    def __init__(self, verified: _Optional[bool] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("content", "digest", "queued")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    content: int
    digest: bytes
    queued: bool
    def __init__(self, content: _Optional[int] = ..., digest: _Optional[bytes] = ..., queued: _Optional[bool] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("content", "inode", "generation", "size", "digest", "blocks")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    content: int
    inode: int
    generation: int
    size: int
    digest: bytes
    blocks: bytes
    def __init__(self, content: _Optional[int] = ..., inode: _Optional[int] = ..., generation: _Optional[int] = ..., size: _Optional[int] = ..., digest: _Optional[bytes] = ..., blocks: _Optional[bytes] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("content", "digest", "first", "count", "compress", "queued")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    content: int
    digest: bytes
    first: int
    count: int
    compress: bool
    queued: bool
    def __init__(self, content: _Optional[int] = ..., digest: _Optional[bytes] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., compress: _Optional[bool] = ..., queued: _Optional[bool] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("content", "timeout_ms")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    content: int
    timeout_ms: int
    def __init__(self, content: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class SealReply(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: Record
    def __init__(self, record: _Optional[_Union[Record, _Mapping]] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("contents",)
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    contents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, contents: _Optional[_Iterable[int]] = ...) -> None: ...

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingReply(_message.Message):
    __slots__ = ("now_ns", "version")
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    now_ns: int
    version: int
    def __init__(self, now_ns: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...
